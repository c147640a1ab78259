//! The live blocks, by key. Made for a million of them: 32 bytes each and the table's slack, and split into shards, so
//! that a table that grows moves a few thousand entries and not all of them while others wait at the door.
//!
//! Most blocks die young. A new one therefore goes to the front cache, one place for each hash, where its free finds it with
//! one look; it moves to the shards when the next one needs the place.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use super::groups::GroupId;
use crate::model::{Bytes, Key, OwnerThread, Time};

/// A table of a million blocks then moves some 4,000 entries at a time.
const SHARDS: usize = 256;

/// 8 KiB, for a processor's innermost cache.
const FRONT_CACHE: usize = 256;

/// Bits in the filter of a shard. A program keeps a few blocks in each shard for long, so few other keys look like one of them.
const FILTER: usize = 256;

/// 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

#[derive(Debug)]
#[repr(C)]
pub(super) struct Live {
    /// Frees may have been missed, so that a new block's key may be in the shards already: some of them have suspects.
    frees_may_be_missing: bool,
    front: Box<[FrontSlot; FRONT_CACHE]>,
    shards: Box<[Shard]>,
    /// Suspects in all shards.
    suspects: usize,
    /// The number of the newest event by which frees were found to be missed; the highest number while they go on being missed.
    /// Blocks that are older are suspects: their frees may be among those.
    lost_at: u64,
}

/// A part of the blocks.
#[derive(Debug, Default)]
struct Shard {
    blocks: HashMap<Key, Entry, Folded>,
    /// How many of `blocks` are suspects.
    suspects: usize,
    /// A bit for each hash of a suspect, and for some that were suspects.
    filter: [u64; FILTER / 64],
    /// How many suspects were added to the filter. It is made again when half of them are left; 0: it is to be made.
    filter_of: usize,
}

/// What is remembered of a block, in three words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) bytes: Bytes,
    /// The number of the event that it came with, in 48 bits, and the upper 16 of the time.
    when: u64,
    /// The lower 8 bits are those of the time. Of group 0 if this is the entry of no block.
    attribution: Attribution,
}

/// The thread that a block was allocated for, in the upper 32 bits, and its group, in the next 24. The lowest 8 bits are free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attribution(u64);

impl Attribution {
    pub(super) fn new(owner: OwnerThread, group: GroupId) -> Self {
        Self(u64::from(owner.0) << 32 | u64::from(group.0) << 8)
    }

    /// The thread on whose behalf it was allocated.
    pub(super) fn owner(self) -> OwnerThread {
        OwnerThread((self.0 >> 32) as u32)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "24 bits are taken")]
    pub(super) fn group(self) -> GroupId {
        GroupId((self.0 >> 8) as u32 & 0x00ff_ffff)
    }
}

/// A place for one block. No place lies in two lines of the cache.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
struct FrontSlot {
    key: Key,
    entry: Entry,
}

const _: () = assert!(size_of::<FrontSlot>() == 32);

/// A time in the unit of [`Entry`]: tenths of a second, in 24 bits. A time after 19 days is stored as the largest value.
pub(super) fn tenths(time: Time) -> u32 {
    u32::try_from(time.as_millis() / 100).unwrap_or(u32::MAX).min((1 << 24) - 1)
}

impl Entry {
    /// `number` is that of the event, and `tenths` its time.
    #[inline]
    pub(super) fn new(bytes: Bytes, number: u64, tenths: u32, attribution: Attribution) -> Self {
        let tenths = u64::from(tenths);
        Self { bytes, when: number << 16 | tenths >> 8, attribution: Attribution(attribution.0 | tenths & 0xff) }
    }

    /// The same block with another size.
    pub(super) fn of(self, bytes: Bytes) -> Self {
        Self { bytes, ..self }
    }

    #[inline]
    pub(super) fn group(&self) -> GroupId {
        self.attribution.group()
    }

    #[inline]
    pub(super) fn attribution(&self) -> Attribution {
        self.attribution
    }

    /// The number of the event that it came with, of which there are fewer than 2^48.
    pub(super) fn number(&self) -> u64 {
        self.when >> 16
    }

