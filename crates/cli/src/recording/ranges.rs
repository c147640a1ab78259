//! Ranges of addresses that are mapped and unmapped in parts.

use std::collections::BTreeMap;

/// A range of addresses. In a map, its start is the key.
pub(crate) trait AddressRange: Copy {
    fn length(self) -> u64;
    fn with_length(self, length: u64) -> Self;
}

impl AddressRange for u64 {
    fn length(self) -> u64 {
        self
    }

    fn with_length(self, length: u64) -> u64 {
        length
    }
}

impl<T: Copy> AddressRange for (u64, T) {
    fn length(self) -> u64 {
        self.0
    }

    fn with_length(self, length: u64) -> Self {
        (length, self.1)
    }
}

/// Removes a range of addresses from `parts`, whose keys are their starts. Calls `removed` with the number of bytes
/// removed from each part.
pub(crate) fn remove_range<T: AddressRange>(
    parts: &mut BTreeMap<u64, T>,
    address: u64,
    bytes: u64,
    mut removed: impl FnMut(T, u64),
) {
    let end = address.saturating_add(bytes);
    while let Some((start, part)) = parts.range(..end).next_back().map(|(start, part)| (*start, *part)) {
        let last = start.saturating_add(part.length());
        if last <= address {
            break;
        }
        parts.remove(&start);
        removed(part, last.min(end) - start.max(address));
        if last > end {
            parts.insert(end, part.with_length(last - end));
        }
        if start < address {
            parts.insert(start, part.with_length(address - start));
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_range_come_and_go() {
        let mut ranges = BTreeMap::from([(0, (60, true))]);
        let remove = |ranges: &mut _, address, bytes| remove_range(ranges, address, bytes, |_, _| {});
        remove(&mut ranges, 20, 20);
        assert_eq!(ranges, [(0, (20, true)), (40, (20, true))].into());
        remove(&mut ranges, 10, 40);
        assert_eq!(ranges, [(0, (10, true)), (50, (10, true))].into());
        remove(&mut ranges, 0, 100);
        assert!(ranges.is_empty());
    }
}
