//! How PyTorch's caching allocator chooses the size of a block (`c10/cuda/CUDACachingAllocator.cpp`).

/// `kMinBlockSize`: sizes are multiples of this.
pub(super) const MIN_BLOCK: u64 = 512;
/// `kSmallSize`: larger requests are of the large pool.
pub(super) const SMALL: u64 = 1 << 20;

/// The settings of PyTorch's caching allocator that decide how large a block is. The default is PyTorch's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PyTorchRounding {
    /// `max_split_size`: blocks of this many bytes or more are not split.
    pub max_split: u64,
    /// `roundup_power2_divisions`: into how many parts the room between two powers of 2 is divided, from 1 MiB on. Where it is 1, and
    /// everywhere if the list is empty, sizes are rounded to 512 bytes alone.
    pub divisions: Vec<u64>,
}

impl Default for PyTorchRounding {
    fn default() -> Self {
        Self { max_split: u64::MAX, divisions: Vec::new() }
    }
}

impl PyTorchRounding {
    /// The size of a block for a request, in bytes. `None` if no number is large enough.
    pub fn size(&self, requested: u64) -> Option<u64> {
        let index = (requested.max(1).ilog2().saturating_sub(20) as usize).min(self.divisions.len().saturating_sub(1));
        let divisions = self.divisions.get(index).copied().unwrap_or(0);
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

    /// Whether a rest of this many bytes is split off when a block of `size` bytes is taken. If not, the block has it as well.
    pub fn splits(&self, size: u64, rest: u64, is_expandable: bool) -> bool {
        if is_expandable || size <= SMALL { rest >= MIN_BLOCK } else { size < self.max_split && rest > SMALL }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_are_rounded_as_pytorch_does() {
        let plain = PyTorchRounding::default();
        for (bytes, rounded) in [(0, 512), (1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)] {
            assert_eq!(plain.size(bytes), Some(rounded), "{bytes}");
        }
        assert_eq!(plain.size(u64::MAX), None);
        let divided = PyTorchRounding { divisions: vec![4, 4, 1], ..plain };
        // PyTorch's own example: 1200 with 4 divisions is 1280; below 4 times 512 bytes nothing is divided.
        for (bytes, rounded) in [(1200, 1536), (1200 << 10, 1280 << 10), (MIB, MIB), (5 * MIB + 1, 5 * MIB + 512)] {
            assert_eq!(divided.size(bytes), Some(rounded), "{bytes}");
        }
    }

    #[test]
    fn what_is_of_use_is_split_off() {
        let plain = PyTorchRounding::default();
        assert!(plain.splits(MIB, 512, false) && plain.splits(20 * MIB, 512, true));
        assert!(plain.splits(20 * MIB, MIB + 512, false) && !plain.splits(20 * MIB, MIB, false));
        assert!(!PyTorchRounding { max_split: 20 * MIB, ..plain }.splits(20 * MIB, 2 * MIB, false));
    }
}
