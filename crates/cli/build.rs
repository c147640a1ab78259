//! Builds the library that `gpumem run` puts into programs, so that the command contains it: `cargo install` installs one file.
//!
//! Cargo has no stable way to depend on a shared object, so this script runs Cargo again, on the manifest of the build-dependency
//! `gpumem-inject` and with a separate target folder. In the target folder of the outer Cargo, it would wait for the outer Cargo forever.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The environment variable that names a prebuilt library, for packagers of the command.
const PREBUILT: &str = "GPUMEM_INJECT_LIBRARY";

fn main() {
    println!("cargo::rerun-if-env-changed={PREBUILT}");
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(variable("OUT_DIR"));
    let library = out.join("libgpumem_inject.so");
    if let Some(prebuilt) = env::var_os(PREBUILT).filter(|path| !path.is_empty()) {
        println!("cargo::rerun-if-changed={}", prebuilt.display());
        copy(Path::new(&prebuilt), &library);
    } else if env::var_os("DOCS_RS").is_some() || variable("CARGO_CFG_TARGET_OS") != "linux" {
        // The documentation needs no library. On systems other than Linux, the driver has no dispatch table that gpumem knows, and `gpumem
        // run` reports this.
        fs::write(&library, "").expect("the build's folder can be written");
    } else {
        build(&out, &library);
    }
}

fn variable(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| panic!("Cargo sets {name}"))
}

fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap_or_else(|error| panic!("cannot copy {} to {}: {error}", from.display(), to.display()));
}

fn build(out: &Path, library: &Path) {
    let target_folder = out.join("inject");
    let is_release = variable("PROFILE") == "release";
    let mut cargo = Command::new(variable("CARGO"));
    cargo.arg("rustc").arg("--lib").args(["--crate-type", "cdylib"]);
    cargo.arg("--manifest-path").arg(Path::new(gpumem_inject::MANIFEST_DIR).join("Cargo.toml"));
    cargo.arg("--target-dir").arg(&target_folder).arg("--quiet");
    // Users do not need the lines of this library. Without debug information the command is a few MB smaller.
    let profile = if is_release { "release" } else { "dev" };
    cargo.arg("--config").arg(format!("profile.{profile}.debug=0"));
    if is_release {
        cargo.arg("--release");
    }
    let mut built = target_folder;
    if variable("TARGET") != variable("HOST") {
        cargo.arg("--target").arg(variable("TARGET"));
        built.push(variable("TARGET"));
    }
    built.push(if is_release { "release" } else { "debug" });
    // The outer Cargo sets variables for this build script, such as its flags, and clippy instead of the compiler. The build of the library
    // does not get them, except the settings for the source of crates and for incremental builds.
    let is_kept = |name: &str| {
        ["CARGO_HOME", "CARGO_INCREMENTAL", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR", "CARGO_SOURCE_"]
            .iter()
            .any(|kept| name.starts_with(kept))
    };
    for (name, _) in env::vars_os() {
        let is_cargos = name.to_str().is_some_and(|name| name.starts_with("CARGO_") && !is_kept(name));
        if is_cargos || ["RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER"].iter().any(|own| name == *own) {
            cargo.env_remove(name);
        }
    }
    cargo.args(["--", "-C", "strip=symbols"]);
    let status = cargo.status().unwrap_or_else(|error| panic!("cannot run {cargo:?}: {error}"));
    assert!(status.success(), "{cargo:?}: {status}");
    copy(&built.join("libgpumem_inject.so"), library);
    // This file lists all sources of the library.
    let sources = fs::read_to_string(built.join("libgpumem_inject.d")).expect("Cargo writes it");
    for source in sources.split_once(": ").map_or("", |(_, sources)| sources).split_whitespace() {
        println!("cargo::rerun-if-changed={source}");
    }
}
