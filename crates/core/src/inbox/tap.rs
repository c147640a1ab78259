//! A tap receives a copy of each event, in the order of their numbers.

use crate::model::{Event, ThreadId};

/// Receives a copy of each event, under the lock of the inbox. It must be fast and must not call the inbox.
pub trait Tap: Default {
    /// If `false`, the code that calls the tap is not compiled.
    const IS_USED: bool = true;

    /// If `false`, [`start_thread`](Self::start_thread) is not called.
    const NEEDS_THREADS: bool = Self::IS_USED;

    /// Receives an event that was applied.
    fn record(&mut self, event: &Event<'_>);

    /// Notes that the calling thread starts, under this number. `is_reused` is true if a thread that has ended had the number
    /// before.
    fn start_thread(&mut self, _thread: ThreadId, _is_reused: bool) {}
}

/// A tap that is never called.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTap;

impl Tap for NoTap {
    const IS_USED: bool = false;

    fn record(&mut self, _: &Event<'_>) {}
}
