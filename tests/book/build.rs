//! Collects the examples in the documentation of the crates below `gpumem`. Users read them in the documentation of
//! `gpumem`, which exports the items, so the examples name `gpumem`. Those crates cannot depend on it, so the examples
//! are run here.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

const CRATES: [&str; 3] = ["core", "recording", "driver"];

fn main() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    let mut all = String::new();
    for name in CRATES {
        let folder = crates.join(name).join("src");
        println!("cargo::rerun-if-changed={}", folder.display());
        for file in sources(&folder) {
            let examples = examples_of(&fs::read_to_string(&file).expect("sources are text"));
            if !examples.is_empty() {
                let path = file.strip_prefix(&crates).expect("it was found there").with_extension("");
                let module = path.to_string_lossy().replace("/src/", "_").replace('/', "_");
                writeln!(all, "#[doc = {examples:?}]\nmod {module} {{}}").unwrap();
            }
        }
    }
    let to = Path::new(&env::var_os("OUT_DIR").expect("Cargo sets it")).join("examples.rs");
    fs::write(to, all).expect("the folder of the build can be written");
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the sources are there").flatten().map(|entry| entry.path());
    let mut files: Vec<_> = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect();
    files.sort();
    files
}

/// Returns the code blocks in the doc comments, as Markdown.
fn examples_of(source: &str) -> String {
    let (mut examples, mut is_inside) = (String::new(), false);
    for line in source.lines() {
        let line = line.trim_start();
        let Some(text) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { continue };
        let is_fence = text.trim_start().starts_with("```");
        if is_inside || is_fence {
            examples.push_str(text.strip_prefix(' ').unwrap_or(text));
            examples.push('\n');
        }
        is_inside ^= is_fence;
    }
    examples
}
