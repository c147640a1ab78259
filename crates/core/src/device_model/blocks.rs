//! Blocks and their addresses.

use std::{collections::BTreeMap, iter, ops::Range};

use super::units::{ALIGNMENT, LARGEST, ModelError, packed};

/// The first address of a device, far from 0.
const FIRST: u64 = 0x7000_0000_0000;
/// The size of the address range for the blocks of a device of up to 8 TiB. The range for its pool has the same size.
const SPAN: u64 = 8 << 40;

/// Returns the addresses of the blocks and of the pool of a device with this much memory. A device of more than 8 TiB has two
/// addresses for each byte, so that fragmentation rarely prevents an allocation.
pub(super) fn addresses(total: u64) -> [Range<u64>; 2] {
    let span = if total <= SPAN { SPAN } else { 2 * total.min(LARGEST) };
    [FIRST..FIRST + span, FIRST + span..FIRST + 2 * span]
}

/// Live blocks by address, and the addresses that may be reused.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    /// The bytes of each live block.
    live: BTreeMap<u64, u64>,
    /// Freed addresses by the size of their blocks, the last freed one at the end.
    reusable: BTreeMap<u64, Vec<u64>>,
    /// Addresses that are neither in use nor in `reusable`.
    fresh: Range<u64>,
    all: Range<u64>,
}

impl Blocks {
    pub(super) fn within(all: Range<u64>) -> Self {
        Self { live: BTreeMap::new(), reusable: BTreeMap::new(), fresh: all.clone(), all }
    }

    pub(super) fn insert(&mut self, bytes: u64) -> Result<u64, ModelError> {
        let span = packed(bytes)?;
        let address = if let Some(freed) = self.reusable.get_mut(&span).and_then(Vec::pop) {
            freed
        } else {
            if self.fresh.end - self.fresh.start < span {
                self.find_fresh();
            }
            if self.fresh.end - self.fresh.start < span {
                return Err(ModelError::OutOfMemory);
            }
            let address = self.fresh.start;
            self.fresh.start += span;
            address
        };
        self.live.insert(address, bytes);
        Ok(address)
    }

    /// Discards the freed addresses and uses the widest gap between live blocks instead.
    fn find_fresh(&mut self) {
        self.reusable.clear();
        let Range { mut start, end } = self.all;
        self.fresh = start..start;
        let live = self.live.iter().map(|(address, bytes)| *address..address + bytes.next_multiple_of(ALIGNMENT));
        for block in live.chain(iter::once(end..end)) {
            let gap = start..block.start;
            if gap.end - gap.start > self.fresh.end - self.fresh.start {
                self.fresh = gap;
            }
            start = block.end;
        }
    }

    pub(super) fn remove(&mut self, address: u64) -> Result<u64, ModelError> {
        let bytes = self.live.remove(&address).ok_or(ModelError::UnknownAddress)?;
        self.reusable.entry(packed(bytes)?).or_default().push(address);
        Ok(bytes)
    }

    /// Returns the start and size of the live block that contains this address.
    pub(super) fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.live.range(..=address).next_back()?;
        (address - start < bytes).then_some((start, bytes))
    }
}
