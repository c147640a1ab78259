//! Tests that the program keeps its output, exit code and signals.

use std::fs::File;

use gpumem_core::derive;
use gpumem_recording::Reader;
use gpumem_tests::{CONTEXT, built};

use super::*;

#[test]
fn the_program_is_recorded_and_prints_what_it_prints_alone() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let plain = machine().run(&ALLOCATES.join("; "));
    let outcome = run_probe(&machine(), &file, &ALLOCATES);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(outcome.stdout, plain.stdout);
    assert_eq!(folder.names(), ["a.capture"], "{outcome}");
    assert_eq!(recorded(&file), of_allocates());
    for part in [
        "a.capture: 2 allocations\n",
        "device 0 (Stand-in GPU 0): the peak was 36 MiB\n",
        "1 block (4 MiB) was not freed",
        "by dispatch",
    ] {
        assert!(outcome.stderr.contains(part), "{part}\n{outcome}");
    }
    // The recording contains the source lines of the program, although the program ended before they were looked up.
    let mut reader = Reader::new(File::open(&file).unwrap()).unwrap();
    while reader.step().unwrap().is_some() {}
    let sources: Vec<_> = reader.definitions().interceptions().iter().map(|by| by.source.name()).collect();
    assert_eq!(sources, ["dispatch"]);
    let live = derive::live_blocks(reader.ledger(), reader.definitions(), None);
    let place = live[0].line.as_deref().unwrap_or_default();
    assert!(live.len() == 1 && place.contains("raw.rs:"), "{live:#?}");
}

/// Most users run the command because memory ran out, so the summary starts with the allocation that failed.
#[test]
fn the_summary_starts_with_what_the_driver_rejected() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let steps = [&ALLOCATES[..], &["call cuMemAlloc_v2 &none 99999999999999", "sleep 100"]].concat();
    let machine = || machine().set("used=1GiB");
    let plain = machine().run(&steps.join("; "));
    let outcome = run_probe(&machine(), &file, &steps);
    assert!(outcome.is_clean() && outcome.stdout == plain.stdout, "{outcome}");
    let first = outcome.stderr.trim_start().lines().next().unwrap_or_default();
    assert!(first.starts_with("Out of memory: the driver rejected 90.95 TiB (device) after "), "{outcome}");
    assert!(first.contains("raw.rs:") && first.contains("while the process had 4 MiB of device 0 in use"), "{outcome}");
    // The device's figure is 9 MiB higher than those of the processes; other processes have 1 GiB.
    let second = outcome.stderr.trim_start().lines().nth(1).unwrap_or_default();
    let says = "Device 0 has 16 GiB. Shortly after: free 13.88 GiB; in use by allocations 4 MiB, by the driver for this process 518 MiB, by others 1.01 GiB.";
    assert_eq!(second, says, "{outcome}");
    // If only the peak is recorded, the live blocks are not known.
    let probe = probe();
    let words = [&["run", "--only-peak", "-o", &file, "--", &probe], &steps[..]].concat();
    let outcome = machine().run_program(&built("gpumem-command"), &words);
    let first = outcome.stderr.trim_start().lines().next().unwrap_or_default();
    assert!(first.starts_with("Out of memory: ") && !first.contains(" in use"), "{outcome}");
    assert!(outcome.stderr.contains("\nDevice 0 has 16 GiB."), "{outcome}");
    assert!(!outcome.stderr.contains("--at oom"), "{outcome}");
}

#[test]
fn stacks_are_left_out_on_request() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let probe = probe();
    let arguments = [&["run", "--stacks", "none", "-o", &file, "--", &probe], &ALLOCATES[..]].concat();
    let outcome = machine().run_program(&built("gpumem-command"), &arguments);
    assert!(outcome.is_clean(), "{outcome}");
    let mut reader = Reader::new(File::open(&file).unwrap()).unwrap();
    while reader.step().unwrap().is_some() {}
    assert_eq!(reader.definitions().modules().count(), 0);
    assert_eq!(recorded(&file), of_allocates());
}

#[test]
fn a_program_above_the_limit_of_its_peak_ends_with_1() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let steps: Vec<_> = CONTEXT.split("; ").chain(["call cuMemAlloc_v2 &a 2097152"]).collect();
    for (limit, exit) in [("2MiB", 0), ("1MiB", 1)] {
        let outcome = run_with(&machine(), &["--max-peak", limit], &file, &steps);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{outcome}");
        let above = "a.capture: the peak of device 0 was 2 MiB, 1 MiB above the limit of 1 MiB";
        assert_eq!(outcome.stderr.contains(above), exit == 1, "{outcome}");
    }
    // A limit for an unknown place is an error of the command, and not an error of the program.
    for (end, exit) in [("exit 0", 2), ("exit 7", 7)] {
        let script = format!("{}{}; {end}", probe(), in_shell(&steps));
        let command = ["run", "--max-peak", "nowhere.py:1=1TiB", "-o", &file, "--", "sh", "-c", &script];
        let outcome = machine().run_program(&built("gpumem-command"), &command);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{outcome}");
        assert!(outcome.stderr.contains("--max-peak cannot be checked for `nowhere.py:1`: "), "{outcome}");
    }
    // A program that fails ends with its own code. A program that was not recorded does not pass a limit.
    for (script, exit) in [("exit 7", 7), ("exit 0", 1)] {
        let command = ["run", "--max-peak", "1MiB", "-o", &file, "--", "sh", "-c", script];
        let outcome = machine().run_program(&built("gpumem-command"), &command);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{outcome}");
    }
}

