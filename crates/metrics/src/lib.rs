//! GPU memory of this process, measured by [gpumem](https://docs.rs/gpumem), as metrics: of the crate `metrics` (feature `metrics`), or of
//! OpenTelemetry (feature `opentelemetry`). The names are those of `gpumem export`, which does the same from outside of programs.
//!
//! | OpenTelemetry | `metrics` | what it is |
//! |---|---|---|
//! | `gpumem.process.live` | `gpumem_process_live_bytes` | live bytes of each `kind` |
//! | `gpumem.process.live.library` | `gpumem_process_live_library_bytes` | of each `library` |
//! | `gpumem.process.live.scope` | `gpumem_process_live_scope_bytes` | of each `scope` |
//! | `gpumem.process.live.place` | `gpumem_process_live_place_bytes` | of each `place` and `scope` |
//! | `gpumem.process.peak` | `gpumem_process_peak_bytes` | the most since the start |
//! | `gpumem.process.interval.peak` | `gpumem_process_interval_peak_bytes` | the most since the last collection |
//! | `gpumem.process.refused` | `gpumem_process_refused_total` | allocations that the driver refused |
//! | `gpumem.process.lost` | `gpumem_process_lost_total` | events that were lost: figures may be wrong |
//!
//! All but the last two have the device in `gpu.uuid`, or `cuda.ordinal` if it has no UUID. Only the largest libraries, scopes and places
//! have series of their own, and the sum of the others is called `other`. A line is looked up on another thread, because that can take a
//! second; until then the place is `(line not looked up yet)`.

#![forbid(unsafe_code)]

#[cfg(any(feature = "metrics", feature = "opentelemetry"))]
mod figures;
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

/// The number of libraries, scopes and places of a device that have series of their own.
pub const LARGEST: usize = 10;
