//! Chooses the size of a block as PyTorch's caching allocator does (`c10/cuda/CUDACachingAllocator.cpp`).

use super::AllocatorSettings;

/// `kMinBlockSize`: sizes are multiples of this.
const MIN_BLOCK: u64 = 512;

impl AllocatorSettings {
    /// `kSmallSize`: larger requests belong to the large pool.
    pub const SMALL: u64 = 1 << 20;

    /// Returns the size of a block for a request, in bytes (`round_size`). `None` if the size does not fit into 64 bits.
    pub fn rounded(&self, requested: u64) -> Option<u64> {
        let divisions = &self.divisions;
        let index = (requested.max(1).ilog2().saturating_sub(20) as usize).min(divisions.len().saturating_sub(1));
        let divisions = divisions.get(index).copied().unwrap_or(0);
        if divisions > 1 && requested > MIN_BLOCK.saturating_mul(divisions) && !requested.is_power_of_two() {
            let floor = 1 << requested.ilog2();
            match floor >> divisions.ilog2() {
                0 => Some(floor << 1),
                part => requested.checked_next_multiple_of(part),
            }
        } else {
            requested.max(1).checked_next_multiple_of(MIN_BLOCK)
        }
    }

    /// Returns whether a remainder of this many bytes is split off when a block of `size` bytes is taken: `should_split`.
    /// Otherwise it stays in the block.
    pub fn splits(&self, size: u64, rest: u64, is_expandable: bool) -> bool {
        if is_expandable || size <= Self::SMALL {
            rest >= MIN_BLOCK
        } else {
            size < self.max_split && rest > Self::SMALL
        }
    }

    /// Returns the size of a block for a request in this much free space, including a remainder that is not split off.
    pub fn size_in(&self, room: u64, requested: u64, is_expandable: bool) -> u64 {
        let size = self.rounded(requested).unwrap_or(requested);
        match room.checked_sub(size) {
            Some(rest) if !self.splits(size, rest, is_expandable) => room,
            _ => size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_are_rounded_as_pytorch_does() {
        let plain = AllocatorSettings::default();
        for (bytes, rounded) in [(0, 512), (1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)] {
            assert_eq!(plain.rounded(bytes), Some(rounded), "{bytes}");
        }
        assert_eq!(plain.rounded(u64::MAX), None);
        let divided = AllocatorSettings { divisions: vec![4, 4, 1], ..plain };
        // PyTorch's own example: 1200 with 4 divisions is 1280; below 4 times 512 bytes, nothing is divided.
        for (bytes, rounded) in [(1200, 1536), (1200 << 10, 1280 << 10), (MIB, MIB), (5 * MIB + 1, 5 * MIB + 512)] {
            assert_eq!(divided.rounded(bytes), Some(rounded), "{bytes}");
        }
    }

    #[test]
    fn what_is_of_use_is_split_off() {
        let plain = AllocatorSettings::default();
        assert!(plain.splits(MIB, 512, false) && plain.splits(20 * MIB, 512, true));
        assert!(plain.splits(20 * MIB, MIB + 512, false) && !plain.splits(20 * MIB, MIB, false));
        assert!(!AllocatorSettings { max_split: 20 * MIB, ..plain }.splits(20 * MIB, 2 * MIB, false));
    }
}
