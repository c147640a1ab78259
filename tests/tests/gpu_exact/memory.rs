//! Tests the breakdown of a device's memory, and retries of allocations after the device has run out of memory. Each test runs in a
//! separate process.

use std::{
    fmt::Write as _,
    sync::{OnceLock, atomic::AtomicUsize},
};

use cudarc::driver::result;
use gpumem::{
    breakdown,
    oom::{on_oom, retry_after_trim},
    report::{Breakdown, PartKind},
};
use gpumem_tests::{OwnProcess, part};
use nvml_wrapper::Nvml;

use super::*;

/// The tests below run this test in a separate process.
#[test]
fn child() {
    match part().as_deref() {
        Some("parts") => parts(),
        Some("retry") => retry(),
        _ => {}
    }
}

fn run_child(what: &str) {
    let ended = OwnProcess::new("memory::child").part(what).passes();
    println!("a process of its own: {what}\n{}\nand on stderr:\n{}", ended.stdout, ended.stderr);
}

#[test]
fn the_parts_add_up_to_what_nvml_reports() {
    let Some(_guard) = gpumem_tests::device() else { return };
    run_child("parts");
}

#[test]
fn a_retry_comes_after_the_pool_gave_back() {
    let Some(_guard) = gpumem_tests::device() else { return };
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
fn checked_breakdown(when: &str, mismatches: &mut Mismatches) -> Breakdown {
    let before = nvml_used();
    let reported = breakdown(0).expect("the device can be read");
    let after = nvml_used();
    let sum = reported.parts.iter().map(|part| part.bytes).sum::<Bytes>().get();
    println!("\n{when}: NVML says {before} B before, {after} B after; the parts add up to {sum} B\n{reported}");
    let off = sum.abs_diff(before).min(sum.abs_diff(after));
    mismatches.record_unless(off <= 2 << 20, || format!("{when}: the parts are {off} B from what NVML says"));
    reported
}

fn of_kind(reported: &Breakdown, kind: PartKind) -> u64 {
    reported.parts.iter().filter(|part| part.kind == kind).map(|part| part.bytes.get()).sum()
}

fn parts() {
    let mut mismatches = Mismatches::default();
    call_ok("cuInit", &[0]);
    checked_breakdown("before the context", &mut mismatches);
    Context::primary(0).make_current();
    checked_breakdown("after the context", &mut mismatches);
    subscribe().expect("allocations can be intercepted");

    let [inside, outside] = GpuMemTrace::scope("load", |_| {
        let blocks = [allocate(Way::Plain, 256 * MIB), allocate(Way::Async, 64 * MIB + 1)];
        let inside = GpuMemTrace::scope("step", |_| {
            let block = allocate(Way::Plain, 3 * MIB);
            let inside = checked_breakdown("inside both scopes", &mut mismatches);
            free_block(block);
            inside
        });
        let outside = checked_breakdown("after the inner scope", &mut mismatches);
        blocks.into_iter().for_each(free_block);
        [inside, outside]
    });
    for (reported, expected) in [(&inside, 323 * MIB + 1), (&outside, 320 * MIB + 1)] {
        let of_scopes = of_kind(reported, PartKind::Scope);
        mismatches
            .record_unless(of_scopes == expected as u64, || format!("scopes have {of_scopes} B, not {expected} B"));
    }
    let drivers = [&inside, &outside].map(|reported| of_kind(reported, PartKind::Driver));
    let is_same = drivers[0] > 0 && drivers[0].abs_diff(drivers[1]) <= 64 << 20;
    mismatches.record_unless(is_same, || format!("the driver's part is missing or not the same: {drivers:?}"));
    let counts = status();
    mismatches.record_unless((counts.untracked, counts.lost) == (0, 0), || format!("something was missed: {counts}"));
    mismatches.assert_none();
}

/// Returns the memory that the default pool of device 0 holds.
fn reserved() -> Bytes {
    const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: u64 = 5;
    let pool = cu::default_pool(0);
    Bytes::new(call_for_output("cuMemPoolGetAttribute", |bytes| {
        vec![pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, bytes]
    }))
}

fn retry() {
    static REPORTED: AtomicUsize = AtomicUsize::new(0);
    Context::primary(0).make_current();
    subscribe().expect("allocations can be intercepted");
    on_oom(|_| {
        REPORTED.fetch_add(1, Relaxed);
    });
    // The pool keeps its memory, as the pool of a busy program does.
    cu::keep_pool(0, u64::MAX);
    let mut mismatches = Mismatches::default();
    let (free, _) = result::mem_get_info().expect("a context is current");
    let most = free / 10 * 8 / (2 * MIB) * (2 * MIB);

    // The driver's behaviour without gpumem differs from version to version, so it is measured first.
    free_block(allocate(Way::Async, most));
    println!("the pool keeps {}, and {} are wanted", reserved(), Bytes::from(most));
    let alone = cu::allocate(Way::Plain, most);
    println!("without us: {alone:?}; the pool keeps {}", reserved());
    let is_rejected = alone.is_err();
    alone.into_iter().for_each(free_block);
    let reported = REPORTED.load(Relaxed);
    mismatches.record_unless(reported == usize::from(is_rejected), || format!("{reported} refusals are reported"));

    free_block(allocate(Way::Async, most));
    let mut attempts = 0;
    let got = retry_after_trim(|| {
        attempts += 1;
        println!("attempt {attempts}: the pool keeps {}", reserved());
        cu::allocate(Way::Plain, most)
    });
    println!("kept by the pool: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 1 + usize::from(is_rejected);
    mismatches.record_unless(right, || format!("kept by the pool: {got:?} after {attempts} attempts"));
    got.into_iter().for_each(free_block);

    // This cache frees its block when memory runs out. The pool keeps the block until it is trimmed.
    let mut cache = Some(allocate(Way::Async, most));
    let (mut attempts, mut kept) = (0, Bytes::ZERO);
    let got = retry_after_trim(|| {
        attempts += 1;
        kept = reserved();
        println!("attempt {attempts}: the pool keeps {kept}");
        cu::allocate(Way::Plain, most).inspect_err(|_| cache.take().into_iter().for_each(free_block))
    });
    println!("in a cache: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 2 && kept < Bytes::mib(64);
    mismatches
        .record_unless(right, || format!("in a cache: {got:?} after {attempts} attempts, with {kept} in the pool"));
    got.into_iter().for_each(free_block);
    mismatches
        .record_unless(REPORTED.load(Relaxed) == reported, || "the first failure of a retry is reported".to_owned());
    mismatches.assert_none();
}
