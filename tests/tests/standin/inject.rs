//! The example `inject`: a library that the driver loads into any CUDA program, on the stand-in driver.

use std::{env, fs, path::PathBuf, process};

use gpumem_tests::{Outcome, Standin, built};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Allocates in three ways, by C calls alone; 36 MiB at most, of which 4 stay. Its context stays too, as most programs have it.
const PROGRAM: &str = "call cuInit 0; call cuDevicePrimaryCtxRetain &context 0; call cuCtxSetCurrent context; \
                       call cuMemAlloc_v2 &kept 4194304; call cuMemAlloc_v2 &freed 33554432; \
                       call cuMemFree_v2 freed; call cuMemAllocAsync &pooled 1048576 0; call cuMemFreeAsync pooled 0; \
                       call cuMemAllocHost_v2 &pinned 4096; call cuMemFreeHost pinned";

fn machine() -> Standin {
    Standin::new().cupti()
}

fn injected(machine: Standin) -> Standin {
    machine.env("CUDA_INJECTION64_PATH", built("libgpumem_inject_example.so"))
}

fn run(machine: &Standin, script: &str) -> Outcome {
    let outcome = machine.run(script);
    assert!(outcome.is_clean(), "{outcome}");
    outcome
}

/// The figures of the row that begins so.
#[track_caller]
fn row<'a>(outcome: &'a Outcome, name: &str) -> Vec<&'a str> {
    let row = outcome.stderr.lines().find_map(|line| line.trim_start().strip_prefix(name));
    row.unwrap_or_else(|| panic!("no row {name}\n{outcome}")).split_whitespace().collect()
}

#[test]
fn a_summary_is_printed_and_the_program_sees_nothing_of_it() {
    let plain = run(&machine(), PROGRAM);
    assert_eq!(plain.stderr, "");
    let traced = run(&injected(machine()), PROGRAM);
    assert_eq!(traced.stdout, plain.stdout);
    assert!(traced.calls.iter().any(|call| call == "injection_ends=1"), "{traced}");
    assert!(traced.stderr.starts_with("gpumem: "), "{traced}");
    assert!(
        traced.stderr.contains("\nexact: intercepted by lib") && traced.stderr.contains(", 0 lost events, 0 "),
        "{traced}"
    );
    assert!(traced.stderr.contains("\ndevice 0 (Stand-in GPU 0)\n"), "{traced}");
    assert_eq!(row(&traced, "allocated"), ["36", "MiB", "4", "MiB", "3"]);
    assert_eq!(row(&traced, "device (cuMemAlloc)"), ["36", "MiB", "4", "MiB", "2"]);
    assert_eq!(row(&traced, "pool (cuMemAllocAsync)"), ["1", "MiB", "0", "B", "1"]);
    assert_eq!(row(&traced, "not in it: pinned host"), ["4", "KiB", "0", "B", "1"]);
    assert!(
        !traced.stderr.contains("managed") && !traced.stderr.contains("vmm"),
        "what was not used has no row: {traced}"
    );
    assert_eq!(row(&traced, "probe, device"), ["4", "MiB", "1"]);
    assert!(traced.stderr.lines().all(|line| line.chars().count() <= 100), "{traced}");
}

/// The driver is in the middle of `cuInit`: what is asked of it may wait for that, or fail.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_driver_is_not_called_while_it_initialises_itself() {
    for machine in [Standin::new().dispatch(), Standin::new().dispatch().cupti()] {
        let plain = run(&machine, PROGRAM);
        let traced = run(&injected(machine), PROGRAM);
        assert_eq!(traced.stdout, plain.stdout);
        let at = |line: &str| traced.calls.iter().position(|call| call == line).unwrap_or_else(|| panic!("{traced}"));
        let within = &traced.calls[at("injection_begins=0") + 1..at("injection_ends=1")];
        assert!(within.is_empty(), "{within:?}\n{traced}");
        assert!(traced.stderr.contains("\nexact: intercepted by libcuda.so.1, 0 lost events, 0 "), "{traced}");
        assert!(!traced.calls.iter().any(|call| call.starts_with("cupti")), "{traced}");
        assert_eq!(row(&traced, "allocated"), ["36", "MiB", "4", "MiB", "3"]);
    }
}

