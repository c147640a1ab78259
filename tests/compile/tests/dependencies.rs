//! How many crates a program gets with gpumem, gpumem's own among them. More need a reason, which is written in `Cargo.toml`.
//!
//! `cargo tree -p gpumem -e normal,build --no-dedupe --prefix none | sort -u` shows them. `nvml-wrapper` alone brings 14 that nothing else uses: it checks its enums
//! and errors with derive macros of its own (`darling`, `thiserror`).

use std::{collections::BTreeSet, env, ffi::OsString, process::Command};

/// The names and versions of the crates that gpumem is built from with these features.
fn crates(features: &[&str]) -> BTreeSet<String> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["tree", "--offline", "--locked", "--package=gpumem"]);
    command.args(["--edges=normal,build", "--prefix=none", "--no-dedupe", "--target=x86_64-unknown-linux-gnu"]);
    let output = command.args(features).output().expect("cargo starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    let words = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    String::from_utf8_lossy(&output.stdout).lines().map(words).collect()
}

#[track_caller]
fn at_most(limit: usize, features: &[&str]) {
    let crates = crates(features);
    assert!(crates.iter().any(|name| name.starts_with("once_cell ")), "this is no tree of gpumem: {crates:?}");
    assert!(crates.len() <= limit, "{} crates, more than {limit}: {crates:#?}", crates.len());
}

#[test]
fn with_default_features() {
    at_most(47, &[]);
}

#[test]
fn without_features() {
    at_most(10, &["--no-default-features"]);
}
