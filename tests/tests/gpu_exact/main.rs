//! Tests exact traces, the breakdown and retries of allocations on a real GPU. `GPUMEM_DEVICE=1` switches the tests on;
//! `docs/VERIFIED.md` has the results.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_exact -- --nocapture --test-threads=1`

mod blips;
mod cu;
mod devices;
mod endings;
mod graphs;
mod imports;
mod memory;
mod random;
mod replay;

use std::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use gpumem::{
    Bytes, Gauge, GpuMemTrace, Trace, device,
    intercept::{subscribe, unsubscribe},
    status,
    torch::{
        empty_cache, max_memory_allocated, max_memory_reserved, memory_allocated, memory_reserved, memory_stats,
        memory_summary, reset_peak_memory_stats,
    },
    try_gpu_mem_get,
};
use gpumem_tests::{
    Mismatches, Random, Standin,
    driver::{call, call_for_output, call_ok, try_call_for_output},
    on_the_standin, on_the_standin_with_both_sources, reported_by_both,
};

use crate::cu::{Block, Context, NULL_STREAM, Way, free_block};

const MIB: usize = 1 << 20;

/// Makes device 0 current and intercepts its allocations. Returns a lock that lets only one test run at a time.
fn device() -> Option<MutexGuard<'static, ()>> {
    let guard = gpumem_tests::device()?;
    Context::primary(0).make_current();
    subscribe().expect("allocations can be intercepted");
    Some(guard)
}

fn exact() -> GpuMemTrace {
    exact_on(0)
}

fn exact_on(ordinal: u32) -> GpuMemTrace {
    let builder = GpuMemTrace::builder().gauge(Gauge::Exact).device(ordinal);
    // The trace is compared with the memory of the whole process.
    builder.all_threads().on_exit_report(false).start().expect("allocations can be intercepted")
}

fn allocate(way: Way, bytes: usize) -> Block {
    cu::allocate(way, bytes).unwrap_or_else(|error| panic!("{bytes} bytes by {way:?}: {error:?}"))
}

/// Returns the used memory of the device, as the driver reports it, including other processes.
fn nvml(ordinal: u32) -> i64 {
    try_gpu_mem_get(ordinal).expect("the device can be read").used.get().cast_signed()
}

/// Returns a number of bytes as text, in MiB if it is a whole number of MiB.
fn mib(bytes: i64) -> String {
    let whole = bytes >> 20;
    if whole << 20 == bytes { format!("{whole} MiB") } else { format!("{bytes} B") }
}

/// Returns an error unless used and peaked are right to the byte and no event was missed.
fn compare(trace: &GpuMemTrace, what: &str, used: i64, peaked: u64) -> Result<(), String> {
    let data = trace.data();
    let message = format!(
        "used {}, peaked {}, lost {}, untracked {} <- expected {}, {}: {what}",
        mib(data.used.get()),
        mib(data.peaked.get().cast_signed()),
        data.lost,
        data.untracked,
        mib(used),
        mib(peaked.cast_signed())
    );
    println!("{message}");
    let right = data.gauge == Gauge::Exact && data.used.get() == used && data.peaked.get() == peaked;
    if right && (data.lost, data.untracked) == (0, 0) { Ok(()) } else { Err(message) }
}

fn check(trace: &GpuMemTrace, what: &str, used: i64, peaked: u64) {
    if let Err(message) = compare(trace, what, used, peaked) {
        panic!("{message}");
    }
}

fn in_mib(count: i64) -> i64 {
    count << 20
}

/// The stand-in driver knows neither peers nor pinned memory that is older than the subscription, and two processes cannot share
/// its memory.
#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&[
        "blocks_older_than_the_subscription_are_looked_up",
        "two_devices_are_counted_separately",
        "imports_in_two_processes",
    ]);
}

/// Each of the other runs on the stand-in driver uses one source, and this run uses both.
#[cfg(target_arch = "x86_64")]
#[test]
fn on_the_stand_in_driver_with_both_sources() {
    on_the_standin_with_both_sources(Standin::new().devices(2));
}

