//! The results of an estimate: text, data and what changes would save.

mod fit;
mod savings;
mod text;

pub use self::savings::{Saving, Savings};