    pub(super) fn time(&self) -> Time {
        Time::from_millis(((self.when & 0xffff) << 8 | self.attribution.0 & 0xff) * 100)
    }

    #[inline]
    fn is_none(&self) -> bool {
        self.attribution.group() == GroupId(0)
    }
}

impl Default for Live {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self {
            frees_may_be_missing: false,
            front: Box::new([Self::EMPTY; FRONT_CACHE]),
            shards,
            suspects: 0,
            lost_at: 0,
        }
    }
}

/// Of the product, the upper bits depend on all bits of the number.
#[inline]
fn upper_bits(key: Key) -> usize {
    (key.get().wrapping_mul(GOLDEN) >> 56) as usize
}

impl Live {
    const EMPTY: FrontSlot =
        FrontSlot { key: Key::NONE, entry: Entry { bytes: Bytes::ZERO, when: 0, attribution: Attribution(0) } };

    /// Enters a block, if its place in the front cache is free and no free may have been missed. Says whether it is entered.
    #[inline]
    pub(super) fn insert_in_front(&mut self, key: Key, entry: Entry) -> bool {
        let Entry { bytes, when, attribution } = entry;
        let place = &mut self.front[upper_bits(key)];
        if self.frees_may_be_missing || !place.entry.is_none() {
            return false;
        }
        *place = FrontSlot { key, entry: Entry { bytes, when, attribution } };
        true
    }

    /// Enters a block; gives back one that was entered under the same key and whose free was not heard. If nothing says
    /// that one could be missed, this may come as late as when the block moves to the shards.
    pub(super) fn insert(&mut self, key: Key, entry: Entry) -> Option<Entry> {
        let place = &mut self.front[upper_bits(key)];
        if place.key == key && !place.entry.is_none() {
            return Some(std::mem::replace(&mut place.entry, entry));
        }
        if self.frees_may_be_missing
            && let Some(missed) = self.remove_suspect(key)
        {
            // Not to the front cache, since the block in its place would have to move here, and might replace one as well.
            self.move_to_shard(key, entry);
            return Some(missed);
        }
        let old = std::mem::replace(&mut self.front[upper_bits(key)], FrontSlot { key, entry });
        if old.entry.is_none() { None } else { self.move_to_shard(old.key, old.entry) }
    }

    fn move_to_shard(&mut self, key: Key, entry: Entry) -> Option<Entry> {
        let is_suspect = entry.number() <= self.lost_at;
        let shard = self.shard(key);
        let replaced = shard.blocks.insert(key, entry);
        // Frees go on being missed, or it left for a while: its free failed.
        if is_suspect {
            shard.suspects += 1;
            shard.add_to_filter(key);
            self.suspects += 1;
            self.frees_may_be_missing = true;
        }
        if let Some(replaced) = &replaced {
            self.has_left(key, replaced);
        }
        replaced
    }

    fn remove_suspect(&mut self, key: Key) -> Option<Entry> {
        let lost_at = self.lost_at;
        if self.shard(key).may_suspect(key, lost_at) { self.remove_from_shard(key) } else { None }
    }

    /// A block is in its shard no more.
    #[inline]
    fn has_left(&mut self, key: Key, entry: &Entry) {
        if entry.number() <= self.lost_at {
            self.suspect_has_left(key);
        }
    }

    #[cold]
    fn suspect_has_left(&mut self, key: Key) {
        self.shard(key).suspects -= 1;
        self.suspects -= 1;
        self.frees_may_be_missing = self.suspects > 0;
    }

    /// Takes a block of this group out of the front cache, if it is there.
    #[inline]
    pub(super) fn remove_from_front(&mut self, key: Key, group: GroupId) -> Option<Entry> {
        let place = &mut self.front[upper_bits(key)];
        if place.key != key || place.entry.group() != group || place.entry.is_none() {
            return None;
        }
        let entry = place.entry;
        place.entry.attribution = Attribution(0);
        Some(entry)
    }

