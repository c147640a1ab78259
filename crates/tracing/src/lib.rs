//! The GPU memory of each span of `tracing`, measured by [gpumem](https://docs.rs/gpumem).
//!
//! With a [`GpuMemLayer`], each span is a gpumem scope. The scope counts the allocations of a thread while the thread is in the span or
//! in a span nested in it. Frees of that memory count on any thread. Spans that run at the same time do not affect each other's values.
//!
//! When a span closes, its values are recorded in these fields, if the span declares them:
//!
//! | field | type | meaning |
//! |---|---|---|
//! | `gpu_used` | `i64` | the change of the bytes in use since the start ([`Trace::used`](gpumem::Trace::used)) |
//! | `gpu_peaked` | `u64` | bytes that were needed temporarily on top of that ([`Trace::peaked`](gpumem::Trace::peaked)) |
//! | `gpu_note` | text | the reason why the values may be wrong; not recorded if they are right to the byte |
//!
//! Values that could not be read are not recorded. When a span without these fields closes, an event with the fields is emitted, unless
//! both values are 0.
//!
//! ```
//! # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
//! use tracing::field::Empty;
//! use tracing_subscriber::{fmt::{self, format::FmtSpan}, layer::SubscriberExt, registry, util::SubscriberInitExt};
//!
//! // Layers that are added after `GpuMemLayer` see the values when a span closes.
//! registry().with(gpumem_tracing::GpuMemLayer::new()).with(fmt::layer().with_span_events(FmtSpan::CLOSE)).init();
//!
//! let weights = tracing::info_span!("load", gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty)
//!     .in_scope(|| gpu.alloc(gpumem::Bytes::mib(20)))?; // load{gpu_used=20971520 gpu_peaked=0}: close
//! # drop(weights);
//! # Ok::<(), gpumem::Error>(())
//! ```

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

mod layer;
mod output;
mod stack;

pub use self::{layer::GpuMemLayer, output::sink};
