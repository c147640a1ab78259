//! Tests the holders of memory on a real GPU: scopes, the breakdown, reports when memory runs out, leaks, PyTorch's
//! statistics. `GPUMEM_DEVICE=1` switches them on; `docs/VERIFIED.md` has the results.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_memory -- --nocapture --test-threads=1`
//!
//! The training loop needs libcublas on the loader's path, which `LD_LIBRARY_PATH` extends. Each test is a process of its own.

mod leaks;
mod program;
mod running_out;
mod training;

use std::{
    collections::BTreeSet,
    env,
    ffi::c_void,
    fmt::Write as _,
    mem, ptr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use cudarc::{
    cublas::{CudaBlas, result as blas, sys as blas_sys},
    driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, result, sys},
};
use gpumem::{
    Bytes, Gauge, GpuMemTrace, breakdown,
    intercept::subscribe,
    oom::{on_oom, retry_after_trim},
    report::{Breakdown, OutOfMemory, PartKind},
    status, summary,
    torch::{max_memory_allocated, memory_allocated, memory_snapshot, memory_summary, reset_peak_memory_stats},
};
use gpumem_tests::{OwnProcess, Wrong, device, on_the_standin, part};
use nvml_wrapper::Nvml;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// The stand-in machine has no cuBLAS, and its memory does not become full as that of a card does.
#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&["a_training_loop_adds_up", "out_of_memory_names_who_holds_it"]);
}

/// The tests below run this one in a process of its own.
#[test]
fn child() {
    match part().as_deref() {
        Some("train") => training::train(),
        Some("out of memory") => running_out::out_of_memory(),
        Some("leak") => leaks::leak(),
        Some("retry") => running_out::retry(),
        Some("hook") => running_out::hook(),
        _ => {}
    }
}

/// Returns what a new process wrote to stdout and to stderr.
fn run_child(what: &str, variables: &[(&str, &str)]) -> (String, String) {
    let ended = OwnProcess::new("child").part(what).envs(variables).run();
    println!("a process of its own: {what} {variables:?}\n{}\nand on stderr:\n{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "{what}");
    (ended.stdout, ended.stderr)
}

#[test]
fn a_training_loop_adds_up() {
    let Some(_one) = device() else { return };
    run_child("train", &[]);
}

#[test]
fn a_training_loop_adds_up_with_every_stack() {
    let Some(_one) = device() else { return };
    run_child("train", &[("GPUMEM_BACKTRACE", "1")]);
}

#[test]
fn out_of_memory_names_who_holds_it() {
    let Some(_one) = device() else { return };
    let (said, noticed) = run_child("out of memory", &[]);
    let lines: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("refused at ")).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| noticed.contains(line)), "{lines:?} are named");
    for part in ["device 0 is out of memory: 1 GiB (device) were requested", "\n  in victim\n", "\n   hog "] {
        assert!(noticed.contains(part), "{part:?} is not said");
    }
}

#[test]
fn a_planted_leak_is_found_with_its_line() {
    let Some(_one) = device() else { return };
    let (said, noticed) = run_child("leak", &[("GPUMEM_LEAKS", "1")]);
    let (_, rest) = said.split_once("leaked at ").expect("the child says it");
    let place = rest.lines().next().unwrap_or_default();
    assert!(noticed.contains("1 block (1 MiB) was not freed"), "one is said to be left");
    assert!(noticed.lines().any(|line| line.contains(place) && line.contains("in train > step")), "{place} is named");
}

#[test]
fn a_retry_comes_after_the_pool_gave_back() {
    let Some(_one) = device() else { return };
    run_child("retry", &[]);
}

#[test]
fn what_a_hook_frees_is_counted() {
    let Some(_one) = device() else { return };
    run_child("hook", &[]);
}

/// Returns the used memory of device 0 from NVML, without gpumem.
fn nvml_used() -> u64 {
    static NVML: OnceLock<Nvml> = OnceLock::new();
    let nvml = NVML.get_or_init(|| {
        Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().expect("the driver brings it along")
    });
    let uuid = result::device::get(0).and_then(result::device::get_uuid).expect("device 0 has one").bytes;
    let hex = uuid.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{:02x}", byte.to_ne_bytes()[0]);
        hex
    });
    let uuid = format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    let memory = nvml.device_by_uuid(uuid).and_then(|device| device.memory_info());
    memory.expect("NVML reads the device").used
}

/// The breakdown adds up to what NVML reports before and after it.
fn checked_breakdown(when: &str, wrong: &mut Wrong) -> Breakdown {
    let before = nvml_used();
    let reported = breakdown(0).expect("the device can be read");
    let after = nvml_used();
    let sum = reported.parts.iter().map(|part| part.bytes).sum::<Bytes>().get();
    println!("\n{when}: NVML says {before} B before, {after} B after; the parts add up to {sum} B\n{reported}");
    let off = sum.abs_diff(before).min(sum.abs_diff(after));
    wrong.unless(off <= 2 << 20, || format!("{when}: the parts are {off} B from what NVML says"));
    reported
}

fn of_kind(reported: &Breakdown, kind: PartKind) -> u64 {
    reported.parts.iter().filter(|part| part.kind == kind).map(|part| part.bytes.get()).sum()
}
