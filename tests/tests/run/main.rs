//! Tests `gpumem run` with programs on the stand-in driver.

mod attach;
mod callers;
mod children;
mod ci;
mod dormant;
mod dry;
mod failures;
mod files;
mod killed;
mod library;
mod nccl;
mod nvml;
mod nvtx;
mod package;
mod parts;
mod pools;
mod program;
mod reports;
mod runtime;
mod together;
mod torch;
mod unusual_programs;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use gpumem_core::model::{EventKind, Key, Space};
use gpumem_recording::{End, Reader, Step};
use gpumem_tests::{Library, Outcome, Standin, built, interpreters};
use tempfile::TempDir;

/// The probe allocates two blocks, which are 36 MiB together, and frees one of them.
const ALLOCATES: [&str; 6] = [
    "call cuInit 0",
    "call cuDevicePrimaryCtxRetain &context 0",
    "call cuCtxSetCurrent context",
    "call cuMemAlloc_v2 &kept 4194304",
    "call cuMemAlloc_v2 &freed 33554432",
    "call cuMemFree_v2 freed",
];

/// A folder for the recordings of one test.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the folder for tests can be written"))
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("the path is text").to_owned()
    }

    /// Returns the names of all files, sorted.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("it is there").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// Returns a machine whose driver has a dispatch table.
fn machine() -> Standin {
    Standin::new().dispatch().env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"))
}

/// Compiles a C program into a folder, and the library that it is linked with. The library stands in for one of NVIDIA's
/// libraries. `name` is the folder of the sources. Returns the path of the program.
fn compiled(folder: &Folder, name: &str, source: &str, library: &str, options: &[&str]) -> String {
    let (library, program) = (compiled_library(folder, name, source, library, options), folder.file("program"));
    cc(name, &["program.c", "-o", &program, &library, "-Wl,-rpath,$ORIGIN"]);
    program
}

/// Compiles a library in C, and returns its path.
fn compiled_library(folder: &Folder, name: &str, source: &str, library: &str, options: &[&str]) -> String {
    let (soname, path) = (format!("-Wl,-soname,{library}"), folder.file(library));
    cc(name, &[&["-shared", "-fPIC", &soname, source, "-o", &path], options].concat());
    path
}

fn cc(name: &str, words: &[&str]) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run").join(name);
    let status = Command::new("cc").current_dir(sources).arg("-w").args(words).args(["-ldl", "-lpthread"]).status();
    assert!(status.expect("there is a C compiler").success());
}

fn probe() -> String {
    built("probe").to_str().expect("the path is text").to_owned()
}

/// Returns steps of the probe as quoted words of a shell.
fn in_shell(steps: &[&str]) -> String {
    steps.iter().flat_map(|step| [" '", step, "'"]).collect()
}

/// Runs `gpumem run -o FILE -- COMMAND…`.
fn run(machine: &Standin, file: &str, command: &[&str]) -> Outcome {
    machine.run_program(&built("gpumem-command"), &[&["run", "-o", file, "--"], command].concat())
}

/// Runs the probe under `gpumem run`.
fn run_probe(machine: &Standin, file: &str, steps: &[&str]) -> Outcome {
    run_with(machine, &[], file, steps)
}

/// Like [`run_probe`], but with these options of `gpumem run`.
fn run_with(machine: &Standin, options: &[&str], file: &str, steps: &[&str]) -> Outcome {
    let probe = probe();
    machine.run_program(&built("gpumem-command"), &[&["run"], options, &["-o", file, "--", &probe], steps].concat())
}

/// The content of a recording.
#[derive(Debug, PartialEq, Eq)]
struct RecordingContent {
    /// The bytes of the allocations, in order.
    bytes: Vec<u64>,
    frees: usize,
}

#[track_caller]
fn recorded(file: &str) -> RecordingContent {
    let open = File::open(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let mut reader = Reader::new(open).unwrap_or_else(|error| panic!("{file}: {error}"));
    let mut recorded = RecordingContent { bytes: Vec::new(), frees: 0 };
    let is_of_driver = |key: Key| key == Key::new(Space::Driver, key.address());
    while let Some(step) = reader.step().expect("it can be read") {
        if let Step::Event(event) = step {
            match event.kind {
                // The program did not allocate the driver's own memory.
                EventKind::Alloc { key, .. } | EventKind::Free { key, .. } if is_of_driver(key) => {}
                EventKind::Alloc { block, .. } => recorded.bytes.push(block.bytes.get()),
                EventKind::Free { .. } => recorded.frees += 1,
                _ => {}
            }
        }
    }
    assert_eq!(reader.end(), Some(&End::Complete), "{file}");
    assert!(reader.skipped().is_nothing(), "{file}: {:?}", reader.skipped());
    recorded
}

/// Returns whether a recording has no end: its process still runs, or could not write everything.
#[track_caller]
fn lacks_end(file: &str) -> bool {
    let open = File::open(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    Reader::new(open).unwrap_or_else(|error| panic!("{file}: {error}")).definitions().lacks_end()
}

/// Returns the path of the latest Python whose lines can be recorded. If there is none, this function prints that the test is
/// skipped and returns `None`.
fn python() -> Option<String> {
    let latest = interpreters().into_values().next_back();
    latest.map(|path| path.into_os_string().into_string().expect("the path is text"))
}

/// Returns the content of a recording of [`ALLOCATES`].
fn of_allocates() -> RecordingContent {
    RecordingContent { bytes: vec![4 << 20, 32 << 20], frees: 1 }
}
