//! The live blocks, by key. Made for a million of them: 24 bytes each and the table's slack, and split into shards, so
//! that a table that grows moves a few thousand entries and not all of them while others wait at the door.
//!
//! Most blocks die young. A new one therefore goes to the nursery, one place for each hash, where its free finds it with
//! one look; it moves to the shards when the next one needs the place.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use super::origins::OriginId;
use crate::model::{Bytes, Key, Time};

/// A table of a million blocks then moves some 4,000 entries at a time.
const SHARDS: usize = 256;

/// 6 KiB, for a processor's innermost cache.
const NURSERY: usize = 256;

/// 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

#[derive(Debug)]
pub(super) struct Live {
    nursery: Box<[(Key, Entry); NURSERY]>,
    shards: Box<[HashMap<Key, Entry, Folded>]>,
    /// Frees may have been missed, so that a new block's key may be in the shards already.
    doubtful: bool,
}

/// What is remembered of a block, in two words: they are written and read whole, since a processor that reads what was just
/// written in other pieces has to wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// Bytes in the upper 48 bits. Below, the lower half of when it was allocated, in tenths of a second since the session
    /// began; that stays at the highest after 19 days.
    size: u64,
    /// The lower half of the event's number in the upper 32 bits, the origin in 24, the upper half of the time. An entry of
    /// origin 0 is none.
    origin: u64,
}

const _: () = assert!(size_of::<(Key, Entry)>() == 24);

impl Entry {
    const MOST_BYTES: u64 = (1 << 48) - 1;
    const LAST_TENTH: u64 = (1 << 24) - 1;

    #[inline]
    pub(super) fn new(bytes: Bytes, origin: OriginId, time: Time, number: u64) -> Self {
        // No block is as large as 2^48 bytes.
        let bytes = bytes.get().min(Self::MOST_BYTES);
        let tenths = (time.as_secs() * 10 + u64::from(time.subsec_millis() / 100)).min(Self::LAST_TENTH);
        Self { size: bytes << 16 | tenths & 0xffff, origin: number << 32 | u64::from(origin.0) << 8 | tenths >> 16 }
    }

    #[inline]
    pub(super) fn bytes(&self) -> Bytes {
        Bytes::new(self.size >> 16)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "24 bits are kept")]
    pub(super) fn origin(&self) -> OriginId {
        OriginId((self.origin >> 8) as u32 & 0x00ff_ffff)
    }

    /// The lower half of the number of the event that it came with.
    pub(super) fn number(&self) -> u32 {
        (self.origin >> 32) as u32
    }

    pub(super) fn time(&self) -> Time {
        Time::from_millis((self.size & 0xffff | (self.origin & 0xff) << 16) * 100)
    }

    #[inline]
    fn is_none(&self) -> bool {
        self.origin().0 == 0
    }
}

impl Default for Live {
    fn default() -> Self {
        let nursery = vec![Self::EMPTY; NURSERY].into_boxed_slice();
        let shards = (0..SHARDS).map(|_| HashMap::default()).collect();
        Self { nursery: nursery.try_into().expect("it is as long as that"), shards, doubtful: false }
    }
}

/// Of the product, the upper bits depend on all bits of the number.
#[inline]
fn upper_bits(key: Key) -> usize {
    (key.get().wrapping_mul(GOLDEN) >> 56) as usize
}

impl Live {
    const EMPTY: (Key, Entry) = (Key::NONE, Entry { size: 0, origin: 0 });

    /// Enters a block; gives back one that was entered under the same key and whose free was not heard. If nothing says
    /// that one could be missed, this may come as late as when the block moves to the shards.
    #[inline]
    pub(super) fn insert(&mut self, key: Key, entry: Entry) -> Option<Entry> {
        let missed = if self.doubtful { self.shard(key).remove(&key) } else { None };
        let (old_key, old) = std::mem::replace(&mut self.nursery[upper_bits(key)], (key, entry));
        if old.is_none() {
            return missed;
        }
        if old_key == key {
            return Some(old);
        }
        // In doubt nothing is replaced here: it was when the block came.
        self.grow_up(old_key, old).or(missed)
    }

    #[inline(never)]
    fn grow_up(&mut self, key: Key, entry: Entry) -> Option<Entry> {
        self.shard(key).insert(key, entry)
    }

    /// Takes a block out, if it is known.
    #[inline]
    pub(super) fn remove(&mut self, key: Key) -> Option<Entry> {
        let (young, entry) = &mut self.nursery[upper_bits(key)];
        if *young == key && !entry.is_none() {
            return Some(std::mem::take(entry));
        }
        self.shard(key).remove(&key)
    }

    pub(super) fn get(&self, key: Key) -> Option<&Entry> {
        let (young, entry) = &self.nursery[upper_bits(key)];
        if *young == key && !entry.is_none() { Some(entry) } else { self.shards[upper_bits(key)].get(&key) }
    }

