//! The pure parts of [gpumem](https://docs.rs/gpumem): what an event is, how the ledger folds events, what reports are derived
//! from it, and how they are written. No clock, no driver, no `unsafe`.
//!
//! Programs use the crate `gpumem`. This crate is for its companions (the estimator, the command, the tests), and its interface
//! may change with each release.

#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    clippy::missing_errors_doc,
    reason = "`gpumem` re-exports what users name, and documents it; the rest is for our own crates"
)]

#[cfg(feature = "capture")]
pub mod capture;
pub mod derive;
pub mod device_model;
pub mod error;
pub mod export;
pub mod inbox;
pub mod ledger;
pub mod model;
pub mod report;
