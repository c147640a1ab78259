//! The data that is kept for each live block.

use super::super::groups::GroupId;
use crate::model::{Bytes, OwnerThread, Time};

/// The data that is kept for a live block, in three words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Entry {
    pub(in super::super) bytes: Bytes,
    /// The number of the event that allocated the block, in 48 bits; then the upper 16 bits of the time.
    pub(super) when: u64,
    /// The lower 8 bits are the lower bits of the time. An empty slot has group 0.
    pub(super) attribution: Attribution,
}

/// The owner thread of a block, in the upper 32 bits; then its group, in 24 bits. The lower 8 bits are free for [`Entry`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Attribution(pub(super) u64);

impl Attribution {
    pub(in super::super) fn new(owner: OwnerThread, group: GroupId) -> Self {
        Self(u64::from(owner.0) << 32 | u64::from(group.0) << 8)
    }

    pub(in super::super) fn owner(self) -> OwnerThread {
        OwnerThread((self.0 >> 32) as u32)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "24 bits are used")]
    pub(in super::super) fn group(self) -> GroupId {
        GroupId((self.0 >> 8) as u32 & 0x00ff_ffff)
    }
}

/// Returns a time in the unit of [`Entry`]: tenths of a second, in 24 bits. A time after 19 days is stored as the
/// largest value.
pub(super) fn tenths(time: Time) -> u32 {
    const MOST: u32 = (1 << 24) - 1;
    let seconds = u32::try_from(time.as_secs()).unwrap_or(MOST);
    seconds.saturating_mul(10).saturating_add(time.subsec_millis() / 100).min(MOST)
}

impl Entry {
    /// `number` is the number of the event, below 2^48; `tenths` is its time.
    #[inline]
    pub(in super::super) fn new(bytes: Bytes, number: u64, tenths: u32, attribution: Attribution) -> Self {
        let tenths = u64::from(tenths);
        Self { bytes, when: number << 16 | tenths >> 8, attribution: Attribution(attribution.0 | tenths & 0xff) }
    }

    /// Returns the same block with another size.
    pub(in super::super) fn with_bytes(self, bytes: Bytes) -> Self {
        Self { bytes, ..self }
    }

    /// Returns the same block in another group.
    pub(in super::super) fn with_group(self, group: GroupId) -> Self {
        let others = self.attribution.0 & !(0x00ff_ffff << 8);
        Self { attribution: Attribution(others | u64::from(group.0) << 8), ..self }
    }

    #[inline]
    pub(in super::super) fn group(&self) -> GroupId {
        self.attribution.group()
    }

    #[inline]
    pub(in super::super) fn attribution(&self) -> Attribution {
        Attribution(self.attribution.0 & !0xff)
    }

    /// Returns the number of the event that allocated the block.
    pub(in super::super) fn number(&self) -> u64 {
        self.when >> 16
    }

    pub(in super::super) fn time(&self) -> Time {
        Time::from_millis(((self.when & 0xffff) << 8 | self.attribution.0 & 0xff) * 100)
    }

    /// Returns whether the slot is empty.
    #[inline]
    pub(super) fn is_none(&self) -> bool {
        self.attribution.group() == GroupId(0)
    }
}