/// The program uses each kind of memory, streams, pools and contexts on two threads, then captures, graphs and imports, and some
/// calls fail.
#[test]
fn both_sources_report_the_same() {
    let Some(_guard) = device() else { return };
    let reported = reported_by_both(|| {
        every_kind_of_call();
        thread::spawn(|| {
            Context::primary(0).make_current();
            every_kind_of_call();
        })
        .join()
        .expect("the thread did not panic");
        graphs::every_kind_of_call();
    });
    let Some([by_dispatch, by_cupti]) = reported else { return };
    for (dispatch, cupti) in by_dispatch.iter().zip(&by_cupti) {
        assert_eq!(dispatch, cupti, "{by_dispatch:#?}\n{by_cupti:#?}");
    }
    assert_eq!(by_dispatch.len(), by_cupti.len());
    for kind in [
        "Allocated",
        "Pooled",
        "Rejected",
        "NotCreated",
        "Freeing",
        "Freed",
        "Created",
        "Releasing",
        "Mapped",
        "Unmapping",
        "Pool ",
        "StreamCreated",
        "StreamDestroyed",
        "ContextGone",
        "id_kind: Array",
        "id_kind: Registered",
        "memory: Managed",
        "pool: Some",
        "CaptureStarted",
        "CaptureEnded",
        "succeeded: false",
        "Graphs",
        "ForeignHandle",
        "Foreign {",
    ] {
        assert!(by_dispatch.iter().any(|call| call.contains(kind)), "no {kind} event was reported: {by_dispatch:#?}");
    }
    println!("both sources recorded {} events", by_dispatch.len());
}

fn every_kind_of_call() {
    for way in Way::ALL {
        let [kept, freed] = [10 * MIB, 3 * MIB].map(|bytes| allocate(way, bytes));
        free_block(freed);
        free_block(kept);
    }
    for rejected in
        [cu::allocate(Way::Plain, 1 << 50), cu::allocate(Way::Async, 1 << 50), cu::allocate(Way::Vmm, 1 << 50)]
    {
        assert!(rejected.is_err(), "{rejected:?} is more than a device has");
    }
    assert_ne!(call("cuMemFree_v2", &[0x1234]), 0, "that is not a block");
    assert_ne!(call("cuMemFreeAsync", &[0x1234, NULL_STREAM]), 0, "that is not a block");
    let host = vec![0_u8; 1 << 16];
    call_ok("cuMemHostRegister_v2", &[cu::address(&*host), host.len() as u64, 0]);
    call_ok("cuMemHostUnregister", &[cu::address(&*host)]);

    let stream = cu::stream();
    let pools = [cu::pool_create(0), cu::default_pool(0)];
    for pool in pools {
        for block in [
            call_for_output("cuMemAllocFromPoolAsync", |at| vec![at, MIB as u64, pool, stream]),
            call_for_output("cuMemAllocAsync", |at| vec![at, MIB as u64, stream]),
        ] {
            call_ok("cuMemFreeAsync", &[block, stream]);
        }
    }
    call_ok("cuStreamSynchronize", &[stream]);
    call_ok("cuMemPoolDestroy", &[pools[0]]);
    call_ok("cuStreamDestroy_v2", &[stream]);

    let context = Context::create(0);
    let _freed_with_context = allocate(Way::Plain, MIB);
    context.destroy();
    Context::primary(0).make_current();
}

#[test]
fn every_way_to_allocate_is_counted_to_the_byte() {
    let Some(_guard) = device() else { return };
    let mut mismatches = Mismatches::default();
    for way in Way::ALL {
        for bytes in [1, 1000, 4096, 1_000_003, 3 * MIB] {
            let trace = exact();
            let block = allocate(way, bytes);
            let counted = block.counted();
            assert!(counted == 0 || counted >= i64::try_from(bytes).expect("small"), "{block:?}");
            mismatches.record(compare(&trace, &format!("{way:?}: {bytes} bytes asked for"), counted, 0));
            free_block(block);
            mismatches.record(compare(&trace, &format!("{way:?}: freed"), 0, counted.unsigned_abs()));
        }
    }
    mismatches.assert_none();
}

fn random_way(random: &mut Random) -> Way {
    Way::ALL[random.below(Way::ALL.len())]
}

/// Returns a size of at most 6 MiB. Small and large sizes are equally likely: each power of two is as likely as the others.
fn random_size(random: &mut Random) -> usize {
    let power = random.below(23);
    1 + random.below(1 << power) + (1 << power) / 2
}

