//! Tests that users can name each public type and, with the exceptions below, send its values to other threads. The compiler
//! makes most of these checks.

use std::{fmt::Debug, future::Future};

use gpumem::{
    ByteDelta, Bytes, Error, Gauge, GpuHandle, GpuMemTrace, GpuMemTraceBuilder, GpuMemory, Trace, error, gauge,
    intercept, report, scope, sim, sink, torch, tracker,
};

fn plain<T: Send + Sync + Unpin + Debug>() {}

fn data<T: Clone + Debug + Send + Sync + Unpin>() {}

macro_rules! each {
    ($check:ident: $($ty:ty),* $(,)?) => { $($check::<$ty>();)* };
}

#[test]
fn types_go_from_thread_to_thread() {
    each!(plain: GpuMemTrace, GpuMemTraceBuilder, scope::ScopeHandle, scope::TaskScope, sim::SimBlock, sink::Sink);
    each!(data: ByteDelta, Bytes, Error, Gauge, GpuHandle, GpuMemory, Trace, intercept::LiveMemory, intercept::Source, intercept::Status);
    each!(data: error::ParseBytesError, error::ParseGaugeError, error::ParseSinkError, error::ParseSourceError);
    each!(data: gauge::CustomGauge, scope::Threads);
    each!(data: sink::Content, sink::Level, sink::Output, torch::GpuProcesses);
    each!(data:
        report::AllocStats, report::Breakdown, report::MeasuredCalls, report::Change, report::GpuProcess, report::KindStats, report::Leaks,
        report::Line, report::LiveBlock, report::MemKind, report::MemoryStats, report::MemorySummary, report::NameStats,
        report::OutOfMemory, report::Part, report::PartKind, report::PeakBounds, report::PeakHolder,
        report::PeakHolders, report::Peaks, report::Place, report::ProcessKind, report::Report,
        report::ReservedStats, report::Sampling, report::ScopeSummary, report::SourceLine, report::Spread<u64>,
        report::Stats, report::Summary, report::Tally<u64>, report::Tracked, report::WorstCall,
    );
}

#[test]
fn estimates_go_from_thread_to_thread() {
    use gpumem_estimate as e;

    each!(data: e::AllocatorKind, e::Class, e::Dtype, e::Error, e::Estimate, e::Layer);
    each!(data: e::Model, e::Optimizer, e::PeakPart, e::Savings, e::Shape, e::Step, e::Tensors);
}

/// A tracker writes to an output of the program, so it is `Send` but not `Sync`. A scope must be left by the thread that entered
/// it.
#[test]
fn trackers_can_be_sent_and_entered_scopes_cannot() {
    fn sends<T: Send + Unpin>() {}
    fn stays<T: Unpin + Debug>() {}
    sends::<tracker::MemTracker>();
    sends::<tracker::MemTrackerBuilder>();
    stays::<scope::Entered>();
}

/// The library's futures are `Send`, `Sync` and `Unpin` if the futures inside them are, and users can name their types.
#[test]
fn wrapped_futures_stay_send_sync_and_unpin() {
    fn future<T: Future<Output = u8> + Send + Sync + Unpin>(_: &T) {}
    // A process chooses its devices only once, and another test of this process needs simulated ones.
    sim::SimGpu::install(Bytes::gib(16)).expect("GPUMEM_SIM is not set");
    let inner = || std::future::ready(1_u8);
    let traced: scope::Traced<std::future::Ready<u8>> = GpuMemTrace::builder().wrap(inner());
    let handed: scope::InScope<std::future::Ready<u8>> =
        GpuMemTrace::builder().silent(true).start_or_off().handle().wrap(inner());
    future(&traced);
    future(&handed);
}

/// A program can put the data of reports into its own types. They have the documented form there.
#[test]
fn report_data_is_part_of_other_types() {
    #[derive(serde::Serialize)]
    struct Own<'a> {
        name: &'a str,
        needed: Bytes,
        memory: GpuMemory,
        trace: Trace,
        #[serde(flatten)]
        summary: &'a report::Summary,
    }
    let gpu = sim::SimGpu::install(Bytes::gib(16)).expect("GPUMEM_SIM is not set");
    gpu.make_current();
    let trace = GpuMemTrace::builder().ctx("step").silent(true).start().expect("it is exact");
    let block = gpu.alloc(Bytes::mib(3)).expect("there is memory");
    let (memory, summary, trace) = (gpumem::gpu_mem_get(gpu.ordinal()), gpumem::summary(), trace.data());
    let own = Own { name: "own", needed: trace.peak_over_start(), memory, trace, summary: &summary };
    let json = serde_json::to_string(&own).expect("it can be written");
    let rest = summary.to_json().split_off(1);
    assert!(json.starts_with(r#"{"name":"own","needed":3145728,"memory":{"total":17179869184,"free":"#), "{json}");
    assert!(json.contains(r#""gauge":"exact","source":"simulation","used":3145728,"peaked":0,"#), "{json}");
    assert!(json.ends_with(&rest), "{json}\n{rest}");
    drop(block);
}
