//! The notices that a session has printed.

use std::sync::{
    Mutex,
    atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};

use crate::error::Error;

/// The topic of a notice.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    Off,
    Sampled,
    Custom,
    Simulated,
    Stale,
    Lost,
    Untracked,
    Settings,
    Filter,
    TooSmall,
    Unwritten,
    Budget,
    Tolerance,
    #[cfg(feature = "capture")]
    Recording,
    #[cfg(feature = "capture")]
    Missed,
    UnwrittenTracker,
    NoBlocks,
    #[cfg(feature = "cudarc")]
    WrongShape,
}

/// The notices that a session has printed.
#[derive(Debug, Default)]
pub(in crate::session) struct Notices {
    /// A bit for each [`Notice`].
    pub(super) printed: AtomicU32,
    /// The reasons why traces are off.
    pub(super) off: Mutex<Vec<Error>>,
    /// The largest amount of a line that was too small for `GPUMEM`, plus 1; `u64::MAX` if a line was large enough.
    largest: AtomicU64,
}

impl Notices {
    /// Notes the amount of a line that is too small for `GPUMEM`; `None` for a line that is large enough.
    pub(in crate::session) fn add_line(&self, too_small: Option<u64>) {
        let largest = too_small.map_or(u64::MAX, |amount| amount.saturating_add(1));
        if self.largest.load(Relaxed) < largest {
            self.largest.fetch_max(largest, Relaxed);
        }
    }

    /// Returns the largest amount of all lines, if all were too small.
    pub(super) fn largest_too_small(&self) -> Option<u64> {
        self.largest.load(Relaxed).checked_sub(1).filter(|largest| *largest < u64::MAX - 1)
    }
}
