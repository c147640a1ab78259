//! Registered pools.

use std::fmt;

use super::block::counted;
use crate::model::{Bytes, one_line};

/// A pool that the program registered (`gpumem::pool`), as it is now.
///
/// `Display` is the line of [`Summary`](super::Summary) about the unused memory of the pool.
///
/// Example: see `gpumem::pool`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RegisteredPool {
    /// The name that the program gave it; with ` #2` if another pool of the device has that name.
    pub name: String,
    /// The CUDA ordinal of its device.
    pub device: u32,
    /// The number of its live parts.
    pub parts: u64,
    /// The sum of their sizes.
    pub used: Bytes,
    /// Its memory from the driver: the reported amount. If the pool reported none, or more than its blocks, or less than its parts, its
    /// blocks.
    pub reserved: Bytes,
    /// The reported amount, or its blocks if it reported none. If this is not `reserved`, the pool reports a wrong amount, or gpumem did not
    /// see all its blocks.
    pub reported: Bytes,
    /// The number of frees of parts that were not live.
    pub unknown_frees: u64,
    /// The number of parts that were allocated at the address of a live part.
    pub doubled: u64,
    /// The number of parts that lie outside of all blocks of the driver that gpumem has seen, or in a block of another pool. Calls with
    /// sizes above any device are included; their sizes do not count.
    pub outside: u64,
    /// The number of blocks that were counted for the program before the pool reported its first part in them. Peaks of that time
    /// are too high.
    pub late: u64,
    /// The number of blocks that were counted for the program until their first part, because another thread allocated, freed or read figures in between.
    /// Peaks of that time may be too high.
    pub read_early: u64,
    /// The number of times that it reported less memory than its parts have.
    pub below: u64,
    /// The number of live parts that begin inside another live part. They are looked for when a report is made, in at most 262,144 live
    /// blocks. Those that were freed before are found only in a recording (`gpumem report`). Each of them counts as lost.
    pub overlapping: u64,
    /// The memory that lies in more than one live part, and that `used` and the figures of traces count more than once.
    pub counted_twice: Bytes,
}

/// A pool that the program registered, at a peak.
///
/// `Display` is the line about its unused memory.
///
/// Example: see [`PeakHolders::pools`](super::PeakHolders::pools).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PoolAtPeak {
    /// Its name, as in [`RegisteredPool::name`].
    pub name: String,
    /// The sum of its parts.
    pub used: Bytes,
    /// Its blocks of the driver that gpumem saw.
    pub reserved: Bytes,
}

impl RegisteredPool {
    /// Returns its unused memory. `None` if its parts are more than it has, so that one of the two is wrong, or if parts overlap.
    ///
    /// Example: see `gpumem::pool`.
    pub fn unused(&self) -> Option<Bytes> {
        self.reserved.checked_sub(self.used).filter(|_| self.overlapping == 0)
    }

    /// Returns whether it has no memory, and peaks are right.
    ///
    /// Example: see `gpumem::pool`.
    pub fn is_empty(&self) -> bool {
        self.reported == Bytes::ZERO && self.parts == 0 && self.wrong_calls() + self.read_early == 0
    }

    /// Returns the number of calls that cannot be right. If this is not 0, figures may be wrong.
    ///
    /// Example: see `gpumem::pool`.
    pub fn wrong_calls(&self) -> u64 {
        self.unknown_frees + self.doubled + self.outside + self.late + self.below + self.overlapping
    }
}

/// Writes the unused memory of a pool.
fn cache_of(f: &mut fmt::Formatter<'_>, name: &str, used: Bytes, reserved: Bytes) -> fmt::Result {
    write!(f, "cache of {}: ", one_line(name))?;
    match reserved.checked_sub(used) {
        Some(unused) => write!(f, "{unused} of {reserved}"),
        None => write!(f, "not known, because its parts have {used} and its blocks only {reserved}"),
    }
}

impl fmt::Display for PoolAtPeak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        cache_of(f, &self.name, self.used, self.reserved)
    }
}

