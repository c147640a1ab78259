//! The live blocks, found by their keys. The tables are designed for a million blocks: a block takes 32 bytes and its share of
//! the empty slots. A table that grows must move its entries while other threads wait for the lock. Therefore the tables are
//! split into shards, and only a few thousand entries move at a time.
//!
//! Most blocks are freed soon. A new block therefore goes to the front cache, which has one slot for each hash, and its free
//! finds it there with one lookup. The block moves to its shard when another block needs the slot.
//!
//! After events were lost, the free of a live block may be among them: the block is *possibly freed*. If a new block has the same
//! key, the old one was freed, and the new one replaces it.

mod entry;
pub(super) mod hash;
mod shard;

pub(super) use self::entry::{Attribution, Entry};
use self::{
    entry::tenths,
    hash::{shard_of, upper_bits},
    shard::Shard,
};
use crate::model::{Bytes, Key, Time};

/// A table of a million blocks moves about 4,000 entries at a time. The last shards get twice as many blocks as the first ones: a table
/// doubles when it is full, and if all did so at once, half of their memory would be empty.
const SHARDS: usize = 256;

/// The number of slots. They take 8 KiB, which fits into the first-level cache of a processor.
const FRONT_CACHE: usize = 256;

/// The number of parts in which the live blocks are read; see `LiveBlocks::part`. A block moves from the first part to
/// another one, and back only if its free fails.
pub const BLOCK_PARTS: usize = 1 + SHARDS;

/// See the [module](self). Each event uses the first fields.
#[derive(Debug)]
#[repr(C)]
pub(super) struct LiveBlocks {
    /// True if some blocks in the shards are possibly freed, so that a new block may have the key of one of them.
    frees_may_be_missing: bool,
    /// The time of the next allocation, in the unit of [`Entry`].
    tenths: u32,
    front: Box<[FrontSlot; FRONT_CACHE]>,
    shards: Box<[Shard]>,
    /// The number of possibly freed blocks in all shards.
    possibly_freed: usize,
    /// The number of the last event that reported missed frees, or the highest number while frees are still being missed. Blocks
    /// that were allocated before that event are possibly freed.
    lost_at: u64,
}

/// A slot for one block. Its alignment keeps it within one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
struct FrontSlot {
    key: Key,
    entry: Entry,
}

const _: () = assert!(size_of::<FrontSlot>() == 32);

impl Default for LiveBlocks {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self {
            frees_may_be_missing: false,
            tenths: 0,
            front: Box::new([Self::EMPTY; FRONT_CACHE]),
            shards,
            possibly_freed: 0,
            lost_at: 0,
        }
    }
}

impl LiveBlocks {
    const EMPTY: FrontSlot =
        FrontSlot { key: Key::NONE, entry: Entry { bytes: Bytes::ZERO, when: 0, attribution: Attribution(0) } };

    /// Sets the time of the allocations that follow.
    pub(super) fn set_time(&mut self, time: Time) {
        self.tenths = tenths(time);
    }

    /// Returns the entry of a block that is allocated now by the event with this number.
    #[inline]
    pub(super) fn entry(&self, bytes: Bytes, number: u64, attribution: Attribution) -> Entry {
        Entry::new(bytes, number, self.tenths, attribution)
    }

    /// Inserts a block, if its slot in the front cache is empty and no free may be missing. Returns whether it was inserted.
    #[inline]
    pub(super) fn insert_in_front(&mut self, key: Key, entry: Entry) -> bool {
        let Entry { bytes, when, attribution } = entry;
        let slot = &mut self.front[upper_bits(key)];
        if self.frees_may_be_missing || !slot.entry.is_none() {
            return false;
        }
        *slot = FrontSlot { key, entry: Entry { bytes, when, attribution } };
        true
    }

    /// Returns whether the slot of this key in the front cache is empty.
    #[inline]
    pub(super) fn has_room_in_front(&self, key: Key) -> bool {
        self.front[upper_bits(key)].entry.is_none()
    }

    /// Returns whether a block of this key is live, and not in the front cache.
    #[inline]
    pub(super) fn is_in_shard(&self, key: Key) -> bool {
        self.shards[shard_of(key, SHARDS)].blocks.contains_key(&key)
    }

    /// Inserts a block. Returns a block whose free was not observed, with its key; usually that is the key of the new block. If
    /// `frees_may_be_missing` is false, such a block may be returned later, when the new one moves to its shard.
    pub(super) fn insert(&mut self, key: Key, entry: Entry) -> Option<(Key, Entry)> {
        let slot = &mut self.front[upper_bits(key)];
        if slot.key == key && !slot.entry.is_none() {
            return Some((key, std::mem::replace(&mut slot.entry, entry)));
        }
        if self.frees_may_be_missing
            && let Some(missed) = self.remove_possibly_freed(key)
        {
            // The block is not put into the front cache: the block in that slot would move to its shard, and could
            // replace a second block.
            self.move_to_shard(key, entry);
            return Some((key, missed));
        }
        let old = std::mem::replace(&mut self.front[upper_bits(key)], FrontSlot { key, entry });
        if old.entry.is_none() { None } else { self.move_to_shard(old.key, old.entry) }
    }

