//! The data that the ledger keeps of each kept peak.

use super::peaks::PeakRange;
use crate::model::OwnerThread;

/// A kept peak. Its scope may be closed already.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeptRange {
    pub(super) meter: u16,
    pub(super) of_thread: Option<OwnerThread>,
    pub(super) range: PeakRange,
}
