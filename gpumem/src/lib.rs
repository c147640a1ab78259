#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
// Without one of the sources, parts of the plain data and of the messages are for nobody.
#![cfg_attr(
    not(all(
        feature = "nvml",
        feature = "sim",
        feature = "cupti",
        feature = "dispatch",
        feature = "backtrace",
        feature = "capture"
    )),
    allow(dead_code, unused_imports)
)]
// With CUPTI a caller has two words, without it none.
#![cfg_attr(not(feature = "cupti"), allow(clippy::trivially_copy_pass_by_ref))]

#[cfg(feature = "cudarc")]
mod cudarc_ext;
mod query;
mod session;
mod settings;
mod source;
#[allow(unsafe_code, reason = "the one folder that talks to C")]
mod sys;
mod torch;

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;

pub(crate) use gpumem_core::{derive, device_model, error, export, inbox, ledger, model, report};

#[cfg(feature = "cudarc")]
pub use cudarc_ext::{AllocLabelledExt, LabelExt};
pub use error::{Error, Result};
pub use export::{ParseSinkError, Sink};
#[cfg(feature = "macros")]
pub use gpumem_macros::{assert_gpu_mem, gpu_mem_test, gpu_mem_trace};
pub use model::{
    ByteDelta, Bytes, Gauge, GpuMemory, GpuProcess, MemKind, ParseBytesError, ParseGaugeError, ParseSourceError,
    ProcessKind, Sampling, Source, Trace,
};
pub use query::{
    GpuHandle, b2mb, current_device, device_count, device_name, gpu_mem_get, gpu_mem_get_all, gpu_mem_get_free,
    gpu_mem_get_free_no_cache, gpu_mem_get_used, gpu_mem_get_used_fast, gpu_mem_get_used_no_cache,
    gpu_with_max_free_mem, is_available, preload, try_gpu_mem_get, try_gpu_mem_get_all, try_gpu_mem_get_free,
    try_gpu_mem_get_free_no_cache, try_gpu_mem_get_used, try_gpu_mem_get_used_fast, try_gpu_mem_get_used_no_cache,
    try_gpu_with_max_free_mem, try_preload,
};
pub use report::{
    AllocStats, Breakdown, Change, Content, KindStats, Leaks, Level, Line, LiveBlock, MemoryStats, MemorySummary,
    OutOfMemory, Output, Part, PartKind, PeakBounds, PeakHolder, PeakHolders, Peaks, Place, Report, ReservedStats,
    ScopeSummary, SourceLine, Summary, Tally, Tracked,
};
pub use session::{
    Entered, GpuMemTrace, GpuMemTraceBuilder, InScope, LiveMemory, MemTracker, MemTrackerBuilder, ScopeHandle, Status,
    breakdown, label, on_oom, retry_after_trim, set_sink, status, subscribe, summary, unsubscribe,
};
#[cfg(feature = "sim")]
pub use source::sim;
pub use torch::{
    GpuProcesses, empty_cache, get_device_name, list_gpu_processes, max_memory_allocated, max_memory_reserved,
    mem_get_info, memory_allocated, memory_reserved, memory_snapshot, memory_stats, memory_summary,
    reset_peak_memory_stats,
};

/// [`MemTracker::track_with`] the name of the function in which it stands: `track!(tracker)`.
#[macro_export]
macro_rules! track {
    ($tracker:expr) => {
        $tracker.track_with($crate::__private::function_name(&|| {}))
    };
}
