//! Random items for tests of recordings, in this crate and others.

mod any;
mod items;
mod random;

pub(crate) use self::any::Any;
pub use self::{
    items::{items, written},
    random::Random,
};
