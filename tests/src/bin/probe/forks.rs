//! Forks a process whose threads are busy: no child may hang, and none may print.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{panic, process, thread};

use gpumem::{Bytes, Gauge, GpuHandle, GpuMemTrace, scope::ScopeHandle, sink::Sink, tracker::MemTracker};
use gpumem_tests::Random;

use crate::Trouble;
use crate::raw::{self, Names, invoke};

/// The longest time that a child may take. A child needs a few milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// The traces that the main thread had before the fork.
struct Own {
    traces: Vec<GpuMemTrace>,
    tracker: MemTracker,
    handle: GpuHandle,
    scope: ScopeHandle,
}

impl Own {
    fn new() -> Result<Self, Trouble> {
        let silent = || GpuMemTrace::builder().ctx("own");
        let traces = vec![
            silent().start()?,
            silent().gauge(Gauge::Sampled).start()?,
            silent().thread_local_only().start()?,
            silent().gauge(Gauge::Off).start()?,
        ];
        let scope = traces[0].handle();
        let tracker = MemTracker::builder().start()?;
        Ok(Self { traces, tracker, handle: GpuHandle::new(0)?, scope })
    }
}

/// Drops the reports of traces, and writes all other output to stderr.
fn without_reports() -> Sink {
    Sink::custom(|output| {
        if output.report().is_none() {
            eprintln!("{output}");
        }
    })
}

/// Forks this number of children while other threads use all parts of gpumem.
pub(crate) fn forks(children: u64) -> Result<String, Trouble> {
    let names = Names::default();
    for call in ["cuInit 0", "cuDevicePrimaryCtxRetain &context 0", "cuCtxSetCurrent context"] {
        names.call(call)?;
    }
    let context = names.get("context");
    gpumem::sink::set_sink(without_reports());
    let mut own = Own::new()?;
    let (mut output, said) = io::pipe()?;
    let going = AtomicBool::new(true);
    thread::scope(|scope| {
        for seed in 0..5 {
            let going = &going;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                _ = invoke("cuCtxSetCurrent", [context, 0, 0, 0, 0, 0]);
                while going.load(Ordering::Relaxed) {
                    busy(&mut random);
                }
            });
        }
        let outcome = (0..children).try_for_each(|seed| one_child(&mut own, seed, &said));
        going.store(false, Ordering::Relaxed);
        outcome
    })?;
    drop(said);
    let mut printed = String::new();
    output.read_to_string(&mut printed)?;
    if printed.is_empty() {
        Ok("none hung, none printed".to_owned())
    } else {
        Err(format!("printed: {printed}").into())
    }
}

/// Uses functions that take gpumem's and the standard library's locks.
fn busy(random: &mut Random) {
    static LABELLED: &[&str] = &["weight", "bias"];
    let builder = || GpuMemTrace::builder().ctx(format!("busy {}", std::process::id()));
    match random.below(13) {
        0..3 => {
            let mut address = 0_u64;
            let size = 1 + random.below(2_u64 << 20);
            if matches!(invoke("cuMemAlloc_v2", [&raw mut address as u64, size, 0, 0, 0, 0]), Ok(0)) {
                _ = gpumem::tracker::label(LABELLED[random.below(2_usize)], &[1], "u8", address);
                _ = invoke("cuMemFree_v2", [address, 0, 0, 0, 0, 0]);
            }
        }
        3 => drop(builder().start_or_off()),
        4 => drop(builder().gauge(Gauge::Sampled).stats().start_or_off()),
        5 => _ = gpumem::torch::memory_stats(0),
        6 => {
            _ = gpumem::summary().to_string();
            _ = gpumem::stats().to_string();
            _ = gpumem::status().to_string();
        }
        7 => _ = gpumem::breakdown(0),
        8 => {
            _ = MemTracker::builder().to(io::sink()).start().map(|mut tracker| tracker.track());
        }
        9 => {
            gpumem::sink::set_sink(without_reports());
            gpumem::oom::on_oom(|_| {});
        }
        10 => {
            let mut address = 0_u64;
            _ = invoke("cuMemAlloc_v2", [&raw mut address as u64, 1 << 50, 0, 0, 0, 0]);
        }
        11 => {
            gpumem::intercept::unsubscribe();
            _ = gpumem::intercept::subscribe();
        }
        _ => {
            let (_out, _err) = (io::stdout().lock(), io::stderr().lock());
            thread::sleep(Duration::from_micros(random.below(300)));
        }
    }
}

