//! What receives a copy of each event, in their order.

use crate::model::{Event, ThreadId};

/// Receives a copy of each event, under the lock of the inbox: it must be fast, and must not call back.
pub trait Tap: Default {
    /// False: the code that calls the tap is not compiled.
    const IS_USED: bool = true;

    /// False: [`begin_thread`](Self::begin_thread) is not called.
    const NEEDS_THREADS: bool = Self::IS_USED;

    /// An event was applied.
    fn record(&mut self, event: &Event<'_>);

    /// A thread begins. Its number may be that of a thread that has ended.
    fn begin_thread(&mut self, _: ThreadId) {}
}

/// No tap.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTap;

impl Tap for NoTap {
    const IS_USED: bool = false;

    fn record(&mut self, _: &Event<'_>) {}
}
