//! Tests guards: their numbers, their threads, and each example of fastai's documentation with its exact lines.

mod fastai;
mod sampled;

use std::{
    collections::VecDeque,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Barrier, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use gpumem::{
    Bytes, Gauge, GpuMemTrace, GpuMemTraceBuilder, gpu_mem_trace,
    report::NameStats,
    sim::{SimBlock, SimGpu},
};
use gpumem_tests::{reported_lines, simulated_gpu};

fn mib(gpu: &SimGpu, mib: u64) -> SimBlock {
    gpu.alloc(Bytes::mib(mib)).expect("the device has room")
}

#[track_caller]
fn check_lines(expected: &[&str]) {
    assert_eq!(reported_lines(), expected);
}

fn quiet() -> GpuMemTraceBuilder {
    GpuMemTrace::builder().on_exit_report(false)
}

#[track_caller]
fn check(trace: &GpuMemTrace, used: i64, peaked: u64) {
    let data = trace.data();
    assert_eq!((data.used.get(), data.peaked.get()), (used << 20, peaked << 20));
}

fn some_code() {}

#[test]
fn report_n_reset_takes_one_reading() {
    let gpu = simulated_gpu();
    let mut trace = quiet().start().unwrap();
    let mut kept = Vec::new();
    for _ in 0..3 {
        kept.push(mib(&gpu, 4));
        trace.report_n_reset();
    }
    check_lines(&["△Used Peaked MB:      4      0"; 3]);
    check(&trace, 0, 0);
}

#[test]
fn an_allocation_that_fails_is_not_counted() {
    let gpu = simulated_gpu();
    let trace = quiet().start().unwrap();
    let full = gpu.alloc(Bytes::gib(65)).expect_err("the device has 64");
    assert!(full.is_out_of_memory(), "{full}");
    assert!(gpu.alloc(Bytes::ZERO).is_err_and(|error| !error.is_out_of_memory()));
    check(&trace, 0, 0);
}

#[test]
fn a_stopped_trace_starts_anew() {
    let gpu = simulated_gpu();
    let mut trace = quiet().start().unwrap();
    let a = mib(&gpu, 5);
    trace.stop();
    trace.reset();
    check(&trace, 5, 0);
    trace.start();
    check(&trace, 0, 0);
    drop(a);
    check(&trace, -5, 0);
    trace.start();
    check(&trace, 0, 0);
}

#[test]
fn a_stopped_trace_reports_its_frozen_numbers_on_exit() {
    let gpu = simulated_gpu();
    let mut trace = GpuMemTrace::with_ctx("t");
    let a = mib(&gpu, 5);
    trace.stop();
    drop(a);
    drop(trace);
    check_lines(&["△Used Peaked MB:      5      0 (t: exit)"]);
}

#[test]
fn the_exit_is_reported_while_unwinding() {
    let gpu = simulated_gpu();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _trace = GpuMemTrace::with_ctx("unwinding");
        let _held = mib(&gpu, 6);
        panic!("as it is meant to");
    }));
    assert!(unwound.is_err());
    let unwound = catch_unwind(AssertUnwindSafe(|| GpuMemTrace::scope("in a scope", |_| panic!("as it is meant to"))));
    assert!(unwound.is_err());
    check_lines(&[
        "△Used Peaked MB:      0      6 (unwinding: exit)",
        "△Used Peaked MB:      0      0 (in a scope: exit)",
    ]);
}

#[test]
fn the_device_is_fixed_when_the_trace_starts() {
    let first = simulated_gpu();
    let second = simulated_gpu();
    first.make_current();
    let trace = quiet().start().unwrap();
    let other = quiet().device(second.ordinal()).start().unwrap();
    second.make_current();
    let _kept = (mib(&first, 3), mib(&second, 7));
    check(&trace, 3, 0);
    check(&other, 7, 0);
    assert_eq!((trace.data().device, other.data().device), (first.ordinal(), second.ordinal()));
}

#[test]
fn a_device_that_is_not_there_is_an_error_or_an_idle_trace() {
    let _gpu = simulated_gpu();
    let rejected = quiet().device(9999).start().expect_err("there are fewer");
    assert!(rejected.is_unknown_device() && !rejected.is_unavailable(), "{rejected}");
    let mut off = GpuMemTrace::builder().device(9999).start_or_off();
    assert_eq!((off.data().gauge, off.data().used.get(), off.data().device), (Gauge::Off, 0, 9999));
    off.report();
    off.report_n_reset_with("nothing");
    off.reset();
    off.start();
    off.stop();
    assert_eq!(off.to_string(), "△Used Peaked MB:      ?      ?");
    drop(off);
    drop(GpuMemTrace::builder().gauge(Gauge::Off).start().expect("off is always to be had"));
    check_lines(&[]);
}

#[test]
fn debug_shows_the_state_and_does_not_read() {
    let gpu = simulated_gpu();
    let mut trace = quiet().ctx("c").gauge(Gauge::Sampled).start().unwrap();
    gpu.set_lost(true);
    assert!(format!("{trace:?}").contains("\"running\""), "{trace:?}");
    trace.stop();
    assert!(format!("{trace:?}").contains("\"stopped\""), "{trace:?}");
}

