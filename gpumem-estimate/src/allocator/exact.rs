use std::collections::HashMap;

use super::Placement;

/// An allocator that needs nothing but the requested bytes.
#[derive(Debug)]
pub(crate) struct Exact {
    limit: u64,
    next: u64,
    in_use: u64,
    pub(super) peak: u64,
    bytes: HashMap<u64, u64>,
}

impl Exact {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, next: 0, in_use: 0, peak: 0, bytes: HashMap::new() }
    }

    pub(super) fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        self.in_use = self.in_use.checked_add(bytes).filter(|sum| *sum <= self.limit)?;
        // Addresses are names here: a number for each block.
        self.next += 1;
        self.peak = self.peak.max(self.in_use);
        self.bytes.insert(self.next, bytes);
        Some(Placement { address: self.next, bytes })
    }

    pub(super) fn free(&mut self, address: u64) {
        self.in_use -= self.bytes.remove(&address).unwrap_or(0);
    }
}
