//! The functions of `walks.rs` for builds without the feature `backtrace`. They find no stacks.

use crate::model::{Frame, StackId};

pub(super) fn start(_: bool) {}

/// Returns no stack.
#[inline]
pub fn current_stack() -> StackId {
    StackId::NONE
}

/// Returns no file.
#[inline]
pub fn current_file() -> StackId {
    StackId::NONE
}

/// Does nothing, because there is no cache.
pub fn forget_stacks() {}

/// Returns no stack.
pub fn uncached_stack(_: impl Fn(&[usize]) -> StackId) -> StackId {
    StackId::NONE
}

/// Returns no addresses.
pub fn addresses_here() -> Vec<usize> {
    Vec::new()
}

/// Returns no frames.
pub fn frames(_: &[usize]) -> Vec<Frame> {
    Vec::new()
}

/// Returns no modules.
pub fn modules(_: &[usize]) -> Vec<Frame> {
    Vec::new()
}

/// Returns no frame, because no Python line has an id.
pub fn python_frame(_: usize) -> Option<Frame> {
    None
}