    /// Frees may be missed from now on. Gives back what was replaced, as [`insert`](Self::insert) does.
    pub(super) fn doubt(&mut self) -> Vec<Entry> {
        if std::mem::replace(&mut self.doubtful, true) {
            return Vec::new();
        }
        let young: Vec<_> = self.nursery.iter_mut().map(|place| std::mem::replace(place, Self::EMPTY)).collect();
        young
            .into_iter()
            .filter(|(_, entry)| !entry.is_none())
            .filter_map(|(key, entry)| self.grow_up(key, entry))
            .collect()
    }

    /// Takes out all blocks of which `gone` is true, and hands them over.
    pub(super) fn drain(&mut self, gone: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let young = self.nursery.iter_mut().map(|(_, entry)| entry);
        let young: Vec<_> = young.filter(|entry| !entry.is_none() && gone(entry)).map(std::mem::take).collect();
        let old = self.shards.iter_mut().flat_map(|shard| shard.extract_if(|_, entry| gone(entry)));
        young.into_iter().chain(old.map(|(_, entry)| entry)).collect()
    }

    /// A part of the blocks, of [`PARTS`] that are all of them.
    pub(super) fn part(&self, part: usize) -> impl Iterator<Item = (Key, &Entry)> {
        let young = self.nursery.iter().filter(move |(_, entry)| part == 0 && !entry.is_none());
        let shard = part.checked_sub(1).map(|shard| &self.shards[shard]);
        young.map(|(key, entry)| (*key, entry)).chain(shard.into_iter().flatten().map(|(key, entry)| (*key, entry)))
    }

    #[inline]
    fn shard(&mut self, key: Key) -> &mut HashMap<Key, Entry, Folded> {
        &mut self.shards[upper_bits(key)]
    }
}

/// See [`Live::part`]. Blocks move from the first to the others and never back.
pub(crate) const PARTS: usize = 1 + SHARDS;

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
        Entry::new(Bytes::new(bytes), OriginId(1), Time::ZERO, 1)
    }

    fn key(address: u64) -> Key {
        Key::new(Space::Address, address)
    }

    /// A key that wants the same place in the nursery.
    fn rival(of: Key) -> Key {
        (1..10_000).map(|at| key(of.get() + at * 512)).find(|other| upper_bits(*other) == upper_bits(of)).unwrap()
    }

    fn all(live: &Live) -> usize {
        (0..PARTS).map(|part| live.part(part).count()).sum()
    }

    #[test]
    fn an_entry_remembers() {
        let time = Time::from_millis(123_456);
        let entry = Entry::new(Bytes::gib(200_000), OriginId(0x00ab_cdef), time, 0x1_2345_6789);
        assert_eq!((entry.bytes(), entry.origin()), (Bytes::gib(200_000), OriginId(0x00ab_cdef)));
        assert_eq!((entry.time(), entry.number()), (Time::from_millis(123_400), 0x2345_6789));
        let old = Entry::new(Bytes::new(u64::MAX), OriginId(1), Time::from_secs(1 << 40), 1);
        assert_eq!((old.bytes().get(), old.time()), ((1 << 48) - 1, Time::from_millis(((1 << 24) - 1) * 100)));
    }

    #[test]
    fn blocks_are_found_once() {
        let mut live = Live::default();
        assert_eq!(live.remove(Key::NONE), None, "an empty place is no block");
        assert_eq!(live.insert(key(512), entry(1)), None);
        assert_eq!(live.insert(key(512), entry(2)), Some(entry(1)));
        assert_eq!(live.insert(Key::new(Space::Handle, 512), entry(3)), None, "a handle is no address");
        assert_eq!(all(&live), 2);
        assert_eq!(live.remove(key(512)), Some(entry(2)));
        assert_eq!(live.remove(key(512)), None);
        assert_eq!(live.drain(|entry| entry.bytes() == 3), [entry(3)]);
        assert_eq!(all(&live), 0);
    }

    #[test]
    fn blocks_are_found_when_they_have_left_the_nursery() {
        let (a, b) = (key(512), rival(key(512)));
        let mut live = Live::default();
        assert_eq!((live.insert(a, entry(1)), live.insert(b, entry(2))), (None, None));
        assert_eq!((all(&live), live.part(0).count()), (2, 1));
        assert_eq!(live.remove(a), Some(entry(1)));
        assert_eq!(live.remove(a), None);
        assert_eq!(live.remove(b), Some(entry(2)));
        live.insert(a, entry(1));
        live.insert(b, entry(2));
        assert_eq!(live.drain(|_| true).len(), 2);
    }

    #[test]
    fn a_block_whose_free_was_missed_is_given_back_in_the_end() {
        let (a, b) = (key(512), rival(key(512)));
        for doubtful in [false, true] {
            let mut live = Live::default();
            live.insert(a, entry(1));
            live.insert(b, entry(2));
            if doubtful {
                assert_eq!(live.doubt(), []);
            }
            let at_once = live.insert(a, entry(3));
            let later = live.insert(b, entry(4));
            let replaced: Vec<_> = [at_once, later].into_iter().flatten().map(|entry| entry.bytes().get()).collect();
            assert!(replaced.contains(&1), "doubtful: {doubtful}, {replaced:?}");
            assert_eq!(at_once.is_some(), doubtful);
        }
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
