//! Limits of the memory that a function may use, and the peaks of earlier runs.

mod baseline;
mod budget;
mod facts;
mod others;
mod turns;

pub use self::budget::Budget;
#[cfg(feature = "sim")]
pub use self::budget::simulated_gpu;
