//! Limits of the memory that a function may use, and the peaks of earlier runs.

mod baseline;
mod budget;
mod exclusive_tests;
mod other_threads;
mod thread_facts;

pub use self::budget::Budget;
#[cfg(feature = "sim")]
pub use self::budget::simulated_gpu;
