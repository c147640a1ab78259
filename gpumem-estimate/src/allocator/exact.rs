use std::collections::HashMap;

use super::Placement;

/// An allocator that needs nothing but the requested bytes.
#[derive(Debug, Default)]
pub(crate) struct Exact {
    next: u64,
    in_use: u64,
    pub(super) peak: u64,
    bytes: HashMap<u64, u64>,
}

impl Exact {
    pub(super) fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        // Addresses are names here: a number for each block.
        self.next += 1;
        self.in_use = self.in_use.checked_add(bytes)?;
        self.peak = self.peak.max(self.in_use);
        self.bytes.insert(self.next, bytes);
        Some(Placement { address: self.next, bytes })
    }

    pub(super) fn free(&mut self, address: u64) {
        self.in_use -= self.bytes.remove(&address).unwrap_or(0);
    }
}
