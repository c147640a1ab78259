//! What an estimate is asked for: text, data, what changes would save, and how far it was from a measured run.

mod compare;
mod fit;
mod json;
mod savings;
mod text;

pub use self::{
    compare::{ClassDifference, Comparison, Difference, Measured, PhaseDifference},
    fit::largest,
    savings::{Saving, Savings},
};
