//! Tests of the removal of allocation groups.

use super::*;

#[test]
fn a_group_with_live_blocks_is_kept_even_if_it_is_the_latest() {
    let mut ledger = Ledger::default();
    let device = Device { family: Family::Cuda, ordinal: 0 };
    for number in 1..5000 {
        // Each block has a different stack.
        let stack = StackId(u32::try_from(number).unwrap());
        let tag = Tag::new(device, MemKind::Device, 0, stack);
        ledger.alloc(Key::new(Space::Address, number), Bytes::new(1), tag, number, ThreadId(1));
    }
    let blocks: Vec<_> = ledger.groups().iter().map(|live| live.blocks).collect();
    assert!(blocks.len() == 4999 && blocks.iter().all(|blocks| *blocks == 1), "{} groups", blocks.len());
}

#[test]
fn groups_without_live_blocks_are_forgotten() {
    let mut runner = Runner::default();
    runner.line("alloc kept 1");
    for thread in 1..20_000 {
        runner.lines(&format!("alloc x 1 %{thread}; free x %{thread}"));
    }
    runner.lines("free_failed %19999; free x; free kept");
    assert!(runner.ledger.groups().is_empty());
    assert_eq!(runner.ledger.sums().stats()[0].on_device.bytes.current, 0);
    assert_eq!(runner.ledger.sums().counts().untracked, 0);
}

/// A thread reuses the group of its latest allocation without a lookup.
#[test]
fn the_latest_group_of_a_thread_is_not_forgotten() {
    let mut ledger = Ledger::default();
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let alloc = |ledger: &mut Ledger, name: u64, stack: u32, thread: u32| {
        let (key, tag) = (Key::new(Space::Address, name), Tag::new(device, MemKind::Device, 0, StackId(stack)));
        // The highest peak must come later, because the groups of its blocks are kept as well.
        ledger.alloc(key, Bytes::new(stack.into()), tag, 1, ThreadId(thread));
        key
    };
    // The group of the block that thread 2 freed last is kept as well, so it must be in another group.
    let (other, latest) = (alloc(&mut ledger, 1, 2, 2), alloc(&mut ledger, 2, 1, 2));
    ledger.free(latest, None, ThreadId(2));
    ledger.free(other, None, ThreadId(2));
    for stack in 3..20_000 {
        let key = alloc(&mut ledger, 3, stack, 1);
        ledger.free(key, None, ThreadId(1));
    }
    let key = alloc(&mut ledger, 4, 1, 2);
    assert_eq!(ledger.block(key).map(|block| block.group.stack), Some(StackId(1)));
}

/// A sweep checks only a few groups, because other threads wait. Nevertheless, there are never many more groups than
/// needed.
#[test]
fn groups_are_forgotten_in_parts() {
    let (kept, all) = (6_000, 60_000);
    let mut ledger = Ledger::default();
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let mut most = 0;
    for number in 1..all {
        let tag = Tag::new(device, MemKind::Device, 0, StackId(number));
        // Some blocks are not freed, spread over all groups.
        let (key, is_kept) = (Key::new(Space::Address, number.into()), number.is_multiple_of(all / kept));
        ledger.alloc(key, Bytes::new(1), tag, number.into(), ThreadId(1));
        if !is_kept {
            ledger.free(key, None, ThreadId(1));
        }
        most = ledger.sums.groups.numbers().max(most);
    }
    let live: Vec<_> = ledger.groups().iter().map(|live| live.group.stack.0).collect();
    assert_eq!(live.len(), all as usize / (all / kept) as usize - 1);
    assert!(live.iter().all(|stack| stack.is_multiple_of(all / kept)));
    assert!(most < 3 * kept as usize + 5_000, "{most} numbers");
}