#[test]
fn a_program_reads_the_summary_as_json() {
    let traced = run(&injected(machine()).env("GPUMEM_REPORT", "json"), PROGRAM);
    assert_eq!(traced.stderr.lines().count(), 1, "{traced}");
    let reported: Value = serde_json::from_str(&traced.stderr).unwrap_or_else(|error| panic!("{error}\n{traced}"));
    assert_eq!(reported["error"], Value::Null);
    assert_eq!((&reported["lost_events"], &reported["untracked_frees"]), (&0.into(), &0.into()));
    assert_eq!(reported["command"][1], "call cuInit 0");
    let device = &reported["devices"][0];
    assert_eq!((&device["used"], &device["peak"]), (&(4 * MIB).into(), &(36 * MIB).into()));
    assert_eq!(device["stats"]["allocated_bytes"]["pool"]["peak"], MIB);
    assert_eq!(device["stats"]["allocated_bytes"]["pinned_host"]["allocated"], 4096);
    assert_eq!(device["live"][0]["bytes"], 4 * MIB);
    assert_eq!(reported["devices"].as_array().map(Vec::len), Some(1));
}

#[test]
fn it_can_be_written_to_a_file() {
    let file = env::temp_dir().join(format!("gpumem-inject-{}", process::id()));
    let machine = injected(machine()).env("GPUMEM_INJECT_OUT", &file).env("GPUMEM_REPORT", "json");
    let outcomes = [run(&machine, PROGRAM), run(&machine, PROGRAM)];
    let written = fs::read_to_string(&file).unwrap_or_default();
    fs::remove_file(&file).expect("it was written");
    assert!(outcomes.iter().all(|outcome| outcome.stderr.is_empty()), "{outcomes:?}");
    assert_eq!(written.lines().filter(|line| line.starts_with('{') && line.ends_with('}')).count(), 2, "{written}");
}

#[test]
fn a_program_without_allocations_prints_nothing() {
    let machine = injected(machine());
    // One that only looks for devices, one that has a context and allocates nothing, and one that never asks the driver.
    for script in ["try_count", "context 0", "sleep 1"] {
        let outcome = run(&machine, script);
        assert_eq!(outcome.stderr, "", "{outcome}");
    }
    let off = run(&machine.clone().env("GPUMEM_REPORT", "off"), PROGRAM);
    assert_eq!(off.stderr, "");
    // The child of a fork exits as its parent does.
    let forked = run(&machine, &format!("{PROGRAM}; fork sleep 1"));
    assert_eq!(forked.answer("fork sleep 1"), "the child ended with 0");
    assert_eq!(forked.stderr.matches("gpumem: ").count(), 1, "{forked}");
}

#[test]
fn each_device_has_its_table() {
    let script = "context 1; call cuMemAlloc_v2 &a 1048576; context 0; call cuMemAlloc_v2 &b 2097152";
    let outcome = run(&injected(machine().devices(3)), script);
    let devices: Vec<_> = outcome.stderr.lines().filter(|line| line.starts_with("device ")).collect();
    assert_eq!(devices, ["device 0 (Stand-in GPU 0)", "device 1 (Stand-in GPU 1)"], "{outcome}");
}

#[test]
fn a_failed_subscription_is_reported() {
    let outcome = run(&injected(Standin::new()).env("GPUMEM_SOURCE", "cupti"), PROGRAM);
    assert!(outcome.stderr.contains("its allocations were not intercepted: "), "{outcome}");
    let plain = run(&Standin::new(), PROGRAM);
    assert_eq!(outcome.stdout, plain.stdout);
}

#[test]
fn a_library_that_cannot_be_loaded_changes_nothing() {
    let outcome = run(&machine().env("CUDA_INJECTION64_PATH", PathBuf::from("/nowhere/lib.so")), PROGRAM);
    assert_eq!(outcome.stdout, run(&machine(), PROGRAM).stdout);
    assert!(outcome.calls.iter().any(|call| call == "injection_ends=-1"), "{outcome}");
}
