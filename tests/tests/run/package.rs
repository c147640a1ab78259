//! The Python package `gpumem_trace`, with the library of the command.

use std::{env, fs, os::unix::fs::symlink, path::Path, process::Command};

use gpumem_tests::{built, interpreters};

use super::{Folder, compiled_library, machine, python};

const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/cli/python");
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/package.py");

/// Returns the library that the command unpacks.
fn library(folder: &Folder) -> String {
    let unpacked = machine()
        .env("XDG_CACHE_HOME", folder.file("cache"))
        .run_program(&built("gpumem-command"), &["run", "-o", &folder.file("none.capture"), "--", "true"]);
    let cache = Path::new(&folder.file("cache")).join("gpumem");
    let files = fs::read_dir(&cache).unwrap_or_else(|error| panic!("{error}: {unpacked}"));
    let mut paths = files.map(|file| file.unwrap().path());
    let path = paths.find(|path| path.extension().is_some_and(|extension| extension == "so"));
    path.expect("the command has unpacked it").to_str().unwrap().to_owned()
}

#[test]
fn the_tests_of_the_package_pass_in_each_python() {
    let folder = Folder::new();
    let library = library(&folder);
    // A recording is read with the command.
    symlink(built("gpumem-command"), folder.file("gpumem")).unwrap();
    let path = format!("{}:{}", folder.file(""), env::var("PATH").unwrap());
    for python in interpreters().into_values() {
        let tests = format!("{PACKAGE}/tests");
        // `.ci/wheel` runs the tests of the pytest plugin.
        let done = Command::new(&python)
            .args(["-B", "-m", "unittest", "discover", "-s", &tests, "-p", "test_traces.py"])
            .envs([
                ("GPUMEM_LIBRARY", library.as_str()),
                ("GPUMEM_SIM", "16GiB"),
                ("PYTHONPATH", PACKAGE),
                ("PATH", &path),
            ])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&done.stderr);
        assert!(
            done.status.success() && text.contains("\nOK\n") && !text.contains("Ran 0 tests"),
            "{python:?}: {text}"
        );
    }
}

/// A program with the package under `gpumem run` is recorded once, with the scopes of both.
#[test]
fn traces_of_a_recorded_program_are_scopes_of_the_recording() {
    let Some(python) = python() else { return gpumem_tests::skipped("no Python whose lines are recorded") };
    let folder = Folder::new();
    let library = library(&folder);
    let with_package = || {
        let machine = machine().env("PYTHONPATH", PACKAGE).env("PYTHONDONTWRITEBYTECODE", "1");
        machine.env("GPUMEM_LIBRARY", library.as_str())
    };
    let file = folder.file("a.capture");
    let run = with_package().run_program(&built("gpumem-command"), &["run", "-o", &file, "--", &python, PROGRAM]);
    let printed = "\
                   △Used Peaked MB:     10     40   (train > forward: exit)\n\
                   △Used Peaked MB:     10     40   (train > forward: exit)\n\
                   △Used Peaked MB:      0      7   (train > task: exit)\n\
                   △Used Peaked MB:      0      9   (train > task: exit)\n\
                   △Used Peaked MB:     20     40 (train: exit)\n\
                   True 20 40 True\n";
    assert!(run.succeeded() && run.stdout == printed, "{run}");
    let report = machine().run_program(&built("gpumem-command"), &["report", "--tree", &file]);
    for name in ["train", "forward", "task"] {
        assert!(report.stdout.contains(name), "{report}");
    }
    // Without the command, the numbers are the same.
    let alone = with_package().run_program(Path::new(&python), &[PROGRAM]);
    assert_eq!(alone.stdout, printed, "{alone}");
    // `GPUMEM_CAPTURE` records it.
    let own = folder.file("own.capture");
    let alone = with_package().env("GPUMEM_CAPTURE", &own).run_program(Path::new(&python), &[PROGRAM]);
    assert_eq!(alone.stdout, printed, "{alone}");
    let report = machine().run_program(&built("gpumem-command"), &["report", "--tree", &own]);
    assert!(report.stdout.contains("forward"), "{report}");
}

/// A trace counts PyTorch's tensors, and not what its cache takes from the driver. A library and a module stand in for PyTorch.
#[test]
fn traces_count_the_tensors_of_pytorch() {
    let Some(python) = python() else { return gpumem_tests::skipped("no Python whose lines are recorded") };
    let folder = Folder::new();
    let allocator = compiled_library(&folder, "allocator", "allocator.c", "libc10_cuda.so", &[]);
    let library = library(&folder);
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run");
    let modules = format!("{PACKAGE}:{sources}:{sources}/allocator");
    let run = |what: &str| {
        let machine = machine().env("PYTHONPATH", &modules).env("PYTHONDONTWRITEBYTECODE", "1");
        let machine = machine.env("GPUMEM_LIBRARY", library.as_str()).env("ALLOCATOR", allocator.as_str());
        let recording = folder.file("part.capture");
        machine.run_program(Path::new(&python), &[&format!("{sources}/allocator/tensors.py"), what, &recording])
    };
    let counted = "\
                   3145728 7340544 True\n\
                   △Used Peaked MB:      3      7 (step: exit)\n\
                   △Used Peaked MB:      2      0 (again: exit)\n\
                   3145728 5242880 True\n\
                   △Used Peaked MB:      3      2 (recorded: exit)\n";
    // In the second program, the first trace starts after the first tensor.
    for what in ["plain", "late"] {
        let seen = run(what);
        assert!(seen.stdout == counted && seen.stderr.is_empty(), "{seen}");
    }
    let not_counted = "\
                       20971520 0 True\n\
                       △Used Peaked MB:     20      0 (step: exit)\n\
                       △Used Peaked MB:      0      0 (again: exit)\n\
                       20971520 20971520 True\n\
                       △Used Peaked MB:     20      0 (recorded: exit)\n";
    for (what, why) in [
        ("replaced", "PYTORCH_CUDA_ALLOC_CONF or the program has replaced its allocator"),
        ("old", "this version of gpumem-trace knows PyTorch 2.2 to 2.15 and not 2.1.2"),
        (
            "expandable",
            "it had expandable segments before gpumem saw them: start a trace or call preload_pytorch() before the first tensor",
        ),
    ] {
        let why = format!(
            "gpumem: PyTorch's tensors are not seen, because {why}; lines count what it takes from the driver\n"
        );
        let seen = run(what);
        assert!(what == "expandable" || seen.stdout == not_counted, "{seen}");
        assert_eq!(seen.stderr, why, "{seen}");
    }
}
