//! Derives reports from the ledger behind an inbox and from the names of its ids.
//!
//! A session gets the names from its tables, and the reader of a recording from its definitions. Both get the same reports, to
//! the character, because all reports are derived here.

mod blocks;
mod driver;
mod exit;
mod labels;
mod names;
mod paths;
mod peaks;
mod pools;
mod rejection;
mod snapshot;
mod statistics;
mod tracker;

pub use crate::inbox::LedgerView;

pub use self::{
    blocks::live_blocks,
    driver::driver_memory,
    exit::{device_peaks, leaks},
    labels::Labels,
    names::{Callsite, NO_STACK, Names, Stack},
    paths::{Paths, outer_names, short_names, summary},
    peaks::KeptPeak,
    pools::{Overlaps, pools, registered_pool},
    rejection::Rejection,
    snapshot::Snapshot,
    statistics::{memory_stats, of_device},
    tracker::tracked_groups,
};
