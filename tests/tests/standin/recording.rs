//! A recording of a program with cudarc and 16 threads yields the program's reports, byte by byte.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use gpumem_tests::{Standin, output_of};

const PROGRAM: &str = env!("CARGO_BIN_EXE_recorded");

/// Returns how often each line is in the text.
fn lines(text: &str) -> BTreeMap<&str, u32> {
    text.lines().fold(BTreeMap::new(), |mut lines, line| {
        *lines.entry(line).or_default() += 1;
        lines
    })
}

#[test]
fn a_recording_yields_the_reports_of_its_program() {
    let folder = tempfile::tempdir().unwrap();
    let [recording, reports] =
        ["recording", "reports"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    for machine in [Standin::new().dispatch(), Standin::new().cupti()] {
        let machine = machine.env("GPUMEM_CAPTURE", &recording).env("GPUMEM_LEAKS", "1").env("GPUMEM_PEAK", "1");
        let outcome = machine.run_program(Path::new(PROGRAM), &["run", &reports]);
        assert!(outcome.is_clean(), "{outcome}");
        let printed = fs::read_to_string(&reports).unwrap();
        // The reader has neither the driver nor the program's settings.
        let read = output_of(Command::new(PROGRAM).args(["read", &recording]).env_clear());
        let derived = String::from_utf8(read.stdout).unwrap();
        assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
        let (printed_lines, derived_lines) = (lines(&printed), lines(&derived));
        for (line, count) in &printed_lines {
            assert_eq!(derived_lines.get(line), Some(count), "\n{line}\nin\n{derived}");
        }
        assert_eq!(derived_lines.len(), printed_lines.len());
        assert!(printed.contains("1 block (3 MiB) was not freed") && printed.contains("recorded.rs:"), "{printed}");
        // There are 16 threads with 20 reports each, and one report at the end of each trace. Two traces at the end are those of `train`.
        assert!(printed.lines().count() > 16 * 40, "{printed}");
    }
}
