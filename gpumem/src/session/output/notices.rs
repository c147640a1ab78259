//! The notices that a session has printed.

use std::sync::{Mutex, atomic::AtomicU32};

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
    Unwritten,
    Budget,
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
}