fn one_child(own: &mut Own, seed: u64, said: &PipeWriter) -> Result<(), Trouble> {
    let (mut steps, mut step) = io::pipe()?;
    let Some(child) = raw::fork_only()? else {
        // The lines about the child's own steps do not count as printed, because they go to another pipe.
        let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            raw::become_output(said);
            of_child(own, seed, &mut step);
        }));
        raw::end(i32::from(outcome.is_err()), seed.is_multiple_of(2));
    };
    drop(step);
    let started = Instant::now();
    let status = loop {
        if let Some(status) = raw::ended(child)? {
            break status;
        }
        if started.elapsed() > PATIENCE {
            raw::kill(child);
            return Err(format!("child {seed} hung in {}", last(&mut steps)?).into());
        }
        thread::sleep(Duration::from_micros(200));
    };
    if status == 0 { Ok(()) } else { Err(format!("child {seed} ended with {status} in {}", last(&mut steps)?).into()) }
}

/// Returns the last step that a child started.
fn last(steps: &mut PipeReader) -> Result<String, Trouble> {
    let mut all = Vec::new();
    steps.read_to_end(&mut all)?;
    Ok(all.last().map_or_else(|| "no step".to_owned(), |step| format!("step {step}")))
}

#[gpumem::gpu_mem_trace(lines, max_peak = "1MiB")]
fn traced(answer: u64) -> u64 {
    let answer = answer * 2;
    answer / 2
}

/// Calls all gpumem functions, in an order that depends on the seed.
fn of_child(own: &mut Own, seed: u64, step: &mut impl Write) {
    const STEPS: u8 = 27;
    let mut random = Random::new(seed);
    let mut order: Vec<u8> = (0..STEPS).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at + 1));
    }
    for number in order {
        _ = step.write(&[number]);
        match number {
            0 => drop(GpuMemTrace::new()),
            1 => assert!(GpuMemTrace::builder().start().is_err()),
            2 => GpuMemTrace::with_ctx("child").report(),
            3 => own.traces.iter_mut().for_each(|trace| trace.report()),
            4 => own.traces.iter_mut().for_each(GpuMemTrace::report_n_reset),
            5 => own.traces.iter().for_each(|trace| assert!(trace.data().used.get() == 0)),
            6 => own.traces.iter().for_each(|trace| assert!(trace.live().is_empty() && !trace.to_string().is_empty())),
            7 => own.traces.truncate(random.below(3_usize)),
            8 => own.traces.iter_mut().for_each(|trace| (trace.stop(), trace.start()).0),
            9 => own.scope.in_scope(|| ()),
            10 => drop(own.tracker.track()),
            11 => drop(MemTracker::new().track()),
            12 => gpumem::sink::set_sink(
                [Sink::Stdout, Sink::Stderr, Sink::Off, Sink::custom(|_| {})][random.below(4_usize)].clone(),
            ),
            13 => gpumem::oom::on_oom(|_| {}),
            14 => assert!(gpumem::stats_n_reset().names.is_empty() && !gpumem::summary().to_string().is_empty()),
            15 => _ = gpumem::status().to_string(),
            16 => assert!(gpumem::breakdown(None).is_err()),
            17 => assert!(gpumem::intercept::subscribe().is_err()),
            18 => gpumem::intercept::unsubscribe(),
            19 => assert!(gpumem::tracker::label("weight", &[1], "u8", 512).is_err()),
            20 => assert!(gpumem::torch::memory_allocated(0).is_err() && gpumem::torch::memory_stats(0).is_err()),
            21 => assert!(gpumem::torch::memory_summary(0).is_err() && gpumem::torch::memory_snapshot().is_err()),
            22 => assert!(gpumem::torch::empty_cache().is_err() && gpumem::torch::list_gpu_processes(0).is_err()),
            23 => assert!(gpumem::gpu_mem_get(0).total == Bytes::ZERO && gpumem::gpu_mem_get_all().is_empty()),
            24 => assert!(gpumem::try_gpu_mem_get_used_fast(&own.handle).is_err() && !gpumem::is_available()),
            25 => assert!(gpumem::oom::retry_after_trim(|| Err::<(), _>(())).is_err()),
            _ => assert!(traced(21) == 21 && process::id() > 0),
        }
    }
}