    fn move_to_shard(&mut self, key: Key, entry: Entry) -> Option<(Key, Entry)> {
        let is_possibly_freed = entry.number() <= self.lost_at;
        let shard = self.shard(key);
        let replaced = shard.blocks.insert(key, entry);
        // Either frees are still being missed, or the block is back because its free failed.
        if is_possibly_freed {
            shard.possibly_freed += 1;
            shard.add_to_filter(key);
            self.possibly_freed += 1;
            self.frees_may_be_missing = true;
        }
        if let Some(replaced) = &replaced {
            self.left_shard(key, replaced);
        }
        replaced.map(|replaced| (key, replaced))
    }

    fn remove_possibly_freed(&mut self, key: Key) -> Option<Entry> {
        let lost_at = self.lost_at;
        if self.shard(key).may_be_freed(key, lost_at) { self.remove(key) } else { None }
    }

    /// Counts a block that was removed from its shard.
    #[inline]
    fn left_shard(&mut self, key: Key, entry: &Entry) {
        if entry.number() <= self.lost_at {
            self.possibly_freed_left_shard(key);
        }
    }

    #[cold]
    fn possibly_freed_left_shard(&mut self, key: Key) {
        self.shard(key).possibly_freed -= 1;
        self.possibly_freed -= 1;
        self.frees_may_be_missing = self.possibly_freed > 0;
    }

    /// Removes a block, if it is in the front cache and `is_removed` returns true for it.
    #[inline]
    pub(super) fn remove_from_front(&mut self, key: Key, is_removed: impl Fn(&Entry) -> bool) -> Option<Entry> {
        let slot = &mut self.front[upper_bits(key)];
        if slot.key != key || slot.entry.is_none() || !is_removed(&slot.entry) {
            return None;
        }
        let entry = slot.entry;
        slot.entry.attribution = Attribution(0);
        Some(entry)
    }

    /// Removes a block, if it is known.
    pub(super) fn remove(&mut self, key: Key) -> Option<Entry> {
        if let Some(entry) = self.remove_from_front(key, |_| true) {
            return Some(entry);
        }
        let blocks = &mut self.shard(key).blocks;
        // The table itself would search even if it is empty, as most tables of small programs are.
        let entry = if blocks.is_empty() { None } else { blocks.remove(&key) }?;
        self.left_shard(key, &entry);
        Some(entry)
    }

    pub(super) fn get(&self, key: Key) -> Option<&Entry> {
        let FrontSlot { key: in_front, entry } = &self.front[upper_bits(key)];
        if *in_front == key && !entry.is_none() {
            Some(entry)
        } else {
            self.shards[shard_of(key, SHARDS)].blocks.get(&key)
        }
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Entry> {
        let FrontSlot { key: in_front, entry } = &mut self.front[upper_bits(key)];
        if *in_front == key && !entry.is_none() {
            Some(entry)
        } else {
            self.shards[shard_of(key, SHARDS)].blocks.get_mut(&key)
        }
    }

    /// Notes that frees were missed before the event with this number. The highest number means that frees are still being
    /// missed. All live blocks that were allocated before that event are possibly freed. Returns blocks that are replaced now, as
    /// [`insert`](Self::insert) does.
    pub(super) fn frees_missed_until(&mut self, number: u64) -> Vec<(Key, Entry)> {
        let in_front: Vec<_> = self.front.iter_mut().map(|slot| std::mem::replace(slot, Self::EMPTY)).collect();
        let replaced = in_front
            .into_iter()
            .filter(|slot| !slot.entry.is_none())
            .filter_map(|FrontSlot { key, entry }| self.move_to_shard(key, entry))
            .collect();
        self.lost_at = number;
        for shard in &mut self.shards {
            (shard.possibly_freed, shard.filter_of) = (shard.blocks.len(), 0);
        }
        self.possibly_freed = self.shards.iter().map(|shard| shard.possibly_freed).sum();
        self.frees_may_be_missing = self.possibly_freed > 0;
        replaced
    }

    /// Removes the blocks of a [part](Self::part) that `is_removed` selects, and returns them.
    pub(super) fn drain(&mut self, part: usize, is_removed: impl Fn(&Entry) -> bool) -> Vec<(Key, Entry)> {
        let Some(shard) = part.checked_sub(1) else {
            let removed = self.front.iter_mut().filter(|slot| !slot.entry.is_none() && is_removed(&slot.entry));
            return removed.map(|slot| (slot.key, std::mem::take(&mut slot.entry))).collect();
        };
        let removed: Vec<_> = self.shards[shard].blocks.extract_if(|_, entry| is_removed(entry)).collect();
        for (key, entry) in &removed {
            self.left_shard(*key, entry);
        }
        removed
    }

    /// Returns one part of the blocks, of [`BLOCK_PARTS`]: part 0 is the front cache, each other part is a shard.
    pub(super) fn part(&self, part: usize) -> impl Iterator<Item = (Key, &Entry)> {
        let in_front = self.front.iter().filter(move |slot| part == 0 && !slot.entry.is_none());
        let shard = part.checked_sub(1).map(|shard| &self.shards[shard].blocks);
        in_front
            .map(|slot| (slot.key, &slot.entry))
            .chain(shard.into_iter().flatten().map(|(key, entry)| (*key, entry)))
    }

    #[inline]
    fn shard(&mut self, key: Key) -> &mut Shard {
        &mut self.shards[shard_of(key, SHARDS)]
    }
}

#[cfg(test)]
impl LiveBlocks {
    pub(super) fn frees_may_be_missing(&self) -> bool {
        self.frees_may_be_missing
    }
}

#[cfg(test)]
mod tests;
