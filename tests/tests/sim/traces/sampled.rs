//! Tests sampled traces.

use super::*;

/// Tests that count threads or measure time run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the states of the threads of gpumem.
fn samplers() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("Linux").flatten();
    let states = tasks.map(|task| fs::read_to_string(task.path().join("status")).unwrap_or_default());
    states.filter(|state| state.starts_with("Name:\tgpumem")).collect()
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
    eventually("the sampler has its name", || samplers().len() == 1);
    assert!(traces.iter().all(|trace| trace.data().used.mb() == 2));
    drop(traces);
    eventually("the sampler leaves", || samplers().is_empty());
    // The sampler can start again.
    let trace = start(&gpu);
    eventually("the sampler is back", || samplers().len() == 1);
    drop(trace);
    eventually("the sampler leaves", || samplers().is_empty());
}

/// Python handles signals on its main thread, which would not wake up if another thread received one.
#[test]
fn the_sampler_receives_no_signals() {
    let _alone = alone();
    let gpu = simulated_gpu();
    let _trace = start(&gpu);
    eventually("the sampler blocks all signals", || {
        // The C library keeps two of the signals, and no thread can block SIGKILL and SIGSTOP.
        let blocked = |state: &String| state.contains("SigBlk:\tfffffffe7ffbfeff\n");
        samplers().iter().any(blocked)
    });
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
                        // The sampler has time to pause, and in the first round it has time to end.
                        drop(trace);
                        thread::sleep(Duration::from_millis(if round == 0 { 300 } else { 3 }));
                    }
                    // A sampler that ends may still exist for a moment after the next one has started.
                    eventually("there is one sampler", || samplers().len() <= 1);
                }
            });
        }
    });
    eventually("the sampler leaves", || samplers().is_empty());
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