#[test]
fn blocks_older_than_the_subscription_are_looked_up() {
    let Some(_guard) = device() else { return };
    let mut mismatches = Mismatches::default();
    let mut older = |way, bytes: usize, right: &dyn Fn(i64, i64, u64) -> bool| {
        unsubscribe();
        let block = allocate(way, bytes);
        subscribe().expect("nobody else is subscribed");
        let trace = exact();
        let counted = block.counted();
        free_block(block);
        let data = trace.data();
        let (used, untracked) = (data.used.get(), data.untracked);
        let message = format!("{way:?} of {counted} counted bytes, older: used {used}, untracked {untracked}");
        println!("{message}");
        let right = right(counted, used, untracked) && (data.peaked.get(), data.lost) == (0, 0);
        mismatches.record(if right { Ok(()) } else { Err(message) });
    };
    for way in [Way::Plain, Way::Async, Way::Managed, Way::Pinned] {
        for bytes in [64 * MIB, 2 * MIB] {
            older(way, bytes, &|counted, used, untracked| (used, untracked) == (-counted, 0));
        }
    }
    // The driver may round up the size that it reports.
    let rounded = |counted: i64, used: i64, _: u64| used <= -counted && used > -counted - in_mib(2);
    for way in [Way::Plain, Way::Async, Way::Pitched] {
        older(way, 1_000_003, &rounded);
    }
    // The driver does not tell the size of these blocks, and gpumem does not guess it.
    for way in [Way::Array, Way::Vmm, Way::VmmReleasedEarly] {
        older(way, 4 * MIB, &|_, used, _| used == 0);
    }
    mismatches.assert_none();
}

#[test]
fn what_fails_is_not_counted() {
    let Some(_guard) = device() else { return };
    let (trace, mut mismatches) = (exact(), Mismatches::default());
    let too_much = usize::try_from(try_gpu_mem_get(0).expect("the device can be read").total.get()).expect("64 bits");
    for way in [Way::Plain, Way::Pitched, Way::Async, Way::Vmm] {
        let error = cu::allocate(way, too_much + 64 * MIB).expect_err("more than the device has");
        mismatches.record(compare(&trace, &format!("{way:?} of more than there is: {error:?}"), 0, 0));
    }
    let block = allocate(Way::Plain, MIB);
    let size = in_mib(1);
    let inside = call("cuMemFree_v2", &[block.name() + 4096]);
    assert_ne!(inside, 0, "the middle of a block is not a block");
    mismatches.record(compare(&trace, &format!("cuMemFree of the middle of a block: {inside}"), size, 0));
    let name = block.name();
    free_block(block);
    for (what, function, arguments) in [
        ("what was freed", "cuMemFree_v2", &[name][..]),
        ("no address", "cuMemFree_v2", &[0xdead_0000]),
        ("no address", "cuMemFreeAsync", &[0xdead_0000, NULL_STREAM]),
        ("no address", "cuMemFreeHost", &[0xdead_0000]),
    ] {
        let rejected = call(function, arguments);
        mismatches.record(compare(&trace, &format!("{function} of {what}: {rejected}"), 0, 1 << 20));
        assert_ne!(rejected, 0, "{function} of {what}");
    }
    call_ok("cuMemFree_v2", &[0]);
    mismatches.record(compare(&trace, "cuMemFree_v2 of 0", 0, 1 << 20));
    mismatches.assert_none();
}

#[test]
fn unsubscribing_in_the_middle_keeps_what_is_known() {
    let Some(_guard) = device() else { return };
    let spanning = exact();
    let (plain, pooled) = (allocate(Way::Plain, 10 * MIB), allocate(Way::Async, 20 * MIB));
    let virtually = allocate(Way::Vmm, 6 * MIB);
    unsubscribe();
    assert!(status().intercepted_by.is_none());
    let rejected = GpuMemTrace::builder().gauge(Gauge::Exact).device(0).start();
    println!("an exact trace while unsubscribed: {}", rejected.expect_err("nothing is intercepted"));
    let without_cupti = allocate(Way::Plain, 40 * MIB);
    subscribe().expect("nobody else is subscribed");
    let trace = exact();
    free_block(plain);
    free_block(pooled);
    free_block(virtually);
    check(&trace, "known before, freed after", in_mib(-36), 0);
    free_block(without_cupti);
    check(&trace, "not known, looked up", in_mib(-76), 0);
    let data = spanning.data();
    println!("the trace that spans it: used {}, lost {}", mib(data.used.get()), data.lost);
    assert!(data.lost > 0, "it says that something was missed");
}
