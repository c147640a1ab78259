//! Tests gauges that the program defines. The latest gauge applies to the whole process, so each test runs in a separate process.

use std::{
    panic::catch_unwind,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use gpumem::{Bytes, Gauge, GpuMemTrace, assert_gpu_mem, gauge::set_gauge, gpu_mem_trace, intercept::Source};
use gpumem_tests::{Ended, OwnProcess, part, reported_lines, reports_of, simulated_gpu};

static IN_USE: AtomicU64 = AtomicU64::new(0);
static READINGS: AtomicU64 = AtomicU64::new(0);

fn allocate(mib: u64) {
    IN_USE.fetch_add(mib << 20, SeqCst);
}

fn free(mib: u64) {
    IN_USE.fetch_sub(mib << 20, SeqCst);
}

/// Runs the test of this name in a separate process. Returns `None` in that process.
fn alone(test: &str, env: &[(&str, &str)]) -> Option<Ended> {
    if part().is_some() {
        // After this call, the reports of this thread are kept.
        drop(reports_of(|| ()));
        return None;
    }
    Some(OwnProcess::new(&format!("custom_gauge::{test}")).part("alone").envs(env).passes())
}

/// Waits until `is_so` is true, that is, until a reading of the gauge has seen the change.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < until, "not within 20 s: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[gpu_mem_trace]
fn load() {
    allocate(20);
}

#[gpu_mem_trace(lines)]
fn step() {
    allocate(7);
    free(7);
}

#[gpu_mem_trace(max_peak = "10 MiB")]
fn with_budget(mib: u64) {
    allocate(mib);
    let before = READINGS.load(SeqCst);
    // When the second reading starts, the first one has been recorded.
    until("the memory is seen", || READINGS.load(SeqCst) >= before + 2);
    free(mib);
}

#[test]
fn guards_attributes_lines_and_budgets_read_it() {
    if let Some(ended) = alone("guards_attributes_lines_and_budgets_read_it", &[]) {
        let notice = "the numbers come from the program's gauge `pool`, for the whole process: peaks between two readings, 1ms apart, \
                      are missed";
        assert_eq!(ended.stderr.matches(notice).count(), 1, "{}", ended.stderr);
        return;
    }
    allocate(100);
    // Before a gauge is set, traces are off, because there is nothing to measure.
    assert_eq!(GpuMemTrace::new().data().gauge, Gauge::Off);
    set_gauge(Gauge::custom("pool", || {
        READINGS.fetch_add(1, SeqCst);
        IN_USE.load(SeqCst)
    }));
    let trace = GpuMemTrace::builder().ctx("guard").on_exit_report(false).start().unwrap();
    allocate(30);
    until("the blip is seen", || trace.data().peak_over_start() == Bytes::mib(30));
    free(25);
    let data = trace.data();
    assert_eq!((data.used.mb(), data.peaked.mb()), (5, 25));
    assert_eq!((data.gauge, data.source, data.simulated, data.stale), (Gauge::Sampled, Source::Custom, false, false));
    trace.report();
    drop(trace);
    load();
    assert_eq!(
        reported_lines(),
        ["△Used Peaked MB:      5     25 (guard)", "△Used Peaked MB:     20      0 (load: exit)"]
    );
    let reports = reports_of(step);
    let used: Vec<_> = reports[0].lines.iter().map(|line| line.trace.used.mb()).collect();
    assert_eq!(used, [7, -7]);
    with_budget(9);
    let broken = catch_unwind(|| with_budget(11)).unwrap_err();
    let message = broken.downcast_ref::<String>().unwrap();
    assert!(message.contains("peak <= 10 MiB: it was 11 MiB, 1 MiB over"), "{message}");
    assert!(message.contains("measured on the program's gauge, sampled, the allocations of all threads"), "{message}");
    assert_gpu_mem!(used == "3 MiB", { allocate(3) });
    let status = gpumem::status();
    assert_eq!((status.gauge, status.source), (Gauge::Sampled, Source::Custom));
}

#[test]
fn what_names_a_gauge_or_a_device_does_not_use_it() {
    if alone("what_names_a_gauge_or_a_device_does_not_use_it", &[]).is_some() {
        for (gauge, source) in [("exact", Source::Simulation), ("sampled", Source::Sampling), ("off", Source::Off)] {
            let own = OwnProcess::new("custom_gauge::what_names_a_gauge_or_a_device_does_not_use_it");
            own.part(source.name()).env("GPUMEM_GAUGE", gauge).passes();
        }
        return;
    }
    let gpu = simulated_gpu();
    set_gauge(Gauge::custom("pool", || IN_USE.load(SeqCst)));
    let expected = part().unwrap();
    let start = || GpuMemTrace::builder().silent(true);
    let source = start().start().unwrap().data().source;
    assert_eq!(source.name(), if expected == "alone" { "custom" } else { &expected });
    for named in [start().device(0), start().gauge(Gauge::Exact), start().thread_local_only()] {
        let trace = named.start_or_off();
        let _block = gpu.alloc(Bytes::mib(1)).unwrap();
        if expected == "alone" {
            assert_eq!((trace.data().source, trace.data().used.mb()), (Source::Simulation, 1));
        }
    }
    // The thread's allocations on the simulated device say nothing about the gauge, so the report does not mention them.
    let trace = start().start().unwrap();
    let _block = gpu.alloc(Bytes::mib(1)).unwrap();
    assert!(!trace.to_string().contains('['), "{trace}");
}

/// A gauge whose function fails has no value, and the program continues.
#[test]
fn functions_that_fail() {
    static IS_KNOWN: AtomicU64 = AtomicU64::new(1);

    if let Some(ended) = alone("functions_that_fail", &[]) {
        let panics = ended.stderr.matches("the function's own panic").count();
        assert_eq!(panics, 1, "{}", ended.stderr);
        for words in [
            "reports show ? while gauge 0 of the program cannot be read: the gauge `maybe` returned no value: its function returned None",
            "a trace is off: the gauge `maybe` returned no value: its function returned None",
            "a trace is off: the gauge `error` returned no value: it is too late",
            "a trace is off: the gauge `huge` returned no value: its function returned",
            "a trace is off: the gauge `panics` returned no value: its function panicked, and is no longer called",
        ] {
            assert_eq!(ended.stderr.matches(words).count(), 1, "{words} in\n{}", ended.stderr);
        }
        return;
    }
    let start = || GpuMemTrace::builder().on_exit_report(false).start_or_off();
    set_gauge(Gauge::custom("maybe", || (IS_KNOWN.load(SeqCst) == 1).then(|| IN_USE.load(SeqCst))));
    let trace = start();
    allocate(2);
    assert_eq!(trace.data().used.mb(), 2);
    IS_KNOWN.store(0, SeqCst);
    assert!(trace.data().stale && !trace.data().is_measured());
    trace.report();
    assert_eq!(reported_lines(), ["△Used Peaked MB:      ?      ?"]);
    assert_eq!(start().data().gauge, Gauge::Off);
    // The open trace continues with the new function, because the gauge has the same name.
    set_gauge(Gauge::custom("maybe", || Bytes::mib(9)));
    assert!(!trace.data().stale && trace.data().used.mb() == 9);
    drop(trace);
    set_gauge(Gauge::custom("error", || Err::<u64, _>("it is too late")));
    assert_eq!(start().data().gauge, Gauge::Off);
    set_gauge(Gauge::custom("huge", || u64::MAX));
    assert_eq!(start().data().gauge, Gauge::Off);
    set_gauge(Gauge::custom("panics", || -> u64 { panic!("the function's own panic") }));
    for _ in 0..10 {
        assert_eq!(start().data().gauge, Gauge::Off);
    }
}

/// The gauge's function uses gpumem itself. Both the function and the trace that calls it get a result.
#[test]
fn functions_that_call_gpumem() {
    static INNER: Mutex<Vec<Gauge>> = Mutex::new(Vec::new());

    if alone("functions_that_call_gpumem", &[]).is_some() {
        return;
    }
    set_gauge(Gauge::custom("recursive", || {
        let inner = GpuMemTrace::builder().silent(true).start_or_off();
        INNER.lock().unwrap().push(inner.data().gauge);
        set_gauge(Gauge::custom("recursive", || IN_USE.load(SeqCst)));
        let _ = gpumem::status();
        IN_USE.load(SeqCst)
    }));
    let trace = GpuMemTrace::builder().silent(true).start().unwrap();
    allocate(4);
    assert_eq!(trace.data().used.mb(), 4);
    assert_eq!(*INNER.lock().unwrap(), [Gauge::Off]);
}

/// The test holds a lock while it drops a trace. The gauge's function waits for the same lock on the sampler's thread.
#[test]
fn a_function_that_waits_for_the_thread_of_a_trace_is_no_deadlock() {
    if alone("a_function_that_waits_for_the_thread_of_a_trace_is_no_deadlock", &[]).is_some() {
        return;
    }
    let (of_program, user) = (Arc::new(Mutex::new(())), thread::current().id());
    let device = Arc::clone(&of_program);
    set_gauge(Gauge::custom("slow", move || {
        if thread::current().id() != user {
            drop(device.lock());
            thread::sleep(Duration::from_millis(20));
            READINGS.fetch_add(1, SeqCst);
        }
        IN_USE.load(SeqCst)
    }));
    for _ in 0..10 {
        let trace = GpuMemTrace::builder().silent(true).start().unwrap();
        let held = of_program.lock().unwrap();
        // This gives the sampler's thread the time to call the function, which waits for the lock.
        thread::sleep(Duration::from_millis(5));
        allocate(1);
        assert_eq!(trace.data().used.mb(), 1);
        drop(trace);
        drop(held);
    }
    let started = Instant::now();
    let trace = GpuMemTrace::builder().silent(true).start().unwrap();
    let before = READINGS.load(SeqCst);
    until("it is read", || READINGS.load(SeqCst) >= before + 4);
    let readings = trace.data().sampling.unwrap().readings;
    assert!(
        readings >= 3 && Duration::from_millis(20) * u32::try_from(readings - 3).unwrap() < started.elapsed(),
        "{readings}"
    );
}
