//! The guard: every example of fastai's documentation with its exact lines, the figures, the
//! threads.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use gpumem::{
    Bytes, Gauge, GpuMemTrace, GpuMemTraceBuilder, gpu_mem_trace,
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

mod examples_of_fastai {
    use super::*;

    #[test]
    fn example_1_report_and_data() {
        let _gpu = simulated_gpu();
        let mtrace = quiet().start().unwrap();
        some_code();
        mtrace.report();
        let data = mtrace.data();
        assert_eq!((data.used.mb(), data.peaked.mb()), (0, 0));
        some_code();
        mtrace.report_with("2nd run of some_code()");
        check_lines(&["△Used Peaked MB:      0      0", "△Used Peaked MB:      0      0 (2nd run of some_code())"]);
    }

    #[test]
    fn example_2_a_loop_with_reset() {
        let _gpu = simulated_gpu();
        let mut mtrace = quiet().start().unwrap();
        for i in 0..10 {
            mtrace.reset();
            some_code();
            mtrace.report_with(format!("i={i}"));
        }
        let expected: Vec<_> = (0..10).map(|i| format!("△Used Peaked MB:      0      0 (i={i})")).collect();
        assert_eq!(reported_lines(), expected);
    }

    #[test]
    fn example_3_a_loop_with_report_n_reset() {
        let _gpu = simulated_gpu();
        let mut mtrace = quiet().start().unwrap();
        mtrace.reset();
        for i in 0..10 {
            some_code();
            mtrace.report_n_reset_with(format!("i={i}"));
        }
        let expected: Vec<_> = (0..10).map(|i| format!("△Used Peaked MB:      0      0 (i={i})")).collect();
        assert_eq!(reported_lines(), expected);
    }

    #[test]
    fn start_and_stop() {
        let gpu = simulated_gpu();
        let mut mtrace = quiet().start().unwrap();
        mtrace.start();
        let _a = mib(&gpu, 1);
        mtrace.stop();
        let _b = mib(&gpu, 2);
        mtrace.stop();
        check(&mtrace, 1, 0);
    }

    #[test]
    fn contexts() {
        let _gpu = simulated_gpu();
        let mtrace = quiet().ctx("foobar").start().unwrap();
        mtrace.report();
        mtrace.report_with("1st try");
        mtrace.report_with("2nd try");
        check_lines(&[
            "△Used Peaked MB:      0      0 (foobar)",
            "△Used Peaked MB:      0      0 (foobar: 1st try)",
            "△Used Peaked MB:      0      0 (foobar: 2nd try)",
        ]);
    }

    #[test]
    fn silence() {
        let _gpu = simulated_gpu();
        let mut mtrace = quiet().silent(true).start().unwrap();
        mtrace.report(); // nothing will be printed
        mtrace.silent(false);
        mtrace.report(); // printing resumed
        mtrace.silent(true);
        mtrace.report(); // nothing will be printed
        check_lines(&["△Used Peaked MB:      0      0"]);
    }

    #[test]
    fn the_context_manager() {
        let _gpu = simulated_gpu();
        {
            let _mtrace = GpuMemTrace::new();
            some_code();
        }
        {
            let _mtrace = GpuMemTrace::with_ctx("some context");
            some_code();
        }
        check_lines(&["△Used Peaked MB:      0      0 (exit)", "△Used Peaked MB:      0      0 (some context: exit)"]);
    }

    #[test]
    fn a_function_that_returns_early() {
        fn some_func() -> i32 {
            let _mtrace = GpuMemTrace::with_ctx("some_func");
            // some code
            1
        }
        let _gpu = simulated_gpu();
        assert_eq!(some_func(), 1);
        check_lines(&["△Used Peaked MB:      0      0 (some_func: exit)"]);
    }

    #[test]
    fn the_decorator() {
        #[gpu_mem_trace]
        fn some_func() -> i32 {
            // some code
            1
        }
        #[gpu_mem_trace]
        fn my_function() {}
        let _gpu = simulated_gpu();
        assert_eq!(some_func(), 1);
        my_function();
        check_lines(&[
            "△Used Peaked MB:      0      0 (some_func: exit)",
            "△Used Peaked MB:      0      0 (my_function: exit)",
        ]);
    }

