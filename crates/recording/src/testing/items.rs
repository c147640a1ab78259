//! Random items of all kinds.

use super::{
    Random,
    any::{Any, values},
};
use crate::{AllocatorEvent, AllocatorEvents, Finished, Item, RecordedEvent, Writer};
use gpumem_core::model::{Bytes, EventKind, StackId};

values! {
    AllocatorEvents as random => {
        let mut events: Vec<AllocatorEvent> = (0..random.below(50)).map(|_| Any::any(random)).collect();
        // A list of which no group is known takes less space.
        if random.is(3) {
            for event in &mut events {
                event.group = 0;
            }
        }
        AllocatorEvents { device: Any::any(random), events }
    };
    AllocatorEvent as random => {
        // A reader rejects the whole list if one block or one stack id is too large.
        let [bytes, requested] = [(); 2].map(|()| Bytes::new(random.any() >> 20));
        AllocatorEvent {
            time: Any::any(random),
            action: Any::any(random),
            address: random.below(30) << 20,
            bytes,
            requested,
            stream: random.any(),
            stack: StackId(random.small() % 8),
            group: random.few(),
        }
    };
    Finished as random => Finished { ended: Any::any(random) };
}

/// Returns items of all kinds, with increasing event numbers.
pub fn items(random: &mut Random, count: usize) -> Vec<Item> {
    let mut number = 0_u64;
    let item = |random: &mut Random| match random.below(10) {
        0 => Any::any(random),
        2 if random.is(4) => Item::AllocatorEvents(Any::any(random)),
        _ => {
            number += if random.is(20) { 1 + random.below(1 << 40) } else { 1 };
            Item::Event(RecordedEvent {
                number,
                ticks: random.any(),
                time: Any::any(random),
                thread: Any::any(random),
                // Most events are allocations and frees.
                kind: match random.below(3) {
                    0 => EventKind::Alloc { key: Any::any(random), block: Any::any(random) },
                    1 => EventKind::Free { key: Any::any(random), block: None },
                    _ => Any::any(random),
                },
            })
        }
    };
    std::iter::repeat_with(|| ()).take(count).scan(item, |item, ()| Some(item(random))).collect()
}

/// Returns a recording of these items.
///
/// # Panics
/// Panics if an item cannot be written.
pub fn written(items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for item in items {
        match item {
            Item::Event(event) => writer.write_event(event).unwrap(),
            item => writer.write(item).unwrap(),
        }
    }
    writer.finish().unwrap()
}
