//! The inputs that a target begins with.

use std::{fs, path::PathBuf};

/// Returns a file of this repository.
pub fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Writes seeds to `corpus/TARGET`, the folder that the target is started with.
pub fn write(target: &str, seeds: impl IntoIterator<Item = Vec<u8>>) {
    let folder = file("fuzz/corpus").join(target);
    fs::create_dir_all(&folder).expect("the folder can be made");
    for (number, seed) in seeds.into_iter().enumerate() {
        fs::write(folder.join(format!("seed-{number}")), seed).expect("a seed can be written");
    }
}

/// Returns the lines of a file of JSON.
pub fn json_lines(path: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(file(path)).expect("the file is text");
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}
