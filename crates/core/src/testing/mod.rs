//! Checks that the tests of several crates share.

mod printable;
mod skipped;

pub use self::{
    printable::{assert_printable, has},
    skipped::skipped,
};
