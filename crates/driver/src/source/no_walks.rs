//! The functions of `walks.rs` without the feature `backtrace`. They find no stacks.

use crate::model::{Frame, StackId};

pub(super) fn begin(_: bool) {}

/// No stack is walked.
#[inline]
pub fn current_stack() -> StackId {
    StackId::NONE
}

/// No stack is walked.
#[inline]
pub fn current_file() -> StackId {
    StackId::NONE
}

/// There is no cache to empty.
pub fn forget_stacks() {}

/// No stack is walked.
pub fn uncached_stack(_: impl Fn(&[usize]) -> StackId) -> StackId {
    StackId::NONE
}

/// No stack is walked, so there are no addresses.
pub fn addresses_here() -> Vec<usize> {
    Vec::new()
}

/// The functions at addresses are not known.
pub fn frames(_: &[usize]) -> Vec<Frame> {
    Vec::new()
}

/// The modules at addresses are not known.
pub fn modules(_: &[usize]) -> Vec<Frame> {
    Vec::new()
}

/// No line of Python has a number.
pub fn python_frame(_: usize) -> Option<Frame> {
    None
}
