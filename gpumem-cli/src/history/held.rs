//! Blocks of one origin.

use std::{cmp::Reverse, collections::BTreeMap};

use serde::Serialize;

use super::names::Origin;

/// Blocks of one origin on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OriginSum<'a> {
    /// The number of the device in the history.
    pub(crate) device: u16,
    pub(crate) origin: &'a Origin,
    /// The sum of their sizes. Between two moments, it is below 0 if more was freed than allocated.
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

/// Bytes and blocks that have a name in common. The names of the fields are those in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Sum {
    pub(crate) name: String,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

/// The bytes and the blocks of all origins with the same `name`, the most bytes first.
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
