//! The results of an estimate: text, data, the savings of changes, and the difference from a measured run.

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