    /// Takes a block out, if it is known.
    pub(super) fn remove(&mut self, key: Key) -> Option<Entry> {
        let place = &self.front[upper_bits(key)];
        let group = place.entry.group();
        self.remove_from_front(key, group).or_else(|| self.remove_from_shard(key))
    }

    /// Takes a block out that has left the front cache, if it is known.
    fn remove_from_shard(&mut self, key: Key) -> Option<Entry> {
        let entry = self.shard(key).blocks.remove(&key)?;
        self.has_left(key, &entry);
        Some(entry)
    }

    pub(super) fn get(&self, key: Key) -> Option<&Entry> {
        let FrontSlot { key: young, entry } = &self.front[upper_bits(key)];
        if *young == key && !entry.is_none() { Some(entry) } else { self.shards[upper_bits(key)].blocks.get(&key) }
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Entry> {
        let FrontSlot { key: young, entry } = &mut self.front[upper_bits(key)];
        if *young == key && !entry.is_none() { Some(entry) } else { self.shards[upper_bits(key)].blocks.get_mut(&key) }
    }

    /// Frees of any blocks may have been missed until the event of this number; with the highest number, they go on being missed.
    /// A block that comes under the key of one from that time replaces it. Gives back what is replaced now, as
    /// [`insert`](Self::insert) does.
    pub(super) fn suspect_until(&mut self, number: u64) -> Vec<Entry> {
        let young: Vec<_> = self.front.iter_mut().map(|place| std::mem::replace(place, Self::EMPTY)).collect();
        let replaced = young
            .into_iter()
            .filter(|place| !place.entry.is_none())
            .filter_map(|FrontSlot { key, entry }| self.move_to_shard(key, entry))
            .collect();
        self.lost_at = number;
        for shard in &mut self.shards {
            (shard.suspects, shard.filter_of) = (shard.blocks.len(), 0);
        }
        self.suspects = self.shards.iter().map(|shard| shard.suspects).sum();
        self.frees_may_be_missing = self.suspects > 0;
        replaced
    }

    /// Takes out the blocks of a [part](Self::part) of which `gone` is true, and hands them over.
    pub(super) fn drain(&mut self, part: usize, gone: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let Some(shard) = part.checked_sub(1) else {
            let young = self.front.iter_mut().map(|place| &mut place.entry);
            return young.filter(|entry| !entry.is_none() && gone(entry)).map(std::mem::take).collect();
        };
        let gone: Vec<_> = self.shards[shard].blocks.extract_if(|_, entry| gone(entry)).collect();
        gone.into_iter()
            .map(|(key, entry)| {
                self.has_left(key, &entry);
                entry
            })
            .collect()
    }

    /// A part of the blocks, of [`PARTS`] that are all of them.
    pub(super) fn part(&self, part: usize) -> impl Iterator<Item = (Key, &Entry)> {
        let young = self.front.iter().filter(move |place| part == 0 && !place.entry.is_none());
        let shard = part.checked_sub(1).map(|shard| &self.shards[shard].blocks);
        young
            .map(|place| (place.key, &place.entry))
            .chain(shard.into_iter().flatten().map(|(key, entry)| (*key, entry)))
    }

    #[inline]
    fn shard(&mut self, key: Key) -> &mut Shard {
        &mut self.shards[upper_bits(key)]
    }
}

#[cfg(test)]
impl Live {
    /// Whether an insertion may have to look for a block whose free was missed.
    pub(super) fn is_doubtful(&self) -> bool {
        self.frees_may_be_missing
    }
}

impl Shard {
    /// Whether one of the blocks until the event of this number may have the key: surely if one has it.
    fn may_suspect(&mut self, key: Key, lost_at: u64) -> bool {
        if self.suspects == 0 {
            return false;
        }
        if self.suspects * 2 <= self.filter_of || self.filter_of == 0 {
            self.make_filter(lost_at);
        }
        let (word, bit) = filter_bit(key);
        self.filter[word] & bit != 0
    }

