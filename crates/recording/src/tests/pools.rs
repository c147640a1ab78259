//! Tests the reading of pools from incomplete recordings.

use std::io::Cursor;

use crate::{Item, PartDefinition, PoolBlock, Reader};
use gpumem_core::{
    ledger::KnownPool,
    model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, PoolId},
};

use super::hostile::event;
use crate::testing::written;

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };
const POOL: PoolId = PoolId(1);

fn registered(number: u64) -> Item {
    event(number, EventKind::PoolRegistered { pool: POOL, device: DEVICE })
}

fn alloc(number: u64, bytes: u64) -> Item {
    let block = Block::new(DEVICE, Bytes::new(bytes), MemKind::Device);
    event(number, EventKind::Alloc { key: Key::from_raw(4096), block })
}

fn part(number: u64, bytes: u64) -> Item {
    let block = Block { context: POOL.0, ..Block::new(DEVICE, Bytes::new(bytes), MemKind::Part) };
    event(number, EventKind::Alloc { key: Key::of_part(POOL, 4096), block })
}

/// Returns the pool, and the sum of the ledger's changes to blocks in the program's view.
fn read(items: &[Item]) -> (KnownPool, u64) {
    let mut reader = Reader::new(Cursor::new(written(items))).unwrap();
    let mut changes = Vec::new();
    while reader.step_observed(&mut changes).unwrap().is_some() {}
    assert_eq!((reader.skipped().contradictions, reader.skipped().above_limits), (0, 0));
    let of_program = changes.iter().filter(|change| change.group.is_in_program());
    (reader.ledger().pools()[0], of_program.map(|change| change.after.get()).sum())
}

#[test]
fn a_free_after_missed_items_is_not_wrong() {
    let free = event(101, EventKind::Free { key: Key::of_part(POOL, 64), block: None });
    let (pool, _) = read(&[registered(7), free.clone()]);
    assert_eq!(pool.wrong.unknown, 1);
    let (pool, _) = read(&[registered(7), Item::Missed(3), free.clone()]);
    assert_eq!(pool.wrong.unknown, 0);
    // A shortened recording does not contain when items were missed, only that it was before its latest events.
    let shortened = Item::Part(PartDefinition { is_peaks: false, after: 100 });
    let (pool, _) = read(&[shortened.clone(), Item::Missed(3), registered(7), free]);
    assert_eq!(pool.wrong.unknown, 0);
    // It also lacks the events that decide the owner of a block.
    let (pool, _) = read(&[shortened, registered(7), alloc(8, 512), event(9, EventKind::PoolsQueried), part(10, 128)]);
    assert_eq!((pool.wrong.late, pool.block_bytes), (0, Bytes::new(512)));
}

#[test]
fn a_block_of_a_shortened_recording_is_whose_the_recording_says() {
    let shortened = Item::Part(PartDefinition { is_peaks: false, after: 100 });
    for (of, block_bytes, of_program) in [(POOL, 512, 0), (PoolId(2), 0, 512), (PoolId(255), 0, 512)] {
        let owner = Item::PoolBlock(PoolBlock { number: 8, pool: of });
        let (pool, told) = read(&[shortened.clone(), registered(7), owner, alloc(8, 512)]);
        assert_eq!((pool.block_bytes.get(), told), (block_bytes, of_program), "{of:?}");
    }
    let (pool, told) = read(&[shortened, alloc(6, 512), registered(7)]);
    assert_eq!((pool.block_bytes.get(), told), (0, 512));
}

#[test]
fn the_last_block_is_the_programs_if_nothing_says_that_it_is_a_pools() {
    let (pool, of_program) = read(&[registered(1), alloc(2, 512)]);
    assert_eq!((pool.block_bytes, of_program), (Bytes::ZERO, 512));
    let (pool, of_program) = read(&[registered(1), alloc(2, 512), part(3, 128)]);
    assert_eq!((pool.block_bytes, of_program), (Bytes::new(512), 128));
}

/// The blocks of the closed pool are freed after its id was reused.
#[test]
fn a_pool_may_have_the_id_of_one_whose_frees_were_missed() {
    let free = |number, key| event(number, EventKind::Free { key, block: None });
    let items = [registered(1), alloc(2, 512), part(3, 128), Item::Missed(4), registered(8)];
    let (pool, _) = read(&items);
    assert_eq!((pool.parts, pool.block_bytes.get()), (1, 512));
    let frees = [free(9, Key::of_part(POOL, 4096)), free(10, Key::from_raw(4096))];
    let (pool, _) = read(&[&items[..], &frees].concat());
    assert_eq!((pool.parts, pool.part_bytes.get(), pool.block_bytes.get()), (0, 0, 0));
}

#[test]
fn sizes_larger_than_any_device_are_wrong_calls_and_can_be_read() {
    let reserved = event(4, EventKind::PoolReserved { pool: POOL, bytes: Bytes::new(u64::MAX) });
    let (pool, _) = read(&[registered(1), alloc(2, 512), part(3, u64::MAX), reserved]);
    assert_eq!((pool.wrong.outside, pool.parts, pool.reserved), (2, 0, Bytes::ZERO));
}