#[test]
fn the_exit_code_is_that_of_the_program() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    for (script, exit) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 128 + 15), ("kill -KILL $$", 128 + 9)] {
        let outcome = run(&machine(), &file, &["sh", "-c", script]);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{outcome}");
    }
    for (program, exit) in [("./no-such-program", 127), ("/", 126)] {
        let outcome = run(&machine(), &file, &[program]);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{outcome}");
        assert!(outcome.stderr.starts_with(&format!("gpumem: cannot start `{program}`: ")), "{outcome}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
    }
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn signals_reach_the_program() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let ready = folder.file("ready");
    let command = built("gpumem-command");
    for (signal, exit) in [("TERM", "12"), ("USR1", "13")] {
        let program = format!("trap 'exit 12' TERM; trap 'exit 13' USR1; echo > {ready}; while :; do sleep 0.01; done");
        let script = format!(
            "{} run -o {file} -- sh -c \"{program}\" & gpumem=$!; while [ ! -e {ready} ]; do sleep 0.01; done; \
             kill -{signal} $gpumem; wait $gpumem; echo ended $?",
            command.display()
        );
        let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &script]);
        assert!(outcome.stdout.contains(&format!("ended {exit}\n")), "{outcome}");
        std::fs::remove_file(&ready).unwrap();
    }
}

/// `gpumem run` stops and continues together with its program, so a shell sees the same as without `gpumem run`.
#[test]
fn who_waits_sees_that_the_program_has_stopped() {
    let folder = Folder::new();
    let [file, pid] = ["a.capture", "pid"].map(|name| folder.file(name));
    let command = built("gpumem-command").display().to_string();
    // The program is continued through its own process id, or through `gpumem run`'s.
    for continued in ["$program", "$gpumem"] {
        let script = format!(
            "stopped() {{ grep -q '^State:.T' /proc/$1/status; }}
             {command} run -o {file} -- sh -c 'echo $$ > {pid}; kill -STOP $$; exit 14' & gpumem=$!
             until stopped $gpumem; do sleep 0.01; done; program=$(cat {pid}); stopped $program && echo both
             kill -CONT {continued}; wait $gpumem; echo ended $?"
        );
        let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &script]);
        assert_eq!(outcome.stdout, "both\nended 14\n", "{outcome}");
    }
}

#[test]
fn a_script_without_an_interpreter_is_run_by_the_shell() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let script = |name: &str, text: &[u8]| {
        let path = folder.file(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let text = format!("echo \"$0 $1\"; exec {}{}", probe(), in_shell(&ALLOCATES));
    let path = script("train", text.as_bytes());
    for (program, machine) in [(path.as_str(), machine()), ("train", machine().env("PATH", path_with(&folder)))] {
        let outcome = run(&machine, &file, &[program, "one word"]);
        assert!(outcome.is_clean() && outcome.stdout.starts_with(&format!("{path} one word\n")), "{outcome}");
        assert_eq!(recorded(&file), of_allocates(), "{outcome}");
    }
    let outcome = run(&machine(), &file, &[&script("broken", b"\x7fBROKEN\0\n")]);
    assert!(outcome.exit() == "exit status: 126" && outcome.stderr.contains(": cannot start `"), "{outcome}");
}

fn path_with(folder: &Folder) -> String {
    format!("{}:{}", folder.0.path().display(), std::env::var("PATH").unwrap_or_default())
}

#[test]
fn the_program_reads_our_stdin() {
    let folder = Folder::new();
    let script =
        format!("echo 'some input' | {} run -o {} -- cat", built("gpumem-command").display(), folder.file("a.capture"));
    let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &script]);
    assert_eq!(outcome.stdout, "some input\n", "{outcome}");
}

/// Calls the driver as a library does: other code, here ctypes, is between the driver and the Python lines.
const TRAIN: &str = "\
import ctypes
cuda = ctypes.CDLL('libcuda.so.1')
def allocate(size):
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
context = ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
allocate(64 << 20)
";

#[test]
fn the_place_is_a_line_of_python() {
    let folder = Folder::new();
    let script = folder.file("train.py");
    std::fs::write(&script, TRAIN).unwrap();
    let Some(python) = python() else { return };
    let outcome = run(&machine(), &folder.file("a.capture"), &[&python, &script]);
    assert!(outcome.is_clean(), "{outcome}");
    let most = outcome.stderr.lines().find(|line| line.starts_with("most ")).unwrap_or_default();
    let parts = ["train.py:5, called from ", "train.py:10, holds 100 % of the peak"];
    assert!(parts.iter().all(|part| most.contains(part)), "{outcome}");
}
