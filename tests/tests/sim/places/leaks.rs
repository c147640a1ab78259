//! Tests the report of blocks that were not freed when the process ends.

use std::fs::File;

use super::*;

const SETTINGS: &[(&str, &str)] = &[("GPUMEM_LEAKS", "1")];

pub(super) fn leaks() {
    let gpu = simulated_gpu();
    let _train = GpuMemTrace::with_ctx("train");
    let _step = GpuMemTrace::with_ctx("step");
    mem::forget(gpu.alloc(Bytes::mib(1)));
    println!("> {}", line!() - 1);
    for _ in 0..3 {
        mem::forget(gpu.alloc_async(Bytes::kib(1)));
    }
    drop(take(&gpu, 5 * MIB));
}

pub(super) fn no_leaks() {
    let gpu = simulated_gpu();
    drop(take(&gpu, 5 * MIB));
}

pub(super) fn leaks_and_panics() {
    leaks();
    panic!("as it is meant to");
}

pub(super) fn leaks_and_exits() {
    leaks();
    std::process::exit(7);
}

pub(super) fn no_trace() {
    SimGpu::install(Bytes::gib(1)).expect("GPUMEM_SIM is not set");
}

#[track_caller]
fn ensure_report(said: &Ended) {
    let line: u32 = said.answers()[0].parse().expect("a number");
    let reported: Vec<_> = said.stderr.lines().skip_while(|line| !line.contains(" ends, ")).collect();
    let [first, _, _, of_line, caller, of_scope] = reported[..] else { panic!("{}", said.stderr) };
    assert!(caller.starts_with("   from tests/sim/places"), "{caller}");
    assert!(
        first.starts_with("gpumem: process ") && first.ends_with(" ends, and 4 blocks (1.00 MiB) were not freed:"),
        "{first}"
    );
    assert!(of_line.contains(&format!("places/leaks.rs:{line}:")) && of_line.contains("train > step"), "{of_line}");
    assert!(of_line.contains("  1.000          1  ████████"), "{of_line}");
    assert!(of_scope.contains("  0.003  3 × 1 KiB  ▏") && of_scope.contains("train > step"), "{of_scope}");
    assert!(reported.iter().all(|line| line.width() <= 80), "{}", said.stderr);
}

#[test]
fn what_was_not_freed_is_reported_at_the_end() {
    ensure_report(&passes("leaks", SETTINGS));
    let said = passes("no leaks", SETTINGS);
    assert!(said.stderr.ends_with(" ends, and everything that was allocated has been freed\n"), "{}", said.stderr);
    for variables in [&[][..], &[("GPUMEM_LEAKS", "0")], &[("GPUMEM_LEAKS", "")]] {
        assert_eq!(passes("leaks", variables).stderr, "");
    }
    // Nothing was intercepted, so nothing is reported.
    assert_eq!(passes("no trace", SETTINGS).stderr, "");
}

#[test]
fn however_the_process_ends() {
    let said = run("leaks and panics", SETTINGS);
    assert_eq!(said.code, Some(101), "{}", said.stderr);
    ensure_report(&said);
    let said = run("leaks and exits", SETTINGS);
    assert_eq!(said.code, Some(7), "{}", said.stderr);
    ensure_report(&said);
}

#[test]
fn a_stderr_that_cannot_be_written_to_does_no_harm() {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("it is there"));
    for (what, code) in [("leaks", 0), ("leaks and exits", 7)] {
        let output = own_process(what, SETTINGS).command().stderr(full()).output().expect("it can be run");
        assert_eq!(Ended::of(output).code, Some(code));
        let child = own_process(what, SETTINGS).command();
        let mut closed = Command::new("sh");
        closed.args(["-c", "exec \"$0\" \"$@\" 2>&-"]).arg(child.get_program()).args(child.get_args());
        for (name, value) in child.get_envs() {
            match value {
                Some(value) => closed.env(name, value),
                None => closed.env_remove(name),
            };
        }
        assert_eq!(Ended::of(closed.output().expect("there is a shell")).code, Some(code));
    }
}
