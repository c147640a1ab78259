//! Tests that observers learn everything the ledger knows about blocks.

use std::collections::BTreeMap;

use super::*;
use crate::model::Time;

/// The knowledge of an observer: the key and the size of each live block, by the number of the event that allocated it.
fn follow(known: &mut BTreeMap<u64, (Key, Bytes)>, change: &BlockChange) {
    let BlockChange { kind, key, number, before, after, .. } = *change;
    let was = known.get(&number).copied();
    assert_eq!(was.map(|(_, bytes)| bytes), (kind.blocks() <= 0).then_some(before), "{change:?}");
    assert!(was.is_none_or(|(was, _)| was == key), "{change:?}");
    if kind.blocks() < 0 {
        assert_eq!(after, Bytes::ZERO);
        known.remove(&number);
    } else {
        known.insert(number, (key, after));
    }
}

#[test]
fn what_observers_are_told_is_what_is_live() {
    for seed in 1..20 {
        let mut random = numbers(seed);
        let (mut ledger, mut observed) = (Ledger::default(), Ledger::default());
        let (mut known, mut changes) = (BTreeMap::new(), Vec::new());
        let mut seen = BTreeMap::new();
        for number in 1..500 {
            // There are few keys, so many are reused while their block is still live.
            let key = Key::from_raw((1 + random(40)) << 12);
            let kind = match random(20) {
                0..9 => {
                    let device = Device { family: Family::Cuda, ordinal: 0 };
                    let block = Block::new(device, Bytes::new(random(1000)), MemKind::Device);
                    let block = Block { context: 1 + u8::try_from(random(2)).unwrap(), ..block };
                    EventKind::Alloc { key, block }
                }
                9..15 => EventKind::Free { key, block: None },
                15 => EventKind::FreeFailed,
                16 => {
                    let bytes = ledger.block(key).map_or(0, |live| live.bytes.get() / 2);
                    EventKind::Shrink { key, bytes: Bytes::new(bytes) }
                }
                17 => EventKind::Lost { count: 1 },
                18 if random(8) == 0 => EventKind::ContextDestroyed { context: 1 },
                _ => EventKind::Displaced { now: random(2), more: 0 },
            };
            let thread = ThreadId(1 + u32::try_from(random(2)).unwrap());
            let event = Event { number, time: Time::ZERO, thread, kind: &kind };
            observed.apply_observed(&event, &mut changes);
            ledger.apply(&event);
            for change in changes.drain(..) {
                *seen.entry(change.kind.name()).or_insert(0) += 1;
                follow(&mut known, &change);
            }
            if number % 20 > 0 {
                continue;
            }
            let live = |ledger: &Ledger| {
                let blocks = (0..BLOCK_PARTS).flat_map(|part| ledger.blocks(part, None)).collect::<Vec<_>>();
                blocks.into_iter().map(|block| (block.number, (block.key, block.bytes))).collect::<BTreeMap<_, _>>()
            };
            assert_eq!((live(&observed), live(&ledger)), (known.clone(), known.clone()), "seed {seed}: {kind:?}");
        }
        assert!(seen.len() >= 5, "{seen:?}");
    }
}