    #[test]
    fn no_report_on_exit() {
        let _gpu = simulated_gpu();
        let mut mtrace = quiet().ctx("some_func").start().unwrap();
        some_code();
        mtrace.stop();
        mtrace.report_with("measured in ctx");
        check_lines(&["△Used Peaked MB:      0      0 (some_func: measured in ctx)"]);
    }

    #[test]
    fn printing_a_trace() {
        let gpu = simulated_gpu();
        let mtrace = quiet().start().unwrap();
        let _kept = mib(&gpu, 1500);
        assert_eq!(mtrace.to_string(), "△Used Peaked MB:  1,500      0");
        assert_eq!(quiet().ctx("foobar").start().unwrap().to_string(), "△Used Peaked MB:      0      0 (foobar)");
        check_lines(&[]);
    }

    #[test]
    fn figures_outlive_the_block() {
        let gpu = simulated_gpu();
        let (data, kept) = GpuMemTrace::scope("", |mtrace| {
            let kept = mib(&gpu, 8);
            mtrace.stop();
            (mtrace.data(), kept)
        });
        assert_eq!((data.used.mb(), data.peaked.mb()), (8, 0));
        drop(kept);
        check_lines(&["△Used Peaked MB:      8      0 (exit)"]);
    }
}

#[test]
fn fastai_deleted_test_sequence() {
    let gpu = simulated_gpu();
    let mut trace = quiet().start().unwrap();
    let a = mib(&gpu, 10);
    let b = mib(&gpu, 15);
    drop(b);
    check(&trace, 10, 15);
    drop(a);
    check(&trace, 0, 25);
    let a = mib(&gpu, 10);
    trace.reset();
    drop(a);
    check(&trace, -10, 0);
    assert_eq!(trace.data().gauge, Gauge::Exact);
}

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
fn what_was_allocated_before_the_first_trace_is_a_difference_all_the_same() {
    let gpu = simulated_gpu();
    let old = mib(&gpu, 100);
    let trace = quiet().start().unwrap();
    drop(old);
    check(&trace, -100, 0);
    let _new = mib(&gpu, 40);
    check(&trace, -60, 0);
}

