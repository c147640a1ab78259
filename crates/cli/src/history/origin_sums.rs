//! Sums of blocks by their origin.

use std::{cmp::Reverse, collections::BTreeMap};

use serde::Serialize;

use super::names::Origin;

/// Blocks of one origin on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OriginSum<'a> {
    /// The index of the device in the history.
    pub(crate) device: u16,
    pub(crate) origin: &'a Origin,
    /// The sum of their sizes. Between two moments, this is negative if more was freed than allocated.
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

/// Bytes and blocks that share a name. The field names are those in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Sum {
    pub(crate) name: String,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

/// Groups blocks by the `name` of their origins, and returns the sums, the most bytes first.
pub(crate) fn sums_by(held: &[OriginSum<'_>], name: impl Fn(&Origin) -> String) -> Vec<Sum> {
    let mut sums: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    for held in held {
        let sum = sums.entry(name(held.origin)).or_default();
        sum.0 += held.bytes;
        sum.1 += held.blocks;
    }
    let mut sums: Vec<_> = sums.into_iter().map(|(name, (bytes, blocks))| Sum { name, bytes, blocks }).collect();
    sums.sort_by_key(|sum| Reverse(sum.bytes.unsigned_abs()));
    sums
}

/// The sums of blocks by origin. An origin is on one device.
pub(super) struct Sums(Vec<OfOrigin>);

#[derive(Clone, Copy, Default)]
struct OfOrigin {
    bytes: i64,
    blocks: i64,
    device: u16,
}

impl Sums {
    /// Creates empty sums for this many origins.
    pub(super) fn new(origins: usize) -> Self {
        Self(vec![OfOrigin::default(); origins])
    }

    pub(super) fn add(&mut self, (device, origin): (u16, u32), bytes: i64, blocks: i64) {
        let sum = &mut self.0[origin as usize];
        *sum = OfOrigin { bytes: sum.bytes.saturating_add(bytes), blocks: sum.blocks + blocks, device };
    }

    /// Returns the sums by device, the largest first.
    pub(super) fn held(self, origins: &[Origin], devices: usize) -> Vec<Vec<OriginSum<'_>>> {
        let mut held = vec![Vec::new(); devices];
        for (OfOrigin { bytes, blocks, device }, origin) in self.0.into_iter().zip(origins) {
            if (bytes, blocks) != (0, 0) {
                held[usize::from(device)].push(OriginSum { device, origin, bytes, blocks });
            }
        }
        for held in &mut held {
            held.sort_by_key(|held| Reverse(held.bytes));
        }
        held
    }
}
