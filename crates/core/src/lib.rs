//! The pure parts of [gpumem](https://docs.rs/gpumem): events, the ledger that applies them, the reports that are derived
//! from it, and the formats in which they are written. It has no clock, no driver and no `unsafe`.
//!
//! Programs use the crate `gpumem`. This crate is for its companions (the estimator, the command, the tests), and its
//! interface may change with each release.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

pub mod derive;
pub mod device_model;
pub mod error;
pub mod export;
pub mod inbox;
pub mod ledger;
pub mod model;
pub mod regular_file;
pub mod report;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