#[test]
fn figures_are_to_the_byte_and_pools_count_what_is_in_them() {
    let gpu = simulated_gpu();
    let trace = quiet().start().unwrap();
    let kept = gpu.alloc_async(Bytes::new(1)).unwrap();
    drop(gpu.alloc_async(Bytes::new(4097)).unwrap());
    assert_eq!((trace.data().used.get(), trace.data().peaked.get()), (1, 4096 + 1));
    drop(kept);
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
fn a_stopped_trace_reports_its_frozen_figures_on_exit() {
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
    let refused = quiet().device(9999).start().expect_err("there are fewer");
    assert!(refused.is_unknown_device() && !refused.is_unavailable(), "{refused}");
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
fn traces_of_many_threads_count_the_whole_process_on_their_device() {
    let shared = simulated_gpu();
    let whole = quiet().device(shared.ordinal()).start().unwrap();
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
                    assert!(data.used >= round.cast_signed() && data.lost == 0, "nothing is freed there meanwhile");
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
    drop(kept);
    assert_eq!((whole.data().used.get(), whole.data().peaked.get()), (0, all.unsigned_abs()));
}

#[test]
fn one_thread_alone_is_counted_in_a_scope_that_another_handed_over() {
    let gpu = simulated_gpu();
    let outer = quiet().device(gpu.ordinal()).thread_local_only().start().expect("a simulated device");
    let handle = outer.handle();
    let of_worker = thread::scope(|threads| {
        let worker = threads.spawn(|| {
            let _entered = handle.enter();
            let inner = quiet().device(gpu.ordinal()).thread_local_only().start().expect("a simulated device");
            let block = mib(&gpu, 3);
            let others = thread::scope(|threads| threads.spawn(|| mib(&gpu, 100)).join().expect("it runs"));
            check(&inner, 3, 0);
            assert_eq!(inner.live().len(), 1);
            drop(others);
            block
        });
        let own = mib(&gpu, 20);
        let of_worker = worker.join().expect("it runs");
        check(&outer, 23, 0);
        assert_eq!(outer.live().len(), 2);
        drop(own);
        of_worker
    });
    check(&outer, 3, 20);
    drop(of_worker);
    check(&outer, 0, 23);
}

#[test]
fn what_overlaps_another_threads_trace_says_so() {
    let gpu = simulated_gpu();
    let overlapped = |trace: &GpuMemTrace| trace.data().overlapped;
    let mut trace = quiet().device(gpu.ordinal()).start().expect("a simulated device");
    assert!(!overlapped(&trace));
    let local = quiet().device(gpu.ordinal()).thread_local_only().start().expect("a simulated device");
    thread::scope(|threads| {
        threads.spawn(|| {
            let other = quiet().device(gpu.ordinal()).start().expect("a simulated device");
            let _block = mib(&gpu, 1);
            assert!(overlapped(&other));
        });
    });
    assert!(overlapped(&trace) && !overlapped(&local));
    drop(local);
    assert!(trace.to_string().ends_with(" [overlaps other threads]"), "{trace}");
    trace.reset();
    assert!(!overlapped(&trace) && !trace.to_string().contains('['), "{trace}");
}

#[test]
fn nested_traces_are_each_right() {
    let gpu = simulated_gpu();
    let mut traces = Vec::new();
    let mut blocks = Vec::new();
    for depth in 0..100_u64 {
        traces.push(quiet().start().unwrap());
        blocks.push(gpu.alloc(Bytes::new(depth + 1)).unwrap());
        drop(gpu.alloc(Bytes::new(1000 - depth)).unwrap());
    }
    let all: u64 = (1..=100).sum();
    for (depth, trace) in traces.iter().enumerate() {
        let depth = depth as u64;
        let used: u64 = (depth + 1..=100).sum();
        let before = all - used;
        let peak = (depth..100).map(|at| (1..=at + 1).sum::<u64>() + 1000 - at).max().unwrap() - before;
        let data = trace.data();
        assert_eq!((data.used.get(), data.peak_over_start().get()), (used.cast_signed(), peak), "depth {depth}");
    }
}

mod sampled {
    use super::*;

    /// Tests that count threads, or measure time, one at a time.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn samplers() -> usize {
        let tasks = fs::read_dir("/proc/self/task").expect("Linux");
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        tasks
            .flatten()
            .filter(|task| task.file_name() != "self")
            .map(name)
            .filter(|name| name.starts_with("gpumem"))
            .count()
    }

    fn eventually(what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < until, "not within 20 s: {what}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn start(gpu: &SimGpu) -> GpuMemTrace {
        quiet().device(gpu.ordinal()).gauge(Gauge::Sampled).start().unwrap()
    }

    #[test]
    fn a_peak_that_lasts_is_seen_and_the_gauge_says_how_well() {
        let _alone = alone();
        let gpu = simulated_gpu();
        let trace = start(&gpu);
        let kept = mib(&gpu, 10);
        let blip = mib(&gpu, 30);
        eventually("the blip is seen", || trace.data().peak_over_start() == Bytes::mib(40));
        drop(blip);
        check(&trace, 10, 30);
        let sampling = trace.data().sampling.expect("it is sampled");
        assert_eq!(sampling.every, Duration::from_millis(1));
        assert!(sampling.readings > 2 && sampling.longest_gap > Duration::ZERO, "{sampling:?}");
        drop(kept);
    }

    #[test]
    fn growth_that_no_sample_saw_is_no_negative_peak() {
        let _alone = alone();
        let gpu = simulated_gpu();
        let trace = start(&gpu);
        let _kept = mib(&gpu, 300);
        check(&trace, 300, 0);
    }

    #[test]
    fn a_thousand_open_traces_are_one_thread_that_goes_when_the_last_is_closed() {
        let _alone = alone();
        let gpu = simulated_gpu();
        let traces: Vec<_> = (0..1000).map(|_| start(&gpu)).collect();
        let _kept = mib(&gpu, 2);
        eventually("the sampler has its name", || samplers() == 1);
        assert!(traces.iter().all(|trace| trace.data().used.mb() == 2));
        drop(traces);
        eventually("the sampler leaves", || samplers() == 0);
        // And it comes back.
        let trace = start(&gpu);
        eventually("the sampler is back", || samplers() == 1);
        drop(trace);
        eventually("the sampler leaves", || samplers() == 0);
    }

    #[test]
    fn storms_of_starts_and_stops_on_many_threads() {
        let _alone = alone();
        let gpu = simulated_gpu();
        thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    for round in 0..300 {
                        let mut trace = start(&gpu);
                        if round % 3 == 0 {
                            trace.stop();
                        }
                        if round % 5 == 0 {
                            trace.start();
                        }
                        if round % 50 == 0 {
                            // Long enough for the sampler to park, and once to leave.
                            drop(trace);
                            thread::sleep(Duration::from_millis(if round == 0 { 300 } else { 3 }));
                        }
                        assert!(samplers() <= 1);
                    }
                });
            }
        });
        eventually("the sampler leaves", || samplers() == 0);
    }

    #[test]
    fn a_device_that_is_lost_in_the_middle_is_no_number() {
        let _alone = alone();
        let gpu = simulated_gpu();
        let trace = quiet().device(gpu.ordinal()).gauge(Gauge::Sampled).ctx("t").start().unwrap();
        let kept = mib(&gpu, 10);
        check(&trace, 10, 0);
        gpu.set_lost(true);
        drop(kept);
        let data = trace.data();
        assert!(data.stale && !data.is_measured());
        assert_eq!(data.used.mb(), 10, "the last good reading");
        trace.report();
        check_lines(&["△Used Peaked MB:      ?      ? (t)"]);
        gpu.set_lost(false);
        check(&trace, 0, 10);
        trace.report();
        check_lines(&["△Used Peaked MB:      0     10 (t)"]);
        gpu.set_lost(true);
        assert!(quiet().device(gpu.ordinal()).gauge(Gauge::Sampled).start().is_err());
        drop(trace);
    }

    #[test]
    fn sampled_and_exact_traces_run_side_by_side() {
        let _alone = alone();
        let gpu = simulated_gpu();
        let (exact, sampled) = (quiet().start().unwrap(), start(&gpu));
        let _kept = gpu.alloc_async(Bytes::mib(1)).unwrap();
        check(&exact, 1, 0);
        // The pool takes memory from the device in steps of 32 MiB.
        check(&sampled, 32, 0);
    }
}

