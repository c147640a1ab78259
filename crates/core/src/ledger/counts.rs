//! The counts of events, and the limits and units that the other files share.

use crate::model::Bytes;

/// The number of events that the ledger has applied or missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations and frees. A pending delta adds its events when it is applied. A block that is removed or inserted without an
    /// event is counted there as well and is subtracted here immediately, so this number may wrap below 0 until the delta is
    /// applied.
    pub events: u64,
    /// Frees of blocks whose size is not known.
    pub untracked: u64,
    /// Events that could not be recorded, and functions of the driver that other tools replaced.
    pub lost: u64,
    /// Blocks that were removed because their context was destroyed, not because they were freed.
    pub removed_with_context: u64,
}

/// The largest number of scopes, nodes or groups that are read under one lock. After each part, other threads get their turn.
pub const PART_LEN: usize = 1 << 9;

/// No block and no device has 2^63 bytes.
#[inline]
pub(super) fn signed(bytes: Bytes) -> i64 {
    bytes.get().cast_signed()
}
