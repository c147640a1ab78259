//! A program whose reports are compared with those of its recording.
//!
//! `GPUMEM_CAPTURE=FILE recorded run OUT` allocates with cudarc on 16 threads, on device 0, and writes each report to OUT: one
//! quoted string a line. `recorded read FILE` prints what a reader of the recording derives, in the same form; it needs no GPU. Sorted, both
//! must be equal, byte by byte.

use std::{
    env,
    error::Error,
    fs::{self, File},
    io::Write,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use cudarc::driver::{CudaContext, CudaSlice, result};
use gpumem::{
    GpuMemTrace, breakdown,
    cudarc::LabelExt,
    sink::{Sink, set_sink},
    summary,
    torch::{memory_snapshot, memory_stats},
    tracker::MemTracker,
};
use gpumem_core::report::Content;
use gpumem_recording::{End, Reader, ReplayedReport};
use gpumem_tests::Random;

const THREADS: u64 = 16;
const STEPS: u64 = 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments.as_slice() {
        ["run", out] => run(out),
        ["read", file] => read(file),
        _ => Err("recorded run OUT | recorded read FILE".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The reports of this run.
struct Reports(Mutex<File>);

impl Reports {
    fn add(&self, report: &str) {
        let line = format!("{report:?}\n");
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(line.as_bytes()).expect("the file takes all reports");
    }
}

fn run(out: &str) -> Result<(), Box<dyn Error>> {
    let reports = Arc::new(Reports(Mutex::new(File::create(out)?)));
    let to = Arc::clone(&reports);
    set_sink(Sink::custom(move |output| match &output.content {
        // A point of the tracker is printed with its time, so it is added below.
        Content::Tracked(_) | Content::Notice(_) => {}
        _ => to.add(&output.to_string()),
    }));
    let context = CudaContext::new(0)?;
    let mut tracker = MemTracker::builder().start()?;
    let mut outer = GpuMemTrace::builder().ctx("train").at_peak(true).start()?;
    let weights: Vec<CudaSlice<f32>> =
        (1..=8).map(|layer| context.default_stream().alloc_zeros::<f32>(layer << 18)).collect::<Result<_, _>>()?;
    weights[7].label("layer8.weight", &[8 << 18])?;
    reports.add(&tracker.track_with("loaded").to_string());
    thread::scope(|threads| {
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                threads.spawn({
                    let (context, outer, reports) = (&context, &outer, &reports);
                    move || work(context, outer, reports, thread)
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    reports.add(&tracker.track_with("trained").to_string());
    // The size is above that of the device. SAFETY: the memory is not used, if there is any.
    let refused = unsafe { result::malloc_sync(1 << 42) };
    assert!(refused.is_err(), "no device has 4 TiB");
    drop(weights);
    reports.add(&tracker.track().to_string());
    reports.add(&summary().to_string());
    reports.add(&breakdown(0)?.to_string());
    reports.add(&memory_stats(0)?.to_string());
    // The trace is open in the first round, and closed in the second.
    for _ in 0..2 {
        reports.add(&outer.peak_holders().ok_or("the peak is kept")?.to_string());
        reports.add(&format!("{:?}", outer.live()));
        outer.stop();
    }
    reports.add(&format!("{:?}", memory_snapshot()?));
    // What is left is reported when the process ends (GPUMEM_LEAKS=1, GPUMEM_PEAK=1).
    // The context must outlive it, or the block is destroyed with the context.
    std::mem::forget(Arc::clone(&context));
    // SAFETY: the block is never used.
    unsafe { result::malloc_sync(3 << 20) }?;
    drop(outer);
    // The report of the refusal waits for a second.
    thread::sleep(std::time::Duration::from_millis(1500));
    Ok(())
}

fn work(
    context: &Arc<CudaContext>,
    outer: &GpuMemTrace,
    reports: &Reports,
    thread: u64,
) -> Result<(), cudarc::driver::DriverError> {
    let _inside = outer.handle().enter();
    context.bind_to_thread()?;
    let stream = context.new_stream()?;
    let mut random = Random::new(thread + 1);
    let mut kept: Vec<CudaSlice<u8>> = Vec::new();
    for step in 0..STEPS {
        let mut trace = GpuMemTrace::builder().ctx(format!("worker {thread}")).thread_local_only().start_or_off();
        for _ in 0..50 {
            match random.below(3) {
                0 if !kept.is_empty() => {
                    let at = usize::try_from(random.below(kept.len() as u64)).unwrap_or(0);
                    drop(kept.swap_remove(at));
                }
                1 => drop(stream.alloc_zeros::<u8>(1 + usize::try_from(random.below(4 << 20)).unwrap_or(0))?),
                _ => kept.push(stream.alloc_zeros::<u8>(1 + usize::try_from(random.below(1 << 20)).unwrap_or(0))?),
            }
        }
        trace.report_n_reset_with(format_args!("step {step}"));
        reports.add(&format!("{:?}", trace.live()));
    }
    Ok(())
}

fn read(file: &str) -> Result<(), Box<dyn Error>> {
    let mut reader = Reader::new(fs::File::open(file)?)?;
    let mut lines = Vec::new();
    reader.replay(|output| {
        let text =
            if let ReplayedReport::LiveBlocks(blocks) = output { format!("{blocks:?}") } else { output.to_string() };
        lines.push(format!("{text:?}"));
    })?;
    for line in &lines {
        println!("{line}");
    }
    eprintln!("{} reports; {:?}; {:?}", lines.len(), reader.skipped(), reader.end());
    if reader.end() == Some(&End::Complete) && reader.skipped().is_nothing() {
        Ok(())
    } else {
        Err("the recording is not complete".into())
    }
}
