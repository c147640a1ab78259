//! The Python interpreters that are on this machine.

use std::{collections::BTreeMap, env, fs, path::PathBuf, process::Command, sync::LazyLock};

/// A version such as 3.14, and 1 if the interpreter is free-threaded.
type Version = (u32, u32, u32);

/// Returns the interpreters on the path, and those that pyenv has installed: one of each version. If there is none, this function prints
/// that the test is skipped.
pub fn interpreters() -> BTreeMap<Version, PathBuf> {
    // About ten files are run to find out their versions, which takes longer than most tests.
    static FOUND: LazyLock<BTreeMap<Version, PathBuf>> = LazyLock::new(find);
    if FOUND.is_empty() {
        crate::skipped("no Python from 3.11 to 3.15");
    }
    FOUND.clone()
}

fn find() -> BTreeMap<Version, PathBuf> {
    let versions = ["", ".11", ".12", ".13", ".13t", ".14", ".14t", ".15", ".15t"];
    let names = versions.map(|version| format!("python3{version}"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).flat_map(|folder| names.each_ref().map(|name| folder.join(name)));
    let pyenv = env::home_dir().map(|home| home.join(".pyenv/versions"));
    let installed = pyenv.into_iter().flat_map(fs::read_dir).flatten().flatten();
    let all = on_path.chain(installed.map(|version| version.path().join("bin/python3")));
    all.filter(|path| path.is_file()).filter_map(|path| Some((version(&path)?, path))).collect()
}

/// Returns the version of a supported interpreter.
fn version(path: &PathBuf) -> Option<Version> {
    const SHOW: &str =
        "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)";
    let output = Command::new(path).args(["-c", SHOW]).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    let numbers: Vec<u32> = text.split_whitespace().map_while(|number| number.parse().ok()).collect();
    match *numbers {
        [3, minor @ 11..=15, is_free_threaded] => Some((3, minor, is_free_threaded)),
        _ => None,
    }
}
