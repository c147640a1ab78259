//! Which values in real memory are not known, because a kernel or a copy was skipped that may have written them.
//!
//! The sizes of tensors are not known here, only the addresses at which kernels and copies start to use memory. What is known about an
//! address holds up to the next address in use, or to the end of the block.

use std::{collections::BTreeMap, ops::Range};

/// What is known about the values from an address on.
#[derive(Debug, Default)]
pub(super) struct UnknownValues {
    /// True where the values are not known.
    starts: BTreeMap<u64, bool>,
}

impl UnknownValues {
    /// Returns whether the values at an address of a block that starts at `block` are unknown. A new block has zeros.
    pub(super) fn is_unknown(&self, block: u64, address: u64) -> bool {
        self.starts.range(block..=address).next_back().is_some_and(|(_, is_unknown)| *is_unknown)
    }

    /// Sets whether the values from an address on are unknown.
    pub(super) fn set(&mut self, address: u64, is_unknown: bool) {
        self.starts.insert(address, is_unknown);
    }

    /// Sets whether the values of a range are unknown. What is known about the addresses behind it does not change.
    pub(super) fn set_range(&mut self, block: u64, range: Range<u64>, is_unknown: bool) {
        if range.is_empty() {
            return;
        }
        let behind = self.is_unknown(block, range.end);
        self.forget(range.clone());
        self.starts.insert(range.start, is_unknown);
        self.starts.insert(range.end, behind);
    }

    /// Forgets a range whose block was freed.
    pub(super) fn forget(&mut self, range: Range<u64>) {
        let inside: Vec<_> = self.starts.range(range).map(|(start, _)| *start).collect();
        for start in inside {
            self.starts.remove(&start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_unknown_up_to_the_next_address_in_use() {
        let mut values = UnknownValues::default();
        values.set(100, true);
        values.set(150, false);
        assert_eq!([99, 100, 149, 150, 199].map(|at| values.is_unknown(0, at)), [false, true, true, false, false]);
        assert!(!values.is_unknown(120, 130), "another block starts between them");
        values.set_range(0, 110..170, true);
        assert_eq!(
            [100, 109, 110, 160, 169, 170].map(|at| values.is_unknown(0, at)),
            [true, true, true, true, true, false]
        );
        values.set_range(0, 100..120, false);
        assert_eq!([100, 119, 120].map(|at| values.is_unknown(0, at)), [false, false, true]);
        values.forget(0..200);
        assert_eq!([100, 120, 150].map(|at| values.is_unknown(0, at)), [false; 3]);
    }
}
