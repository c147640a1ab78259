//! Runs the command as a user does.

mod book;
mod ci;
mod conventions;
mod costs;
mod damaged;
mod diff;
mod driver_memory;
mod estimate;
mod formats;
mod golden;
mod limits;
mod names;
mod page;
mod parts;
#[allow(dead_code, reason = "the tests of the library use the rest")]
mod recording_builder;
mod report;
#[allow(unreachable_pub, reason = "in gpumem-tests it is public")]
mod snapshot;
mod widths;

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use gpumem_core::testing::skipped;

/// The options for each view of `gpumem report`. Without an option, it shows the summary. A test compares this list with the help.
const VIEWS: [&[&str]; 7] =
    [&[], &["--tree"], &["--calls"], &["--table"], &["--leaks"], &["--at", "peak"], &["--between", "start", "peak"]];

/// Runs `gpumem` with these arguments.
fn gpumem(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpumem"));
    command.args(arguments).env_remove("NO_COLOR");
    command
}

/// Runs `gpumem` with these arguments. Returns its output and its exit code.
fn ran(arguments: &[&str]) -> Ran {
    Ran::of(&gpumem(arguments).output().expect("the command starts"))
}

/// Runs the command in this folder.
fn within(folder: &Path, arguments: &[&str]) -> Ran {
    Ran::of(&gpumem(arguments).current_dir(folder).output().expect("the command starts"))
}

#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("the output is text");
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

/// Returns the output of another program. If there is no such program, it prints a line and returns `None`.
fn output_of(program: &str, arguments: &[impl AsRef<OsStr>]) -> Option<Output> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => Some(output),
        Err(error) => {
            skipped(format_args!("no {program}: {error}"));
            None
        }
    }
}

/// Returns the path of a file for one test.
fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Returns the path of a link to a file outside of the crate. Cargo puts the file behind a link into the crate's archive.
fn linked(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/linked").join(name)
}

/// Makes an empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = file(name);
    _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("it can be made");
    folder
}
