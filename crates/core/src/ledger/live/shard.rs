//! One of the hash tables of live blocks.

use std::collections::HashMap;

use super::{entry::Entry, hash::filter_bit};
use crate::model::{Key, NumberHashBuilder};

/// The number of bits in the filter of a shard. A program keeps only a few blocks in each shard for a long time, so few other
/// keys share a bit with one of them.
const FILTER: usize = 256;

/// One part of the live blocks.
#[derive(Debug, Default)]
pub(super) struct Shard {
    pub(super) blocks: HashMap<Key, Entry, NumberHashBuilder>,
    /// The number of `blocks` that are possibly freed.
    pub(super) possibly_freed: usize,
    /// The bits of the keys of all possibly freed blocks, and of some blocks that no longer are possibly freed.
    filter: [u64; FILTER / 64],
    /// The number of keys that were added to the filter. The filter is rebuilt when half of them are left, or before its next use
    /// if this is 0.
    pub(super) filter_of: usize,
}

impl Shard {
    /// Returns whether the key may belong to a possibly freed block, one that was allocated by an event up to `lost_at`. Returns
    /// `true` for every key of such a block.
    pub(super) fn may_be_freed(&mut self, key: Key, lost_at: u64) -> bool {
        if self.possibly_freed == 0 {
            return false;
        }
        if self.possibly_freed * 2 <= self.filter_of || self.filter_of == 0 {
            self.build_filter(lost_at);
        }
        let (word, bit) = filter_bit(key, FILTER);
        self.filter[word] & bit != 0
    }

    fn build_filter(&mut self, lost_at: u64) {
        let Self { blocks, filter, .. } = self;
        *filter = Default::default();
        for (key, _) in blocks.iter().filter(|(_, entry)| entry.number() <= lost_at) {
            let (word, bit) = filter_bit(*key, FILTER);
            filter[word] |= bit;
        }
        self.filter_of = self.possibly_freed;
    }

    pub(super) fn add_to_filter(&mut self, key: Key) {
        if self.filter_of > 0 {
            let (word, bit) = filter_bit(key, FILTER);
            self.filter[word] |= bit;
            self.filter_of += 1;
        }
    }
}
