//! Operations, by topic.

mod attention;
mod convolution;
mod elementwise;
mod linear;
mod loss;
mod normalization;
mod reduction;
mod views;

pub use self::convolution::{Conv, Window};
pub(crate) use self::{elementwise::Saves, linear::Like};
