//! Compares the Python functions that gpumem finds on stacks with Python's own frames, in each Python from 3.11 to 3.15 that is
//! found.

use std::{env, ffi::OsStr, process::Command};

use gpumem_tests::{built, interpreters, output_of};

const CHECKS: [&str; 11] = [
    "shapes",
    "threads",
    "reuse",
    "recorded",
    "subinterpreters",
    "lines_of_code",
    "monitored",
    "deleted",
    "end",
    "busy_end",
    "cost",
];

#[test]
fn stacks_have_the_lines_that_python_knows() {
    let library = built(&format!("{}gpumem_python_tests{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX));
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/python/program.py");
    for (version, python) in interpreters() {
        for check in CHECKS {
            let mut command = Command::new(&python);
            // Freed memory is overwritten, so that a read of it is noticed.
            let allocator = match version {
                // With its debug allocator, this Python aborts when it deletes the state of another thread.
                (3, 13, 1) if check == "deleted" => "mimalloc",
                (.., 1) => "mimalloc_debug",
                _ => "malloc",
            };
            command.env("PYTHONMALLOC", allocator).env("MALLOC_PERTURB_", "165");
            command.args([program.as_ref(), library.as_os_str(), OsStr::new(check)]);
            let output = output_of(&mut command);
            let [stdout, stderr] =
                [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            assert!(output.status.success(), "{version:?} {check}: {}\n{stdout}{stderr}", output.status);
            assert_eq!(stderr, "", "{version:?} {check}");
            for line in stdout.lines() {
                match line.strip_prefix("skipped: ") {
                    Some(why) => gpumem_tests::skipped(format_args!("{why} (Python {version:?})")),
                    None => println!("{line}"),
                }
            }
        }
    }
}