#[test]
fn a_trace_moves_to_another_thread_and_is_dropped_there() {
    let gpu = simulated_gpu();
    let trace = quiet().start().unwrap();
    let kept = thread::scope(|threads| threads.spawn(|| mib(&gpu, 9)).join().unwrap());
    let (trace, used) = thread::spawn(move || {
        let used = trace.data().used;
        (trace, used)
    })
    .join()
    .unwrap();
    assert_eq!(used.mb(), 9);
    thread::spawn(move || drop(trace)).join().unwrap();
    drop(kept);
}

#[test]
fn traces_of_many_threads_count_their_own_memory_and_one_of_all_threads_counts_all() {
    let shared = simulated_gpu();
    let whole = quiet().device(shared.ordinal()).all_threads().start().unwrap();
    let kept = thread::scope(|threads| {
        let work = |thread: u64| {
            let (own, shared) = (simulated_gpu(), &shared);
            move || {
                let mut kept = Vec::new();
                for round in 1..=500 {
                    let trace = quiet().device(own.ordinal()).start().unwrap();
                    let overlapping = quiet().device(shared.ordinal()).start().unwrap();
                    let (scratch, block) = (mib(&own, thread), shared.alloc(Bytes::new(round)).unwrap());
                    drop(scratch);
                    check(&trace, 0, thread);
                    let data = overlapping.data();
                    assert!(
                        data.used == round.cast_signed() && (data.shared, data.lost) == (Bytes::ZERO, 0),
                        "{data:?}"
                    );
                    kept.push(block);
                }
                kept
            }
        };
        let running: Vec<_> = (1..=8).map(|thread| threads.spawn(work(thread))).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let all = 8 * (1..=500).sum::<i64>();
    assert_eq!((whole.data().used.get(), whole.data().peaked.get()), (all, 0));
    assert!(!whole.to_string().contains('['), "{whole}");
    drop(kept);
    assert_eq!((whole.data().used.get(), whole.data().peaked.get()), (0, all.unsigned_abs()));
}

#[test]
fn what_a_simulated_device_has_can_be_allocated() {
    let gpu = SimGpu::install(Bytes::gib(1 << 20)).expect("GPUMEM_SIM is not set");
    let trace = quiet().start().expect("a simulated device");
    let (block, other) = (gpu.alloc(Bytes::gib(300 << 10)).expect("there is room"), simulated_gpu());
    // Devices never share addresses, no matter how many devices are installed later.
    let blocks: Vec<_> =
        (0..4).map(|_| (gpu.alloc(Bytes::gib(100 << 10)).expect("there is room"), mib(&other, 1))).collect();
    assert_eq!(trace.data().used.get(), 700 << 40);
    drop((block, blocks));
    assert_eq!((trace.data().used.get(), trace.data().lost, trace.data().untracked), (0, 0, 0));
    for bytes in [Bytes::new(u64::MAX), Bytes::gib((1 << 24) + 1)] {
        let rejected = SimGpu::install(bytes).unwrap_err().to_string();
        assert!(rejected.contains("memory without an address") && rejected.contains("16384 TiB"), "{rejected}");
    }
}

/// A loader on another thread has its own traces, at times that differ from run to run. They change no row of the training.
#[test]
fn six_runs_of_one_program_have_equal_rows() {
    let rows = ["a", "b", "c", "d", "e", "f"].map(|run| {
        let gpu = simulated_gpu();
        let named =
            |name: &str| GpuMemTrace::builder().device(gpu.ordinal()).ctx(format!("{name} of run {run}")).stats();
        let (started, is_trained) = (Barrier::new(2), AtomicBool::new(false));
        thread::scope(|threads| {
            threads.spawn(|| {
                let mut batches = VecDeque::new();
                while !is_trained.load(Relaxed) {
                    let _load = named("load").start().expect("a simulated device");
                    batches.push_back(mib(&gpu, 64));
                    drop(mib(&gpu, 17));
                    batches.truncate(3);
                    if batches.len() == 1 {
                        started.wait();
                    }
                }
            });
            started.wait();
            let mut kept = Vec::new();
            for step in 0..50 {
                let activations = {
                    let _forward = named("forward").start().expect("a simulated device");
                    drop(mib(&gpu, 100));
                    mib(&gpu, 192)
                };
                let _backward = named("backward").start().expect("a simulated device");
                drop(mib(&gpu, 600));
                drop(activations);
                if step == 0 {
                    kept.extend([mib(&gpu, 768), mib(&gpu, 576)]);
                }
            }
            is_trained.store(true, Relaxed);
        });
        ["forward", "backward"].map(|name| {
            let named = format!("{name} of run {run}");
            let rows = gpumem::stats().names.into_iter().filter(|row| row.name == named);
            let [mut row]: [NameStats; 1] = rows.collect::<Vec<_>>().try_into().expect("there is one");
            (row.name, row.device) = (name.to_owned(), 0);
            row.measured.as_mut().expect("calls were measured").worst.time = Duration::ZERO;
            row
        })
    });
    assert!(rows.iter().all(|row| *row == rows[0]), "{rows:#?}");
    let [forward, backward] = rows[0].each_ref().map(|row| (row.calls, row.doubtful, row.shared));
    assert_eq!([forward, backward], [(50, 0, 0); 2]);
}
