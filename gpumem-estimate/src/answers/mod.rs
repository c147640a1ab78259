//! What an estimate is asked for: text, data, what changes would save, and how far it was from a measured run.

mod compare;
mod json;
mod savings;
mod text;

pub use self::{
    compare::{ClassDifference, Comparison, Difference, Measured, PhaseDifference},
    savings::{Saving, Savings},
};
