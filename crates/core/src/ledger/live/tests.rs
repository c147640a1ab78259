use super::super::groups::GroupId;
use super::{hash::upper_bits, *};
use crate::model::{OwnerThread, Space, Time};

fn entry(bytes: u64) -> Entry {
    Entry::new(Bytes::new(bytes), 1, 0, Attribution::new(OwnerThread(1), GroupId(1)))
}

fn key(address: u64) -> Key {
    Key::new(Space::Address, address)
}

/// Another key with the same slot in the front cache.
fn same_slot(of: Key) -> Key {
    (1..10_000).map(|at| key(of.get() + at * 512)).find(|other| upper_bits(*other) == upper_bits(of)).unwrap()
}

fn drain(live: &mut LiveBlocks, is_removed: impl Fn(&Entry) -> bool) -> Vec<Entry> {
    (0..BLOCK_PARTS).flat_map(|part| live.drain(part, &is_removed)).map(|(_, entry)| entry).collect()
}

fn all(live: &LiveBlocks) -> usize {
    (0..BLOCK_PARTS).map(|part| live.part(part).count()).sum()
}

#[test]
fn an_entry_keeps_all_its_parts() {
    let (thread, group) = (OwnerThread(u32::MAX - 1), GroupId(0x00ab_cdef));
    let of = |time| Entry::new(Bytes::new(u64::MAX), 0x1234_5678_9abc, tenths(time), Attribution::new(thread, group));
    let entry = of(Time::from_millis(123_456));
    assert_eq!((entry.attribution().owner(), entry.group(), entry.number()), (thread, group, 0x1234_5678_9abc));
    assert_eq!((entry.bytes.get(), entry.time()), (u64::MAX, Time::from_millis(123_400)));
    assert_eq!(of(Time::from_secs(1 << 40)).time(), Time::from_millis(((1 << 24) - 1) * 100));
}

#[test]
fn blocks_are_found_once() {
    let mut live = LiveBlocks::default();
    assert_eq!(live.remove(Key::NONE), None, "an empty slot is no block");
    assert_eq!(live.insert(key(512), entry(1)), None);
    assert_eq!(live.insert(key(512), entry(2)), Some((key(512), entry(1))));
    assert_eq!(live.insert(Key::new(Space::Handle, 512), entry(3)), None, "a handle is no address");
    assert_eq!(all(&live), 2);
    assert_eq!(live.remove(key(512)), Some(entry(2)));
    assert_eq!(live.remove(key(512)), None);
    assert_eq!(drain(&mut live, |entry| entry.bytes == 3), [entry(3)]);
    assert_eq!(all(&live), 0);
}

#[test]
fn a_block_whose_free_was_missed_is_returned_later() {
    let (a, b) = (key(512), same_slot(key(512)));
    for frees_may_be_missing in [false, true] {
        let mut live = LiveBlocks::default();
        live.insert(a, entry(1));
        live.insert(b, entry(2));
        if frees_may_be_missing {
            assert_eq!(live.frees_missed_until(1), []);
        }
        let at_once = live.insert(a, entry(3));
        let later = live.insert(b, entry(4));
        let replaced: Vec<_> = [at_once, later].into_iter().flatten().map(|(_, entry)| entry.bytes.get()).collect();
        assert!(replaced.contains(&1), "frees_may_be_missing: {frees_may_be_missing}, {replaced:?}");
        assert_eq!(at_once.is_some(), frees_may_be_missing);
    }
}

impl LiveBlocks {
    /// Compares the counts with recomputed ones.
    fn check_possibly_freed(&self) {
        for shard in &self.shards {
            let is_possibly_freed = |entry: &Entry| entry.number() <= self.lost_at;
            assert_eq!(shard.possibly_freed, shard.blocks.values().filter(|entry| is_possibly_freed(entry)).count());
        }
        assert_eq!(self.possibly_freed, self.shards.iter().map(|shard| shard.possibly_freed).sum::<usize>());
        assert_eq!(self.frees_may_be_missing, self.possibly_freed > 0);
    }
}

fn numbered(number: u64) -> Entry {
    Entry::new(Bytes::new(number), number, 0, Attribution::new(OwnerThread(1), GroupId(1)))
}

#[test]
fn no_free_is_missing_when_the_last_block_from_before_the_loss_is_gone() {
    let blocks = 4000;
    let mut live = LiveBlocks::default();
    for block in 1..=blocks {
        live.insert(key(block * 512), numbered(block));
    }
    assert_eq!(live.frees_missed_until(blocks + 1), []);
    assert_eq!(live.possibly_freed, usize::try_from(blocks).unwrap());
    // The blocks are freed, freed by a call that failed, replaced, or removed with their context.
    for block in 1..=blocks {
        live.check_possibly_freed();
        let (key, number) = (key(block * 512), blocks + 10 + block);
        match block % 4 {
            0 => assert_eq!(live.remove(key), Some(numbered(block))),
            1 => {
                let freed = live.remove(key).unwrap();
                assert_eq!(live.insert(key, freed), None);
                assert_eq!(live.insert(key, numbered(number)), Some((key, freed)));
            }
            2 => assert_eq!(live.insert(key, numbered(number)), Some((key, numbered(block)))),
            _ => assert_eq!(drain(&mut live, |entry| entry.number() == block), [numbered(block)]),
        }
    }
    assert_eq!((live.possibly_freed, live.frees_may_be_missing), (0, false));
    // The remaining blocks are newer than the loss, but older than the next one.
    let left = all(&live);
    assert_eq!(live.frees_missed_until(3 * blocks), []);
    assert_eq!((live.possibly_freed, all(&live)), (left, left));
    live.check_possibly_freed();
}

#[test]
fn the_filter_excludes_most_keys() {
    let mut live = LiveBlocks::default();
    (1..=500).for_each(|block| assert_eq!(live.insert(key(block << 20), numbered(block)), None));
    live.frees_missed_until(1000);
    let matches = (1..=10_000).filter(|block| {
        let key = key((1 << 40) + block * 512);
        live.shard(key).may_be_freed(key, 1000)
    });
    assert!(matches.count() < 200, "of 10,000");
    assert!(
        (1..=500)
            .all(|block| live.insert(key(block << 20), numbered(2000)) == Some((key(block << 20), numbered(block))))
    );
    assert!(!live.frees_may_be_missing);
}

#[test]
fn a_million_blocks_take_little_memory_and_their_tables_do_not_grow_at_once() {
    let blocks = 1_000_000;
    let mut live = LiveBlocks::default();
    for block in 0..blocks as u64 {
        live.insert(key(0x7000_0000_0000 + block * 512), entry(512));
    }
    let sizes: Vec<_> = live.shards.iter().map(|shard| shard.blocks.len()).collect();
    let (fewest, most) = (*sizes.iter().min().unwrap(), *sizes.iter().max().unwrap());
    assert!(most < 2 * blocks / SHARDS && fewest * 3 / 2 < most, "{sizes:?}");
    // A table fills at most 7 of 8 slots, and each slot has one more byte.
    let slots: usize = live.shards.iter().map(|shard| (shard.blocks.capacity() * 8).div_ceil(7)).sum();
    let size = slots * (size_of::<(Key, Entry)>() + 1);
    assert!(size <= 64 * blocks, "{} bytes for each block", size / blocks);
}
