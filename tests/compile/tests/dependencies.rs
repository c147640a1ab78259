//! Tests the number of crates that a program gets with gpumem, including gpumem's own. A further crate needs a reason in
//! `Cargo.toml` and in `docs/ARCHITECTURE.md`, "Dependencies".
//!
//! `cargo tree -p gpumem -e normal,build --no-dedupe --prefix none | sort -u` shows them.

use std::{collections::BTreeSet, env, ffi::OsString, process::Command};

/// The crates that run at build time as well.
const ALL: &str = "--edges=normal,build";
/// The crates that become a part of the program.
const LINKED: &str = "--edges=normal,no-proc-macro";

/// Returns the names and versions of the crates that gpumem is built from with these features.
fn crates(edges: &str, features: &[&str]) -> BTreeSet<String> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["tree", "--offline", "--locked", "--package=gpumem"]);
    command.args([edges, "--prefix=none", "--no-dedupe", "--target=x86_64-unknown-linux-gnu"]);
    let output = command.args(features).output().expect("cargo starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    let words = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    String::from_utf8_lossy(&output.stdout).lines().map(words).collect()
}

#[track_caller]
fn at_most(limit: usize, edges: &str, features: &[&str]) {
    let crates = crates(edges, features);
    assert!(crates.iter().any(|name| name.starts_with("once_cell ")), "this is not gpumem's tree: {crates:?}");
    assert!(crates.len() <= limit, "{} crates, more than {limit}: {crates:#?}", crates.len());
}

#[test]
fn with_default_features() {
    at_most(49, ALL, &[]);
    at_most(35, LINKED, &[]);
}

#[test]
fn without_features() {
    at_most(17, ALL, &["--no-default-features"]);
}

#[test]
fn without_cuda() {
    at_most(32, ALL, &["--no-default-features", "--features=macros,backtrace,capture"]);
}

/// The table names each crate in the column that it belongs to, and no other crate.
#[test]
fn the_documented_crates_are_those_of_the_tree() {
    let page = include_str!("../../../docs/ARCHITECTURE.md");
    let section = page.split("## Dependencies").nth(1).expect("a section").split("\n## ").next().expect("its text");
    let rows: Vec<Vec<&str>> = section.lines().filter(|line| line.starts_with('|')).map(cells).collect();
    let column = |at: usize| -> BTreeSet<String> {
        rows.iter().flat_map(|row| row[at].split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    };
    let names = |edges: &str| -> BTreeSet<String> {
        crates(edges, &[]).iter().filter_map(|name| Some(name.split_once(' ')?.0.to_owned())).collect()
    };
    let (all, linked) = (names(ALL), names(LINKED));
    assert_eq!(column(2), linked);
    assert_eq!(column(3), all.difference(&linked).cloned().collect());
}

fn cells(row: &str) -> Vec<&str> {
    row.split('|').map(str::trim).collect()
}