/// The pool's own high-water mark.
mod pool {
    use gpumem_tests::Random;

    use super::*;

    fn start(gpu: &SimGpu) -> GpuMemTrace {
        quiet().device(gpu.ordinal()).gauge(Gauge::Pool).start().expect("the device has a pool")
    }

    fn pooled(gpu: &SimGpu, mib: u64) -> SimBlock {
        gpu.alloc_async(Bytes::mib(mib)).expect("the device has room")
    }

    #[test]
    fn nested_and_overlapping_traces_each_keep_their_own_peak() {
        let gpu = simulated_gpu();
        let _older = pooled(&gpu, 7);
        drop(pooled(&gpu, 1000));
        let outer = start(&gpu);
        let kept = pooled(&gpu, 10);
        let mut inner = start(&gpu);
        drop(pooled(&gpu, 50));
        check(&inner, 0, 50);
        inner.reset();
        drop(pooled(&gpu, 30));
        let after = start(&gpu);
        check(&after, 0, 0);
        check(&inner, 0, 30);
        drop(inner);
        drop(pooled(&gpu, 20));
        drop(kept);
        check(&after, -10, 20);
        check(&outer, 0, 60);
        let data = outer.data();
        assert_eq!((data.gauge.name(), data.sampling, data.lost, data.stale), ("pool", None, 0, false));
    }

    #[test]
    fn what_is_in_no_pool_is_not_counted() {
        let (gpu, other) = (simulated_gpu(), simulated_gpu());
        let trace = start(&gpu);
        let _others = (mib(&gpu, 100), pooled(&other, 50));
        check(&trace, 0, 0);
    }