impl fmt::Display for RegisteredPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, used, reserved, reported, unknown_frees, doubled, outside, late, read_early, .. } = self;
        let Self { below, overlapping, counted_twice, .. } = self;
        match (overlapping, *counted_twice) {
            (0, _) => cache_of(f, name, *used, *reserved),
            (_, Bytes::ZERO) => write!(f, "cache of {}: not known, because parts overlapped", one_line(name)),
            (_, twice) => {
                write!(f, "cache of {}: not known, because parts overlap: {twice} count twice", one_line(name))
            }
        }?;
        if reported > reserved {
            write!(f, "; it reports {reported}, more than its blocks")?;
        } else if reported < reserved {
            write!(f, "; it reports {reported}, less than its parts")?;
        }
        let mut before = "; wrong calls: ";
        for (count, one, many) in [
            (unknown_frees, "free of an unknown part", "frees of unknown parts"),
            (doubled, "part at the address of a live part", "parts at the address of a live part"),
            (outside, "part or size outside of its blocks", "parts or sizes outside of its blocks"),
            (late, "block known as its own too late", "blocks known as its own too late"),
            (below, "report of less memory than its parts", "reports of less memory than its parts"),
            (overlapping, "part that overlaps another one", "parts that overlap other ones"),
        ] {
            if *count > 0 {
                write!(f, "{before}{}", counted(*count, one, many))?;
                before = ", ";
            }
        }
        if *read_early > 0 {
            let blocks = counted(*read_early, "block", "blocks");
            write!(f, "; peaks may be too high by {blocks} that counted for the program until the first part")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_calls_are_in_the_row_one_and_many() {
        let mut pool = RegisteredPool {
            name: "arena".to_owned(),
            device: 0,
            parts: 1,
            used: Bytes::mib(2),
            reserved: Bytes::mib(8),
            reported: Bytes::mib(8),
            unknown_frees: 0,
            doubled: 0,
            outside: 0,
            late: 0,
            read_early: 0,
            below: 0,
            overlapping: 0,
            counted_twice: Bytes::ZERO,
        };
        assert_eq!(pool.to_string(), "cache of arena: 6 MiB of 8 MiB");
        (pool.outside, pool.late) = (1, 1);
        let row = pool.to_string();
        assert!(
            row.ends_with("; wrong calls: 1 part or size outside of its blocks, 1 block known as its own too late"),
            "{row}"
        );
        (pool.unknown_frees, pool.doubled, pool.outside, pool.late) = (1, 2, 3, 0);
        let row = pool.to_string();
        let wrong =
            "1 free of an unknown part, 2 parts at the address of a live part, 3 parts or sizes outside of its blocks";
        assert!(row.ends_with(wrong), "{row}");
        pool.reported = Bytes::gib(32);
        let too_much = "cache of arena: 6 MiB of 8 MiB; it reports 32 GiB, more than its blocks; wrong calls: ";
        assert!(pool.to_string().starts_with(too_much), "{pool}");
        (pool.reserved, pool.reported) = (Bytes::ZERO, Bytes::ZERO);
        let unknown = "cache of arena: not known, because its parts have 2 MiB and its blocks only 0 B; wrong calls: ";
        assert!(pool.to_string().starts_with(unknown), "{pool}");
        pool.reported = Bytes::mib(1);
        (pool.reserved, pool.overlapping, pool.counted_twice) = (Bytes::mib(8), 1, Bytes::mib(1));
        let start = "cache of arena: not known, because parts overlap: 1 MiB count twice; it reports 1 MiB, less than its parts; wrong calls: ";
        assert!(
            pool.to_string().starts_with(start) && pool.to_string().ends_with(", 1 part that overlaps another one"),
            "{pool}"
        );
        pool.counted_twice = Bytes::ZERO;
        assert!(
            pool.to_string().starts_with("cache of arena: not known, because parts overlapped; it reports"),
            "{pool}"
        );
        pool.overlapping = 0;
        pool.read_early = 2;
        let row = pool.to_string();
        let early = "; peaks may be too high by 2 blocks that counted for the program until the first part";
        assert!(row.ends_with(&format!("{wrong}{early}")), "{row}");
    }
}
