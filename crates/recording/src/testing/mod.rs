//! Random items for tests of recordings, also for those of other crates.

mod any;
mod random;

pub use self::{
    any::{items, written},
    random::Random,
};
