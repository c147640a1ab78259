//! The memory that the driver maps for allocations.
//!
//! The driver maps memory of a device in pages of 2 MiB. A block takes whole pages, and small blocks share them. Measured on the H100
//! and the H200: blocks of 3 MiB and of 2,100,000 bytes take 4 MiB, and a block of 1,000 bytes takes none if an earlier block has room
//! left in its page.

use std::collections::HashMap;

use super::{Bytes, Key, MemKind, NumberHashBuilder};

/// The size of a page, in bytes.
const PAGE: u64 = 2 << 20;

/// The pages of the live blocks of one device.
#[derive(Clone, Debug, Default)]
pub struct MappedPages {
    /// The number of blocks in each page that a block takes only in part.
    shared: HashMap<u64, u32, NumberHashBuilder>,
    /// The bytes of all pages.
    mapped: u64,
    /// The bytes of all blocks.
    requested: u64,
}

impl MappedPages {
    /// Adds a block.
    pub fn add(&mut self, key: Key, bytes: Bytes, kind: MemKind) {
        self.change(key, bytes, kind, true);
    }

    /// Removes a block that was [added](Self::add).
    pub fn remove(&mut self, key: Key, bytes: Bytes, kind: MemKind) {
        self.change(key, bytes, kind, false);
    }

    /// Returns the bytes of pages that no block asked for.
    pub fn rounding(&self) -> Bytes {
        Bytes::new(self.mapped.saturating_sub(self.requested))
    }

    fn change(&mut self, key: Key, bytes: Bytes, kind: MemKind, is_new: bool) {
        let bytes = bytes.get();
        // Pools, handles and graphs get whole pages.
        if kind != MemKind::Device || bytes == 0 {
            return;
        }
        let pages = if key.is_address() {
            let (first, last) = (key.address() / PAGE, key.address().saturating_add(bytes - 1) / PAGE);
            let ends = [Some(first), Some(last).filter(|last| *last != first)];
            let at_ends: u64 = ends.into_iter().flatten().map(|page| u64::from(self.changes_page(page, is_new))).sum();
            (last - first).saturating_sub(1) + at_ends
        } else {
            // The address of an array is not known.
            bytes.div_ceil(PAGE)
        };
        let change = if is_new { u64::saturating_add } else { u64::saturating_sub };
        self.mapped = change(self.mapped, pages.saturating_mul(PAGE));
        self.requested = change(self.requested, bytes);
    }

    /// Counts a block in a page, or removes it. Returns whether the page was mapped or is not needed any more.
    fn changes_page(&mut self, page: u64, is_new: bool) -> bool {
        let blocks = self.shared.entry(page).or_default();
        let before = *blocks;
        *blocks = if is_new { before.saturating_add(1) } else { before.saturating_sub(1) };
        let now = *blocks;
        if now == 0 {
            self.shared.remove(&page);
        }
        (before == 0) != (now == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Space;

    /// These blocks were allocated on an H200; the process had these pages by NVML.
    #[test]
    fn blocks_take_whole_pages() {
        let mut pages = MappedPages::default();
        let blocks = [
            (0x7ff2_a5e0_0000, 1 << 20),
            (0x7ff1_8c00_0000, 3 << 20),
            (0x7ff2_a5f0_0000, 1_000),
            (0x7ff1_8ca0_0000, 2_100_000),
        ]
        .map(|(address, bytes)| (Key::new(Space::Address, address), Bytes::new(bytes)));
        let mapped = |pages: &MappedPages| pages.mapped >> 20;
        let after = blocks.map(|(key, bytes)| {
            pages.add(key, bytes, MemKind::Device);
            mapped(&pages)
        });
        assert_eq!(after, [2, 6, 6, 10]);
        assert_eq!(pages.rounding().get(), (10 << 20) - (4 << 20) - 1_000 - 2_100_000);
        let after = blocks.map(|(key, bytes)| {
            pages.remove(key, bytes, MemKind::Device);
            mapped(&pages)
        });
        assert_eq!(after, [10, 6, 4, 0]);
        pages.add(Key::new(Space::Array, 1), Bytes::new(4_000_000), MemKind::Device);
        pages.add(Key::new(Space::Handle, 1), Bytes::mib(1), MemKind::Vmm);
        assert_eq!((mapped(&pages), pages.shared.len()), (4, 0));
    }
}