    fn make_filter(&mut self, lost_at: u64) {
        let Self { blocks, filter, .. } = self;
        *filter = Default::default();
        for (key, _) in blocks.iter().filter(|(_, entry)| entry.number() <= lost_at) {
            let (word, bit) = filter_bit(*key);
            filter[word] |= bit;
        }
        self.filter_of = self.suspects;
    }

    fn add_to_filter(&mut self, key: Key) {
        if self.filter_of > 0 {
            let (word, bit) = filter_bit(key);
            self.filter[word] |= bit;
            self.filter_of += 1;
        }
    }
}

/// Of the hash, the upper bits after those that choose the shard.
fn filter_bit(key: Key) -> (usize, u64) {
    let bits = (key.get().wrapping_mul(GOLDEN) >> 48) as usize % FILTER;
    (bits / 64, 1 << (bits % 64))
}

/// See `Live::part`. Blocks move from the first to the others, and back only if their free fails.
pub const PARTS: usize = 1 + SHARDS;

pub(super) type Folded = BuildHasherDefault<Fold>;

/// A multiplication: keys are addresses of the driver, not chosen by an enemy, and a hash that guards
/// against one costs more than all the rest of an event.
#[derive(Default)]
pub(super) struct Fold(u64);

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u16(&mut self, number: u16) {
        self.write_u64(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
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
        Entry::new(Bytes::new(bytes), 1, 0, Attribution::new(OwnerThread(1), GroupId(1)))
    }

    fn key(address: u64) -> Key {
        Key::new(Space::Address, address)
    }

    /// A key that wants the same place in the front cache.
    fn rival(of: Key) -> Key {
        (1..10_000).map(|at| key(of.get() + at * 512)).find(|other| upper_bits(*other) == upper_bits(of)).unwrap()
    }

    fn drain(live: &mut Live, gone: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        (0..PARTS).flat_map(|part| live.drain(part, &gone)).collect()
    }

    fn all(live: &Live) -> usize {
        (0..PARTS).map(|part| live.part(part).count()).sum()
    }

    #[test]
    fn an_entry_remembers() {
        let (thread, group) = (OwnerThread(u32::MAX - 1), GroupId(0x00ab_cdef));
        let of =
            |time| Entry::new(Bytes::new(u64::MAX), 0x1234_5678_9abc, tenths(time), Attribution::new(thread, group));
        let entry = of(Time::from_millis(123_456));
        assert_eq!((entry.attribution().owner(), entry.group(), entry.number()), (thread, group, 0x1234_5678_9abc));
        assert_eq!((entry.bytes.get(), entry.time()), (u64::MAX, Time::from_millis(123_400)));
        assert_eq!(of(Time::from_secs(1 << 40)).time(), Time::from_millis(((1 << 24) - 1) * 100));
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
        assert_eq!(drain(&mut live, |entry| entry.bytes == 3), [entry(3)]);
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
        assert_eq!(drain(&mut live, |_| true).len(), 2);
    }

    #[test]
    fn a_block_whose_free_was_missed_is_given_back_in_the_end() {
        let (a, b) = (key(512), rival(key(512)));
        for frees_may_be_missing in [false, true] {
            let mut live = Live::default();
            live.insert(a, entry(1));
            live.insert(b, entry(2));
            if frees_may_be_missing {
                assert_eq!(live.suspect_until(1), []);
            }
            let at_once = live.insert(a, entry(3));
            let later = live.insert(b, entry(4));
            let replaced: Vec<_> = [at_once, later].into_iter().flatten().map(|entry| entry.bytes.get()).collect();
            assert!(replaced.contains(&1), "frees_may_be_missing: {frees_may_be_missing}, {replaced:?}");
            assert_eq!(at_once.is_some(), frees_may_be_missing);
        }
    }

    impl Live {
        /// As it keeps it, counted anew.
        fn check_suspects(&self) {
            for shard in &self.shards {
                let is_suspect = |entry: &Entry| entry.number() <= self.lost_at;
                assert_eq!(shard.suspects, shard.blocks.values().filter(|entry| is_suspect(entry)).count());
            }
            assert_eq!(self.suspects, self.shards.iter().map(|shard| shard.suspects).sum::<usize>());
            assert_eq!(self.frees_may_be_missing, self.suspects > 0);
        }
    }

    fn numbered(number: u64) -> Entry {
        Entry::new(Bytes::new(number), number, 0, Attribution::new(OwnerThread(1), GroupId(1)))
    }

    #[test]
    fn doubt_ends_with_the_last_block_from_before_the_loss() {
        let blocks = if cfg!(miri) { 40 } else { 4000 };
        let mut live = Live::default();
        for block in 1..=blocks {
            live.insert(key(block * 512), numbered(block));
        }
        assert_eq!(live.suspect_until(blocks + 1), []);
        assert_eq!(live.suspects, usize::try_from(blocks).unwrap());
        // Freed, freed in vain, replaced, or gone with their context.
        for block in 1..=blocks {
            live.check_suspects();
            let (key, number) = (key(block * 512), blocks + 10 + block);
            match block % 4 {
                0 => assert_eq!(live.remove(key), Some(numbered(block))),
                1 => {
                    let freed = live.remove(key).unwrap();
                    assert_eq!(live.insert(key, freed), None);
                    assert_eq!(live.insert(key, numbered(number)), Some(freed));
                }
                2 => assert_eq!(live.insert(key, numbered(number)), Some(numbered(block))),
                _ => assert_eq!(drain(&mut live, |entry| entry.number() == block), [numbered(block)]),
            }
        }
        assert_eq!((live.suspects, live.frees_may_be_missing), (0, false));
        // What is left came after the loss, until the next one.
        let left = all(&live);
        assert_eq!(live.suspect_until(3 * blocks), []);
        assert_eq!((live.suspects, all(&live)), (left, left));
        live.check_suspects();
    }

    #[test]
    fn blocks_that_come_while_frees_are_missed_are_suspects_too() {
        let mut live = Live::default();
        assert_eq!(live.suspect_until(u64::MAX), []);
        for round in 1..=3 {
            for block in 1..=600 {
                let missed = live.insert(key(block * 512), numbered(round * 1000 + block));
                assert_eq!(missed, (round > 1).then(|| numbered((round - 1) * 1000 + block)));
            }
            live.check_suspects();
        }
        assert_eq!(live.suspect_until(5000), []);
        live.insert(key(1 << 40), numbered(5001));
        assert_eq!(live.suspects, 600);
        assert!((1..=600).all(|block| live.remove(key(block * 512)).is_some()));
        assert!(!live.frees_may_be_missing);
    }

    #[test]
    fn few_keys_look_like_those_of_blocks_that_stay() {
        let mut live = Live::default();
        (1..=500).for_each(|block| assert_eq!(live.insert(key(block << 20), numbered(block)), None));
        live.suspect_until(1000);
        let looked = (1..=10_000).filter(|block| {
            let key = key((1 << 40) + block * 512);
            live.shard(key).may_suspect(key, 1000)
        });
        assert!(looked.count() < 200, "of 10,000");
        assert!((1..=500).all(|block| live.insert(key(block << 20), numbered(2000)) == Some(numbered(block))));
        assert!(!live.frees_may_be_missing);
    }

    #[test]
    fn a_million_blocks_take_little_room_and_lie_evenly() {
        let blocks = if cfg!(miri) { 20_000 } else { 1_000_000 };
        let mut live = Live::default();
        for block in 0..blocks as u64 {
            live.insert(key(0x7000_0000_0000 + block * 512), entry(512));
        }
        let sizes: Vec<_> = live.shards.iter().map(|shard| shard.blocks.len()).collect();
        assert!(*sizes.iter().max().unwrap() < 2 * blocks / SHARDS, "{sizes:?}");
        // A table has room for 7 entries in 8 places, each with a byte of its own.
        let places: usize = live.shards.iter().map(|shard| (shard.blocks.capacity() * 8).div_ceil(7)).sum();
        let room = places * (size_of::<(Key, Entry)>() + 1);
        assert!(room <= 80 * blocks, "{} bytes for each block", room / blocks);
    }
}
