#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

#[cfg(feature = "cudarc")]
mod cudarc_ext;
pub mod error;
mod query;
pub mod report;
mod session;
pub mod torch;

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;

pub(crate) use gpumem_core::{derive, export, inbox, ledger, model};
#[cfg(feature = "baseline")]
pub(crate) use gpumem_driver::baseline_file;
#[cfg(all(feature = "capture", feature = "cuda", target_os = "linux"))]
pub(crate) use gpumem_driver::nvtx;
#[cfg(feature = "capture")]
pub(crate) use gpumem_driver::{cgroup, clock, recording_file, ring_memory};
pub(crate) use gpumem_driver::{descriptor, own_threads, print, process, recorded_pools, settings, source};

pub use gpumem_core::error::{Error, Result};
#[cfg(feature = "macros")]
pub use gpumem_macros::{assert_gpu_mem, gpu_mem_test, gpu_mem_trace};
pub use model::{ByteDelta, Bytes, DriverUsage, Gauge, GpuMemory, Trace};
pub use query::{
    GpuHandle, b2mb, gpu_mem_get, gpu_mem_get_all, gpu_mem_get_free, gpu_mem_get_free_no_cache, gpu_mem_get_used,
    gpu_mem_get_used_fast, gpu_mem_get_used_no_cache, gpu_with_max_free_mem, is_available, preload, try_gpu_mem_get,
    try_gpu_mem_get_all, try_gpu_mem_get_free, try_gpu_mem_get_free_no_cache, try_gpu_mem_get_used,
    try_gpu_mem_get_used_fast, try_gpu_mem_get_used_no_cache, try_gpu_with_max_free_mem, try_preload,
};
pub use session::{GpuMemTrace, GpuMemTraceBuilder, breakdown, stats, stats_n_reset, status, summary, summary_n_reset};

/// Devices: their number, their names, and the current one.
pub mod device {
    pub use crate::query::{current_device as current, device_count as count, device_name as name};
}

/// Custom gauges, for memory that gpumem cannot see.
pub mod gauge {
    pub use crate::{
        model::{CustomGauge, InUse},
        session::set_gauge,
    };
}

/// The interception of allocations: its source, its start and its status.
pub mod intercept {
    pub use crate::{
        model::Source,
        session::{Collected, Collector, LiveMemory, Status, subscribe, unsubscribe},
    };
}

/// Functions that are called when memory runs out.
pub mod oom {
    pub use crate::session::{on_oom, retry_after_trim};
}

pub mod pool;

/// Scopes of traces on other threads and in tasks.
pub mod scope {
    pub use crate::{
        model::Threads,
        session::{Entered, InScope, ScopeHandle, TaskScope, Traced, adopt},
    };
}

/// Recordings of this process that start and end while it runs. To record a process from its start, set `GPUMEM_CAPTURE` instead.
///
/// ```
/// use gpumem::{Bytes, recording, sim::SimGpu};
///
/// let gpu = SimGpu::install(Bytes::gib(16))?;
/// let file = std::env::temp_dir().join(format!("step-{}.gpumem", std::process::id()));
/// recording::start(&file, recording::Keep::All)?;
/// drop(gpu.alloc(Bytes::mib(64))?);
/// recording::end(); // `gpumem report step-….gpumem`
/// # assert!(std::fs::metadata(&file)?.len() > 100);
/// # std::fs::remove_file(&file)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "capture")]
pub mod recording {
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    pub use crate::session::NVTX_OBSERVER;
    pub use crate::session::{Keep, end, mark, serve_foreign_program, start, start_at_launch};
}

#[cfg(feature = "sim")]
pub mod sim;

/// The target of output: stdout, stderr, a file, JSON lines, or a function.
pub mod sink {
    pub use crate::session::set_sink;
    pub use gpumem_core::{
        export::Sink,
        report::{Content, Level, Output},
    };
}

/// The blocks allocated and freed between two lines, and labels of blocks.
pub mod tracker {
    pub use crate::session::{MemTracker, MemTrackerBuilder, label};
}

/// Labels for the slices of cudarc's safe API.
#[cfg(feature = "cudarc")]
pub mod cudarc {
    pub use crate::cudarc_ext::{AllocLabelledExt, LabelExt};
}

/// [`MemTracker::track_with`](tracker::MemTracker::track_with) the name of the function in which it stands: `track!(tracker)`.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// fn load(tracker: &mut gpumem::tracker::MemTracker) {
///     gpumem::track!(tracker); // 13:59:03Z src/main.rs:2 (load)  device 0: …
/// }
/// # load(&mut gpumem::tracker::MemTracker::new());
/// # Ok::<(), gpumem::Error>(())
/// ```
#[macro_export]
macro_rules! track {
    ($tracker:expr) => {
        $tracker.track_with($crate::__private::function_name(&|| {}))
    };
}