    #[test]
    fn a_stopped_trace_is_frozen_and_one_that_starts_again_begins_anew() {
        let gpu = simulated_gpu();
        let mut trace = start(&gpu);
        drop(pooled(&gpu, 5));
        trace.stop();
        let _kept = pooled(&gpu, 9);
        check(&trace, 0, 5);
        trace.start();
        check(&trace, 0, 0);
    }

    #[test]
    fn a_pool_that_cannot_be_read_is_no_number() {
        let gpu = simulated_gpu();
        let mut trace = quiet().device(gpu.ordinal()).gauge(Gauge::Pool).ctx("t").start().unwrap();
        let kept = pooled(&gpu, 10);
        check(&trace, 10, 0);
        gpu.set_lost(true);
        drop(pooled(&gpu, 20));
        assert!(trace.data().stale && !trace.data().is_measured());
        assert_eq!(trace.data().used.mb(), 10, "the last good reading");
        trace.report();
        check_lines(&["△Used Peaked MB:      ?      ? (t)"]);
        assert!(quiet().device(gpu.ordinal()).gauge(Gauge::Pool).start().is_err());
        gpu.set_lost(false);
        check(&trace, 10, 20);
        gpu.set_lost(true);
        trace.reset();
        gpu.set_lost(false);
        drop(kept);
        assert!(trace.data().stale, "nobody knows what it began with");
        trace.reset();
        check(&trace, 0, 0);
    }

    #[test]
    fn one_thread_alone_is_not_to_be_had() {
        let gpu = simulated_gpu();
        let refused = quiet().device(gpu.ordinal()).gauge(Gauge::Pool).thread_local_only().start();
        let error = refused.expect_err("the mark is the whole pool's");
        assert!(error.is_invalid_setting() && error.to_string().contains("the gauge `pool`"), "{error}");
    }

    #[test]
    fn no_device_no_trace() {
        let _gpu = simulated_gpu();
        let error = quiet().device(9999).gauge(Gauge::Pool).start().expect_err("there is no such device");
        assert!(error.is_unknown_device(), "{error}");
    }

    /// Whatever is opened, reset and closed in whatever order, the mark says what hearing each allocation says.
    #[test]
    fn traces_agree_with_exact_ones() {
        let gpu = simulated_gpu();
        for seed in 1..60_u64 {
            let mut random = Random::new(seed);
            let mut random = |below: usize| random.below(below);
            let (mut traces, mut blocks) = (Vec::new(), Vec::new());
            for _ in 0..200 {
                match random(8) {
                    0 => traces.push((start(&gpu), quiet().device(gpu.ordinal()).start().unwrap())),
                    1 if !traces.is_empty() => drop(traces.swap_remove(random(traces.len()))),
                    2 if !traces.is_empty() => {
                        let at = random(traces.len());
                        traces[at].0.reset();
                        traces[at].1.reset();
                    }
                    3 if !traces.is_empty() => {
                        let (pool, exact) = &traces[random(traces.len())];
                        let (pool, exact) = (pool.data(), exact.data());
                        assert_eq!((pool.used, pool.peaked, pool.lost), (exact.used, exact.peaked, 0), "seed {seed}");
                    }
                    4 | 5 if !blocks.is_empty() => drop(blocks.swap_remove(random(blocks.len()))),
                    _ => blocks.push(gpu.alloc_async(Bytes::new(1 + random(1 << 20) as u64)).unwrap()),
                }
            }
        }
    }

    /// Traces that other threads open, read and reset take no peak away, and are not taken for somebody else's resets.
    #[test]
    fn threads_do_not_disturb_each_other() {
        let gpu = simulated_gpu();
        let outer = start(&gpu);
        thread::scope(|threads| {
            let others = [(); 4].map(|()| {
                threads.spawn(|| {
                    let mut trace = start(&gpu);
                    for _ in 0..5000 {
                        assert_eq!((trace.data().lost, start(&gpu).data().lost), (0, 0));
                        trace.reset();
                    }
                })
            });
            for round in (1..5000).cycle().take_while(|_| others.iter().any(|other| !other.is_finished())) {
                let inner = start(&gpu);
                drop(pooled(&gpu, round));
                check(&inner, 0, round);
            }
        });
        drop(pooled(&gpu, 6000));
        check(&outer, 0, 6000);
        assert_eq!(outer.data().lost, 0);
    }
}
