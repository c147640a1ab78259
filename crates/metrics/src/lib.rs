//! The GPU memory of this process, measured by [gpumem](https://docs.rs/gpumem) and published as metrics: through the crate `metrics`
//! (feature `metrics`) or OpenTelemetry (feature `opentelemetry`). The names are the same as in `gpumem export`, which publishes these
//! metrics for other processes.
//!
//! | OpenTelemetry | `metrics` | meaning |
//! |---|---|---|
//! | `gpumem.process.live` | `gpumem_process_live_bytes` | live bytes of each `kind` |
//! | `gpumem.process.live.library` | `gpumem_process_live_library_bytes` | of each `library` |
//! | `gpumem.process.live.scope` | `gpumem_process_live_scope_bytes` | of each `scope` |
//! | `gpumem.process.live.place` | `gpumem_process_live_place_bytes` | of each `place` and `scope` |
//! | `gpumem.process.peak` | `gpumem_process_peak_bytes` | the most since the start |
//! | `gpumem.process.interval.peak` | `gpumem_process_interval_peak_bytes` | the most since the last collection |
//! | `gpumem.process.refused` | `gpumem_process_refused_total` | allocations that failed because memory ran out |
//! | `gpumem.process.lost` | `gpumem_process_lost_total` | events that were lost: values may be wrong |
//!
//! All metrics except the last two name the device in `gpu.uuid`, or in `cuda.ordinal` if it has no UUID. Only the largest libraries,
//! scopes and places have their own series; the rest are added up under the name `other`. A line is looked up on another thread, because
//! that can take a second. Until then its place is `(line not looked up yet)`.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

#[cfg(any(feature = "metrics", feature = "opentelemetry"))]
mod data_points;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "opentelemetry")]
mod opentelemetry;
pub mod schema;
#[cfg(feature = "opentelemetry")]
pub mod windows;

#[cfg(feature = "metrics")]
pub use self::metrics::Reporter;
#[cfg(feature = "opentelemetry")]
pub use self::opentelemetry::{instrument, observe};

/// The number of libraries, scopes and places of a device that have their own series.
pub const LARGEST: usize = 10;
