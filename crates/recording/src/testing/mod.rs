//! Random items for tests of recordings, in this crate and others.

mod any;
mod random;

pub(crate) use self::any::Any;
pub use self::{
    any::{items, written},
    random::Random,
};
