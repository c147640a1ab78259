//! The allocator's statistics of a device. They are derived from the ledger and the usage of the pool; nothing is measured here.

use std::{fmt, time::Duration};

use crate::model::{Bytes, PoolUsage};

/// A quantity that rises and falls: bytes, or a number of blocks.
///
/// Example: see `gpumem::torch::memory_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally<T> {
    /// The current value.
    pub current: T,
    /// The highest value since counting started, or since `gpumem::torch::reset_peak_memory_stats`.
    pub peak: T,
    /// The sum of all allocations, freed or not.
    pub allocated: T,
    /// The sum of all frees.
    pub freed: T,
}

/// The allocations of one kind of memory, in requested bytes: without the driver's rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocStats {
    /// The bytes.
    pub bytes: Tally<Bytes>,
    /// The numbers of allocations.
    pub blocks: Tally<u64>,
}

/// [`AllocStats`] of each kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KindStats {
    /// Device memory: `cuMemAlloc`, arrays.
    pub device: AllocStats,
    /// Stream-ordered memory: `cuMemAllocAsync`.
    pub pool: AllocStats,
    /// Physical memory behind a handle: `cuMemCreate`.
    pub vmm: AllocStats,
    /// Memory that the driver mapped for the memory nodes of graphs: `cuGraphLaunch`. Each rise of that amount counts as an
    /// allocation.
    pub graph: AllocStats,
    /// Managed memory, which is wherever it was last accessed: `cuMemAllocManaged`.
    pub managed: AllocStats,
    /// Pinned host memory: `cuMemAllocHost`, `cuMemHostRegister`.
    pub pinned_host: AllocStats,
}

/// The allocations of this process on one device. `gpumem::torch::memory_stats` returns them.
///
/// `Display` writes PyTorch's names, one per line: `allocated_bytes.all.current: 335544320`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The device's CUDA ordinal.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The library in which allocations are intercepted (the path of `libcuda` or `libcupti`), or the simulated device.
    pub intercepted_by: String,
    /// The time since counting started. Older blocks are counted only in [`reserved`](Self::reserved).
    pub since: Duration,
    /// Frees of unknown blocks whose size is not known, in the whole process. Most of these blocks are older than the first trace.
    pub untracked: u64,
    /// Events that could not be recorded, in the whole process. If not 0, the numbers may be wrong.
    pub lost: u64,
    /// The memory that is certainly on the device, as traces count it: the kinds `device`, `pool`, `vmm` and `graph`.
    pub all: AllocStats,
    /// The statistics of each kind.
    pub kinds: KindStats,
    /// The memory that the driver reserved on the device for these allocations. `None` if the device's pool cannot be
    /// read; `gpumem::torch::memory_reserved` returns the reason.
    pub reserved: Option<ReservedStats>,
}

impl MemoryStats {
    /// Returns the names in PyTorch's style: `all`, then each kind.
    #[doc(hidden)]
    pub fn named(&self) -> [(&'static str, &AllocStats); 7] {
        let KindStats { device, pool, vmm, graph, managed, pinned_host } = &self.kinds;
        [
            ("all", &self.all),
            ("device", device),
            ("pool", pool),
            ("vmm", vmm),
            ("graph", graph),
            ("managed", managed),
            ("pinned_host", pinned_host),
        ]
    }
}

/// The memory that the driver reserved on the device for this process's allocations, in use or kept for later ones.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # gpumem::torch::memory_allocated(0)?;
/// drop(gpu.alloc_async(gpumem::Bytes::mib(40))?);
/// let reserved = gpumem::torch::memory_stats(0)?.reserved.unwrap();
/// assert_eq!(reserved.current.mb(), 64); // the pool takes 32 MiB at a time, and keeps them
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReservedStats {
    /// The current value.
    pub current: Bytes,
    /// The highest value since counting started, or since the last reset. Only its bounds are known.
    pub peak: PeakBounds,
}

impl ReservedStats {
    /// Adds the kinds that the driver allocates in the requested size to the memory of the device's current pool. If the program has
    /// other pools, the live memory in pools may be more than that of this pool. The larger one counts. `usage` is `None` if the
    /// device has no pools.
    #[doc(hidden)]
    pub fn new(kinds: &KindStats, usage: Option<&PoolUsage>) -> Self {
        let [device, pool, vmm, graph] = [kinds.device, kinds.pool, kinds.vmm, kinds.graph].map(|kind| kind.bytes);
        let backing = usage.map_or(Bytes::ZERO, |usage| usage.reserved).max(pool.current);
        let backing_high = usage.map_or(Bytes::ZERO, |usage| usage.reserved_high).max(pool.peak).max(backing);
        let current = device.current + vmm.current + graph.current + backing;
        let parts = [device.peak, vmm.peak, graph.peak, backing_high];
        let at_least = parts.into_iter().fold(current, Bytes::max);
        Self { current, peak: PeakBounds { at_least, at_most: parts.into_iter().sum() } }
    }
}

/// Bounds of the peak of a sum, if only the peaks of the parts are known and not their times. The peak is between the largest
/// part and the sum of all parts. With one part, both are equal, and the peak is known.
///
/// `Display` is `320 MiB`, or `256 MiB to 320 MiB`.
///
/// Example: see `gpumem::torch::max_memory_reserved`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeakBounds {
    /// The peak was not less than this.
    pub at_least: Bytes,
    /// The peak was not more than this.
    pub at_most: Bytes,
}

