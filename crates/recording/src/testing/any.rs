//! Generates random items of all kinds. Ids are often equal, and event numbers increase, so that a reader accepts most items.

use std::time::Duration;

use crate::{AllocatorEvent, AllocatorEvents, Finished, Item, RecordedEvent, Writer};
use gpumem_core::model::{
    Bytes, CallsiteId, Device, EventKind, GpuMemory, Key, PoolId, ScopeId, StackId, ThreadId, ThreadName, Threads,
};

use super::Random;

/// A type with random values. The macros that write and read types implement it for most of them.
pub(crate) trait Any: Sized {
    fn any(random: &mut Random) -> Self;
}

macro_rules! values {
    ($($type:ty as $random:ident => $value:expr;)*) => {$(
        impl Any for $type {
            fn any($random: &mut Random) -> Self {
                $value
            }
        }
    )*};
}

impl<T: Any> Any for Option<T> {
    fn any(random: &mut Random) -> Self {
        random.option(T::any)
    }
}

impl<T: Any> Any for Vec<T> {
    fn any(random: &mut Random) -> Self {
        random.list(T::any)
    }
}

values! {
    bool as random => random.is(2);
    u8 as random => (random.any() & 0xff) as u8;
    CallsiteId as random => CallsiteId(random.few());
    ScopeId as random => ScopeId(random.few().into());
    StackId as random => StackId(random.few());
    PoolId as random => PoolId(Any::any(random));
    ThreadId as random => ThreadId(random.few());
    Device as random => Device { family: Any::any(random), ordinal: random.few() };
    u32 as random => random.small();
    u64 as random => random.any();
    usize as random => usize::try_from(random.any()).unwrap_or(7);
    String as random => random.text();
    Duration as random => Duration::from_nanos(random.any());
    Bytes as random => Bytes::new(random.any());
    Key as random => Key::from_raw(if random.is(4) { random.any() } else { random.below(40) << 20 });
    GpuMemory as random => GpuMemory::new(Any::any(random), Any::any(random), Any::any(random), Any::any(random));
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
    ThreadName as random => ThreadName::new(random.text().as_bytes());
    Threads as random => Option::any(random).map_or(Threads::Unscoped, Threads::Named);
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
