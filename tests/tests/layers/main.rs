//! Compares the sources of the library with the floors in `docs/ARCHITECTURE.md`, and finds import cycles between files.

mod cycles;
mod imports;

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::imports::named_below_root;

/// The folders of the crates with floors. Each crate names the modules of the crates before it like its own modules.
const CRATES: [&str; 3] = ["crates/core", "crates/driver", "gpumem"];

/// The crate of recordings, which has no floors.
const RECORDING: &str = "crates/recording";

/// Returns each floor of `docs/ARCHITECTURE.md`, and the floors that it may name in addition to itself.
fn floors() -> Vec<(String, Vec<String>)> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ARCHITECTURE.md")).unwrap();
    let (_, table) = text.split_once("| floor | may name |\n|---|---|\n").expect("there is a table of floors");
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let rows = table.lines().map_while(|row| row.strip_prefix("| ")?.split_once(" | "));
    rows.map(|(floor, may)| (names(floor).concat(), names(may))).collect()
}

fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the sources are there").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Returns the files of the crate in this folder: for each file, its path from `lib.rs` and its location.
fn source_files(folder: &str) -> Vec<(PathBuf, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let inside = |path: PathBuf| (path.strip_prefix(&root).expect("it was found there").to_owned(), path);
    files.into_iter().map(inside).collect()
}

/// Returns the files of the crates with floors: for each file, its floor, its location and its text.
fn library() -> impl Iterator<Item = (String, PathBuf, String)> {
    CRATES.iter().flat_map(|name| source_files(name)).map(|(inside, path)| {
        let floor = inside.iter().next().expect("a file has a name").to_string_lossy();
        let floor = floor.trim_end_matches(".rs").to_owned();
        let code = fs::read_to_string(&path).expect("sources are text");
        (floor, path, code)
    })
}

#[test]
fn each_floor_names_only_what_is_below_it() {
    let floors = floors();
    for (floor, path, code) in library() {
        if floor == "lib" {
            continue;
        }
        let (_, may) = floors.iter().find(|(name, _)| *name == floor).unwrap_or_else(|| panic!("no floor: {floor}"));
        for name in named_below_root(&code) {
            let within = |allowed: &str| name == allowed || name.starts_with(&format!("{allowed}::"));
            let allowed = within(&floor) || may.iter().any(|allowed| within(allowed));
            assert!(allowed, "{}: `{floor}` may not name `{name}`", path.display());
        }
    }
}

/// With `test = false`, Cargo builds no tests of a library. A test that is added later would never run.
#[test]
fn a_library_without_tests_has_none() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = |folder: &str| fs::read_to_string(root.join(folder).join("Cargo.toml")).expect("a manifest is text");
    let workspace = manifest("");
    let members = workspace.split("members = [").nth(1).and_then(|rest| rest.split(']').next()).expect("a list");
    let mut found = 0;
    for member in members.split('"').skip(1).step_by(2) {
        let manifest = manifest(member);
        let library = manifest.split("[lib]\n").nth(1).and_then(|rest| rest.split("\n[").next()).unwrap_or_default();
        // `tests/book` runs the examples of these crates.
        let has_others = CRATES.contains(&member) || member == RECORDING;
        for (setting, test) in [("test = false", "#[test]"), ("doctest = false", "/// ```")] {
            if has_others && setting == "doctest = false" {
                continue;
            }
            let files = if library.lines().any(|line| line == setting) { source_files(member) } else { Vec::new() };
            found += files.len();
            for (_, path) in files {
                let code = fs::read_to_string(&path).expect("sources are text").replace("//!", "///");
                assert!(!code.contains(test), "{}: `{setting}` in the manifest", path.display());
            }
        }
    }
    assert!(found > 30, "{found}");
}

#[test]
fn names_are_found_in_every_spelling() {
    let code = "use crate::{\n error::Error,\n model::{Bytes, Device},\n sys::process,\n};\n crate::ledger::Ledger::new(); crate::lone; crate::mac!() // crate::comment";
    let expected = ["error::Error", "ledger::Ledger", "lone", "model::Bytes", "model::Device", "sys::process"];
    assert_eq!(named_below_root(code).into_iter().collect::<Vec<_>>(), expected);
}
