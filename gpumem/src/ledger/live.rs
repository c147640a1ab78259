//! The live blocks, by key. Made for a million of them: 24 bytes each and the table's slack, and split into shards, so
//! that a table that grows moves a few thousand entries and not all of them while others wait at the door.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use crate::model::{Bytes, Key, MemKind, ThreadId};

/// A table of a million blocks then moves some 4,000 entries at a time.
const SHARDS: usize = 256;

/// 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

#[derive(Debug)]
pub(super) struct Live {
    shards: Box<[HashMap<Key, Entry, Folded>]>,
    by_kind: [Tally; MemKind::ALL.len()],
}

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) bytes: Bytes,
    /// Who allocated it.
    pub(super) thread: ThreadId,
    /// The meter of its device.
    pub(super) meter: u16,
    pub(super) kind: MemKind,
    pub(super) context: u8,
}

const _: () = assert!(size_of::<(Key, Entry)>() == 24);

/// Blocks and bytes that are live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

impl Default for Live {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| HashMap::default()).collect(), by_kind: Default::default() }
    }
}

impl Live {
    /// Enters a block; gives back one that was entered under the same key and whose free was not heard.
    #[inline]
    pub(super) fn insert(&mut self, key: Key, entry: Entry) -> Option<Entry> {
        let replaced = self.shard(key).insert(key, entry);
        let tally = &mut self.by_kind[entry.kind as usize];
        tally.blocks += 1;
        tally.bytes += entry.bytes.get();
        replaced.inspect(|old| self.took(old))
    }

    /// Takes a block out, if it is known.
    #[inline]
    pub(super) fn remove(&mut self, key: Key) -> Option<Entry> {
        self.shard(key).remove(&key).inspect(|old| self.took(old))
    }

    /// Takes out all blocks of which `gone` is true, and hands them over.
    pub(super) fn drain(&mut self, gone: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let taken: Vec<_> =
            self.shards.iter_mut().flat_map(|shard| shard.extract_if(|_, entry| gone(entry))).map(|(_, e)| e).collect();
        for entry in &taken {
            self.took(entry);
        }
        taken
    }

    pub(super) fn by_kind(&self) -> [Tally; MemKind::ALL.len()] {
        self.by_kind
    }

    fn took(&mut self, old: &Entry) {
        let tally = &mut self.by_kind[old.kind as usize];
        tally.blocks -= 1;
        tally.bytes -= old.bytes.get();
    }

    fn shard(&mut self, key: Key) -> &mut HashMap<Key, Entry, Folded> {
        &mut self.shards[(key.get().wrapping_mul(GOLDEN) >> 56) as usize]
    }
}

type Folded = BuildHasherDefault<Fold>;

/// A multiplication: keys are addresses of the driver, not chosen by an enemy, and a hash that guards
/// against one costs more than all the rest of an event.
#[derive(Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // The upper half of the product depends on all bits of the number, the lower does not; swapped, the bits that a
        // table looks at first are good ones.
        self.0 = (number ^ self.0).wrapping_mul(GOLDEN).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Space;

    fn entry(bytes: u64) -> Entry {
        Entry { bytes: Bytes::new(bytes), thread: ThreadId(1), meter: 0, kind: MemKind::Device, context: 0 }
    }

    fn key(address: u64) -> Key {
        Key::new(Space::Address, address)
    }

    #[test]
    fn blocks_are_found_once() {
        let mut live = Live::default();
        assert_eq!(live.insert(key(512), entry(1)), None);
        assert_eq!(live.insert(key(512), entry(2)), Some(entry(1)));
        assert_eq!(live.insert(Key::new(Space::Handle, 512), entry(3)), None, "a handle is no address");
        assert_eq!(live.by_kind()[0], Tally { blocks: 2, bytes: 5 });
        assert_eq!(live.remove(key(512)), Some(entry(2)));
        assert_eq!(live.remove(key(512)), None);
        assert_eq!(live.drain(|entry| entry.bytes == 3), [entry(3)]);
        assert_eq!(live.by_kind()[0], Tally::default());
    }

    #[test]
    fn a_million_blocks_take_little_room_and_lie_evenly() {
        let blocks = if cfg!(miri) { 20_000 } else { 1_000_000 };
        let mut live = Live::default();
        for block in 0..blocks as u64 {
            live.insert(key(0x7000_0000_0000 + block * 512), entry(512));
        }
        let sizes: Vec<_> = live.shards.iter().map(HashMap::len).collect();
        assert!(*sizes.iter().max().unwrap() < 2 * blocks / SHARDS, "{sizes:?}");
        // A table has room for 7 entries in 8 places, each with a byte of its own.
        let places: usize = live.shards.iter().map(|shard| (shard.capacity() * 8).div_ceil(7)).sum();
        let room = places * (size_of::<(Key, Entry)>() + 1);
        assert!(room <= 64 * blocks, "{} bytes for each block", room / blocks);
    }
}
