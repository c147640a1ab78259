//! Tests the breakdown and retries of allocations on a real GPU. `GPUMEM_DEVICE=1` switches the tests on; `docs/VERIFIED.md` has
//! the results.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_memory -- --nocapture --test-threads=1`
//!
//! Each test runs in a separate process.

mod parts;
mod running_out;

use std::{
    fmt::Write as _,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use gpumem::{
    Bytes, GpuMemTrace, breakdown,
    intercept::subscribe,
    oom::{on_oom, retry_after_trim},
    report::{Breakdown, PartKind},
    status,
};
use gpumem_tests::{OwnProcess, Wrong, device, on_the_standin, part};
use nvml_wrapper::Nvml;

const MIB: usize = 1 << 20;

#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&[]);
}

/// The tests below run this test in a separate process.
#[test]
fn child() {
    match part().as_deref() {
        Some("parts") => parts::parts(),
        Some("retry") => running_out::retry(),
        _ => {}
    }
}

fn run_child(what: &str) {
    let ended = OwnProcess::new("child").part(what).run();
    println!("a process of its own: {what}\n{}\nand on stderr:\n{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "{what}");
}

#[test]
fn the_parts_add_up_to_what_nvml_reports() {
    let Some(_one) = device() else { return };
    run_child("parts");
}

#[test]
fn a_retry_comes_after_the_pool_gave_back() {
    let Some(_one) = device() else { return };
    run_child("retry");
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

/// Returns the breakdown. Its sum must be what NVML reports before the breakdown or after it.
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
