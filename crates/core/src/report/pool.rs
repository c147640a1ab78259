//! Registered pools.

use crate::model::Bytes;

/// A pool that the program registered (`gpumem::pool`), as it is now.
///
/// `Display` is the line of [`Summary`](super::Summary) about the unused memory of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegisteredPool {
    /// The name that the program gave to the pool; followed by ` #2` if another pool of the device has the same name.
    pub name: String,
    /// The CUDA ordinal of its device.
    pub device: u32,
    /// The number of its live parts.
    pub parts: u64,
    /// The sum of their sizes.
    pub used: Bytes,
    /// The pool's memory from the driver, as reported. If the pool reported nothing, more than its blocks or less than its parts,
    /// this is the sum of its blocks.
    pub reserved: Bytes,
    /// The reported amount, or the sum of its blocks if it reported none. If this differs from `reserved`, the pool reports a wrong amount,
    /// or gpumem did not see all its blocks.
    pub reported: Bytes,
    /// The number of frees of parts that were not live.
    pub unknown_frees: u64,
    /// The number of parts that were allocated at the address of a live part.
    pub doubled: u64,
    /// The number of parts that are outside all driver blocks that gpumem has seen, or in a block of another pool. Calls with
    /// sizes larger than any device are included; their sizes do not count.
    pub outside: u64,
    /// The number of blocks that were counted for the program before the pool reported its first part in them. Peaks from that
    /// time are too high.
    pub late: u64,
    /// The number of blocks that were counted for the program until their first part, because another thread allocated, freed or
    /// read results in between. Peaks from that time may be too high.
    pub read_early: u64,
    /// The number of times that the pool reported less memory than the sum of its parts.
    pub below: u64,
    /// The number of live parts that start inside another live part. Such parts are searched for when a report is made, among at
    /// most 262,144 live blocks. Parts that were freed earlier are found only in a recording (`gpumem report`). Each of them
    /// counts as lost.
    pub overlapping: u64,
    /// The memory that is in more than one live part, and that `used` and traces count more than once.
    pub counted_twice: Bytes,
}

/// A pool that the program registered, at a peak.
///
/// `Display` is the line about its unused memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolAtPeak {
    /// Its name, as in [`RegisteredPool::name`].
    pub name: String,
    /// The sum of its parts.
    pub used: Bytes,
    /// The sum of its driver blocks that gpumem saw.
    pub reserved: Bytes,
}

impl RegisteredPool {
    /// Returns the unused memory of the pool. `None` if its parts exceed its memory, so that one of the two is wrong, or if parts
    /// overlap.
    pub fn unused(&self) -> Option<Bytes> {
        self.reserved.checked_sub(self.used).filter(|_| self.overlapping == 0)
    }

    /// Returns whether the pool is empty and nothing about it was wrong.
    pub fn is_empty(&self) -> bool {
        self.reported == Bytes::ZERO && self.parts == 0 && self.wrong_calls() + self.read_early == 0
    }

    /// Returns the number of calls that cannot be right. If this is not 0, numbers may be wrong.
    pub fn wrong_calls(&self) -> u64 {
        self.unknown_frees + self.doubled + self.outside + self.late + self.below + self.overlapping
    }
}
