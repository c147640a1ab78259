//! The contents of real memory in a dry run: computed values, values that a skipped kernel or copy should have written, and tables of dry
//! addresses, which no kernel may use.
//!
//! This module sees only the addresses at which kernels and copies start to use memory, not the sizes of tensors. Therefore the content of an
//! address extends to the next address in use, or to the end of the block.

use std::{collections::BTreeMap, ops::Range};

/// The content of the bytes from an address on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Content {
    /// The values are those of a real run, as far as a kernel can tell. A new block has zeros.
    #[default]
    Known,
    /// A skipped kernel may have written there, or the values were computed from ones that are not known.
    Unknown,
    /// A skipped kernel or copy should have written there. The host gets this byte, repeated.
    Missing(u8),
    /// Addresses without memory of their own, which the program has copied there.
    Table,
}

impl Content {
    /// Returns whether the values may differ from those of a real run.
    pub(super) fn is_unknown(self) -> bool {
        matches!(self, Self::Unknown | Self::Missing(_))
    }
}

/// The contents of all addresses.
#[derive(Debug, Default)]
pub(super) struct Contents(BTreeMap<u64, Content>);

impl Contents {
    /// Returns the content of an address in a block that starts at `block`.
    pub(super) fn at(&self, block: u64, address: u64) -> Content {
        self.0.range(block..=address).next_back().map(|(_, content)| *content).unwrap_or_default()
    }

    /// Returns the content of a range. If the contents of its parts differ, one unknown value makes all of it unknown.
    pub(super) fn of_range(&self, block: u64, range: Range<u64>) -> Content {
        let first = self.at(block, range.start);
        let mut different = self.0.range(range).map(|(_, content)| *content).filter(|content| *content != first);
        let is_unknown = different.any(|content| first.is_unknown() || content.is_unknown());
        if is_unknown { Content::Unknown } else { first }
    }

    /// Sets the content from an address to the next address in use.
    pub(super) fn set(&mut self, address: u64, content: Content) {
        self.0.insert(address, content);
    }

    /// Sets the content of a range in a block. The content behind the range does not change.
    pub(super) fn set_range(&mut self, block: &Range<u64>, range: Range<u64>, content: Content) {
        let range = range.start..range.end.min(block.end);
        if range.is_empty() {
            return;
        }
        let behind = self.at(block.start, range.end);
        self.forget(range.clone());
        self.0.insert(range.start, content);
        // The next block has its own contents.
        if range.end < block.end {
            self.0.insert(range.end, behind);
        }
    }

    /// Forgets a range whose block was freed.
    pub(super) fn forget(&mut self, range: Range<u64>) {
        let inside: Vec<_> = self.0.range(range).map(|(start, _)| *start).collect();
        for start in inside {
            self.0.remove(&start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Content::*, *};

    #[test]
    fn a_content_holds_up_to_the_next_address_in_use() {
        let mut contents = Contents::default();
        contents.set(100, Unknown);
        contents.set(150, Known);
        let at = |contents: &Contents, addresses: &[u64]| -> Vec<Content> {
            addresses.iter().map(|address| contents.at(0, *address)).collect()
        };
        assert_eq!(at(&contents, &[99, 100, 149, 150, 199]), [Known, Unknown, Unknown, Known, Known]);
        assert_eq!(contents.at(120, 130), Known, "another block starts between them");
        contents.set_range(&(0..1000), 110..170, Table);
        assert_eq!(at(&contents, &[100, 109, 110, 160, 169, 170]), [Unknown, Unknown, Table, Table, Table, Known]);
        contents.set_range(&(0..1000), 100..120, Known);
        assert_eq!(at(&contents, &[100, 119, 120]), [Known, Known, Table]);
        contents.set_range(&(0..1000), 130..130, Unknown);
        assert_eq!(at(&contents, &[129, 130]), [Table, Table], "an empty range changes nothing");
        contents.set_range(&(0..1000), 300..400, Unknown);
        contents.set_range(&(0..1000), 600..700, Missing(0));
        let of = |range: Range<u64>| contents.of_range(0, range);
        assert_eq!([of(170..300), of(170..301), of(399..500), of(400..500)], [Known, Unknown, Unknown, Known]);
        assert_eq!([of(600..700), of(599..700), of(600..701)], [Missing(0), Unknown, Unknown]);
        contents.set_range(&(0..200), 190..400, Unknown);
        assert_eq!(at(&contents, &[199, 200, 201]), [Unknown; 3]);
        assert_eq!(contents.at(200, 200), Known, "the next block starts there");
        contents.forget(0..500);
        assert_eq!(at(&contents, &[100, 120, 130, 150]), [Known; 4]);
    }
}