impl PeakBounds {
    /// Returns the peak, if both bounds are equal.
    pub fn exact(&self) -> Option<Bytes> {
        (self.at_least == self.at_most).then_some(self.at_most)
    }
}

impl fmt::Display for PeakBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exact() {
            Some(peak) => peak.fmt(f),
            None => write!(f, "{} to {}", self.at_least, self.at_most),
        }
    }
}

/// The statistics as a table. `gpumem::torch::memory_summary` returns it.
///
/// `Display` has PyTorch's layout, within 80 columns.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemorySummary {
    /// The statistics in the table.
    pub stats: MemoryStats,
}

impl From<MemoryStats> for MemorySummary {
    fn from(stats: MemoryStats) -> Self {
        Self { stats }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(device: (u64, u64), pool: (u64, u64), vmm: (u64, u64)) -> KindStats {
        let [device, pool, vmm] = [device, pool, vmm].map(|(current, peak)| {
            let bytes = Tally { current: Bytes::new(current), peak: Bytes::new(peak), ..Tally::default() };
            AllocStats { bytes, ..AllocStats::default() }
        });
        KindStats { device, pool, vmm, ..KindStats::default() }
    }

    /// Each row contains (current, peak) of each kind, (current, high) of the pool's backing, and the expected current value and
    /// bounds of the peak.
    #[test]
    fn the_peak_of_a_sum_has_bounds() {
        for (device, pool, vmm, backing, current, at_least, at_most) in [
            // No part, or only one.
            ((0, 0), (0, 0), (0, 0), Some((0, 0)), 0, 0, 0),
            ((3, 10), (0, 0), (0, 0), Some((0, 0)), 3, 10, 10),
            ((3, 10), (0, 0), (0, 0), None, 3, 10, 10),
            ((0, 0), (5, 20), (0, 0), Some((32, 64)), 32, 64, 64),
            // Several parts, at the same time or one after the other.
            ((10, 10), (5, 5), (2, 2), Some((32, 32)), 44, 44, 44),
            ((0, 10), (0, 20), (0, 2), Some((0, 32)), 0, 32, 44),
            ((10, 10), (0, 20), (0, 0), Some((0, 32)), 10, 32, 42),
            ((10, 12), (5, 20), (0, 0), Some((32, 32)), 42, 42, 44),
            // Other pools hold at least their live memory.
            ((0, 0), (50, 70), (0, 0), Some((32, 32)), 50, 70, 70),
        ] {
            let usage = backing.map(|(reserved, reserved_high)| PoolUsage {
                pool: 1,
                used: Bytes::ZERO,
                used_high: Bytes::ZERO,
                reserved: Bytes::new(reserved),
                reserved_high: Bytes::new(reserved_high),
            });
            let reserved = ReservedStats::new(&kinds(device, pool, vmm), usage.as_ref());
            let (found, peak) = (reserved.current.get(), reserved.peak);
            let case = format!("{device:?} {pool:?} {vmm:?} {backing:?}");
            assert_eq!((found, peak.at_least.get(), peak.at_most.get()), (current, at_least, at_most), "{case}");
        }
    }

    #[test]
    fn bounds_that_agree_are_one_number() {
        let bounds = |at_least, at_most| PeakBounds { at_least: Bytes::mib(at_least), at_most: Bytes::mib(at_most) };
        assert_eq!((bounds(5, 5).exact(), bounds(5, 5).to_string()), (Some(Bytes::mib(5)), "5 MiB".to_owned()));
        assert_eq!((bounds(5, 7).exact(), bounds(5, 7).to_string()), (None, "5 MiB to 7 MiB".to_owned()));
    }
}
