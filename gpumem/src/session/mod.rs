//! The session: everything that a gpumem run owns.

mod budgets;
#[cfg(all(feature = "capture", feature = "cuda", target_os = "linux"))]
mod communicators;
mod events;
mod exit;
mod guards;
mod output;
mod pools;
#[cfg(all(feature = "capture", feature = "cuda", target_os = "linux"))]
mod ranges;
#[cfg(feature = "capture")]
mod recorded;
#[cfg(feature = "capture")]
mod recorder;
mod start;
mod state;
#[cfg(all(test, feature = "sim"))]
mod testing;
mod views;

#[cfg(feature = "sim")]
pub use self::budgets::simulated_gpu;
#[cfg(all(feature = "capture", feature = "cuda", target_os = "linux"))]
pub use self::ranges::NVTX_OBSERVER;
#[cfg(all(test, feature = "sim"))]
use self::state::OVERRIDE;
use self::state::{SESSION, of_process};
#[cfg(all(test, feature = "sim"))]
use self::testing::TestSession;
pub use self::{
    budgets::Budget,
    events::{adopt, label, set_gauge, subscribe, unsubscribe},
    guards::{
        BodyGuard, End, Entered, GpuMemTrace, GpuMemTraceBuilder, InScope, Lines, MemTracker, MemTrackerBuilder,
        ScopeHandle, TaskScope, TraceSpec, Traced,
    },
    output::{on_oom, retry_after_trim, set_sink, stats, stats_n_reset},
    pools::Pool,
    views::{Collected, Collector, LiveMemory, Status, breakdown, status, summary, summary_n_reset},
};
pub(crate) use self::{
    output::Notice,
    state::{Session, alive, current},
    views::statistics,
};
#[cfg(feature = "capture")]
pub use self::{
    recorded::{end, mark, serve_foreign_program, start, start_at_launch},
    recorder::Keep,
};
pub use gpumem_core::report::{Quantity, Relation};

#[cfg(all(test, feature = "sim", feature = "macros"))]
mod tests;
