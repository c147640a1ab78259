//! Tests that written items are read back.

use std::{io::Cursor, time::Duration};

use crate::{CallsiteDefinition, End, Item, Process, Reader, RecordedEvent, Writer, items_of};
use gpumem_core::{
    derive::Names,
    model::{Block, Bytes, CallsiteId, Device, EventKind, Family, Key, MemKind, StackId, ThreadId},
};

use crate::testing::{Random, items, written};

#[test]
fn random_items_are_read_back() {
    for seed in 1..=30 {
        let items = items(&mut Random::new(seed), 3_000);
        let file = written(&items);
        let (read, end) = items_of(Cursor::new(file)).unwrap();
        assert_eq!(end, End::Complete);
        assert_eq!(read.len(), items.len());
        for (read, item) in read.iter().zip(&items) {
            assert_eq!(read, item, "seed {seed}");
        }
    }
}

/// Items are read back after any other items, and at any record boundary.
#[test]
fn each_flush_makes_a_record_that_can_be_read_by_itself() {
    let items = items(&mut Random::new(7), 500);
    let mut writer = Writer::new(Vec::new()).unwrap();
    for item in &items {
        writer.write(item).unwrap();
        writer.flush().unwrap();
    }
    assert_eq!(writer.written().records, 500);
    let (read, end) = items_of(Cursor::new(writer.finish().unwrap())).unwrap();
    assert_eq!((read, end), (items, End::Complete));
}

#[test]
fn an_item_that_is_too_long_is_left_out_and_counted() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    let arguments = vec!["x".repeat(10_000); 1_000];
    let long = Item::Process(Process { arguments, ..Process::default() });
    let short = Item::Missed(1);
    for item in [&short, &long, &short] {
        writer.write(item).unwrap();
    }
    assert_eq!((writer.written().items, writer.written().left_out), (2, 1));
    let (read, _) = items_of(Cursor::new(writer.finish().unwrap())).unwrap();
    assert_eq!(read, [short.clone(), short]);
}

/// The events resemble a training loop: blocks of a few sizes, by some threads, in a few places.
#[test]
fn an_event_takes_less_than_twelve_bytes() {
    const EVENTS: u64 = 200_000;
    let mut random = Random::new(3);
    let mut writer = Writer::new(Vec::new()).unwrap();
    let (mut live, mut ticks) = (Vec::new(), 1 << 40);
    for number in 1..=EVENTS {
        ticks += 500 + random.below(4_000);
        let kind = if live.len() > 100 || !live.is_empty() && random.is(2) {
            EventKind::Free { key: live.swap_remove(random.index(live.len())), block: None }
        } else {
            let key = Key::from_raw(0x7f12_3400_0000 + random.below(1 << 20) * 512);
            let bytes = Bytes::new([512, 4_096, 1 << 20, 37_748_736][random.index(4)] * (1 + random.below(16)));
            let device = Device { family: Family::Cuda, ordinal: 0 };
            let stack = StackId(u32::try_from(random.below(40)).unwrap());
            live.push(key);
            EventKind::Alloc { key, block: Block { device, bytes, kind: MemKind::Pool, context: 1, stack } }
        };
        let thread = ThreadId(1 + u32::try_from(random.below(16)).unwrap());
        writer.write_event(&RecordedEvent { number, ticks, time: Duration::ZERO, thread, kind }).unwrap();
    }
    writer.flush().unwrap();
    let bytes = writer.written().bytes;
    assert!(bytes < 12 * EVENTS, "{bytes} bytes for {EVENTS} events");
}

/// A reader detects a truncated text.
#[test]
fn texts_that_are_cut_end_in_a_mark_and_are_counted() {
    let name = |length: usize| "△".repeat(length / 3) + &"x".repeat(length % 3);
    let longest = 1 << 14;
    for (length, is_cut) in [(longest - 1, false), (longest, false), (longest + 1, true), (3 * longest, true)] {
        let callsite = CallsiteDefinition {
            id: CallsiteId(2),
            name: Some(name(length)),
            file: "a.rs".to_owned(),
            line: 1,
            column: 1,
            module_path: None,
        };
        let mut writer = Writer::new(Vec::new()).unwrap();
        writer.write(&Item::Callsite(callsite)).unwrap();
        let file = writer.finish().unwrap();
        let mut reader = Reader::new(Cursor::new(&file)).unwrap();
        while reader.step().unwrap().is_some() {}
        let read = reader.definitions().callsite(CallsiteId(2)).name.unwrap();
        assert_eq!(reader.skipped().cut_texts, u64::from(is_cut), "{length}");
        assert_eq!(reader.skipped().is_nothing(), !is_cut);
        let text = read.strip_suffix("… (cut)");
        assert_eq!(text.is_some(), is_cut, "{length}");
        assert!(name(length).starts_with(text.unwrap_or(&read)) && read.len() <= longest, "{length}");
        assert!(is_cut || read.len() == length);
    }
}
