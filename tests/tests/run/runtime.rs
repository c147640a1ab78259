//! Tests `gpumem run --dry --cards` with a program that uses the CUDA runtime. A library in C stands in for the runtime.

use super::*;

fn run_on(machine: &Standin, options: &[&str], program: &str) -> Outcome {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let words = [&["run", "--stacks", "none"], options, &["-o", &file, "--", program]].concat();
    let outcome = machine.run_program(&built("gpumem-command"), &words);
    assert!(outcome.succeeded(), "{outcome}");
    outcome
}

#[test]
fn the_runtime_has_as_many_cards_as_are_asked_for() {
    // The functions have symbol versions, like the runtime's.
    let folder = Folder::new();
    let program = compiled(&folder, "runtime", "cudart.c", "libcudart.so.13", &["-Wl,--version-script=cudart.map"]);
    // The number of the machine's real devices changes only what the driver itself reports.
    for devices in [1, 2] {
        let outcome = run_on(&machine().devices(devices), &["--dry", "--cards", "4", "--card", "24GiB"], &program);
        let expected = include_str!("runtime/expected.txt").replace("DEVICES", &devices.to_string());
        assert_eq!(outcome.stdout, expected, "{outcome}");
        for part in [
            "dry run, 4 GPUs of 24 GiB; blocks up to 160 MiB were real",
            "device 3 (Stand-in GPU 0): the peak was 19.83 GiB",
        ] {
            assert!(outcome.stderr.contains(&format!("\n{part}\n")), "{part:?} is not in {outcome}");
        }
    }
}

#[test]
fn other_programs_see_the_machine() {
    // The functions have symbol versions, like the runtime's.
    let folder = Folder::new();
    let program = compiled(&folder, "runtime", "cudart.c", "libcudart.so.13", &["-Wl,--version-script=cudart.map"]);
    for options in [&[][..], &["--dry"], &["--limit", "1GiB"]] {
        let outcome = run_on(&machine(), options, &program);
        let total = if options.len() == 2 { 1024 } else { 15_769 };
        let expected =
            format!("first: 101 0\ncount: 0 1, none: 101 101\ndevice 0: 0 {total} 0 0 0000:01:00.0 0 uuid 0\n");
        assert_eq!(outcome.stdout, expected, "{outcome}");
    }
}
