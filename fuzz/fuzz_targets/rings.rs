//! This target takes the ring of a killed program. Its readable content is added to a recording, which is read.

#![no_main]

use std::{io::Cursor, sync::atomic::Ordering::Relaxed};

use gpumem_core::model::Event;
use gpumem_recording::{
    Item, Reader, RingReader, Writer, on_the_heap, ring,
    testing::{Random, items},
};
use libfuzzer_sys::fuzz_target;

mod seeds;

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let Some(content) = RingReader::from_bytes(data) else { return };
    let mut writer = Writer::new(Vec::new()).expect("memory can be written");
    for item in content.definitions.into_iter().chain(content.items) {
        writer.write(&item).expect("memory can be written");
    }
    let file = writer.finish().expect("memory can be written");
    let mut reader = Reader::new(Cursor::new(file)).expect("it is a recording");
    while reader.step().expect("memory can be read").is_some() {}
    assert!(reader.end().is_some());
});

/// Writes rings that are filled by recordings, some of them more than once.
fn write_seeds() {
    const SLOTS: usize = 32;
    let filled = |seed| {
        let (mut writer, mut reader) = ring(on_the_heap(SLOTS), 11, 500);
        let mut definitions = writer.definitions();
        for item in items(&mut Random::new(seed), 40) {
            match &item {
                Item::Event(event) => {
                    let event_of =
                        Event { number: event.number, time: event.time, thread: event.thread, kind: &event.kind };
                    writer.event(&event_of, event.ticks);
                }
                Item::Stack(_) | Item::Module(_) => drop(definitions.add(&[item])),
                _ => writer.item(&item),
            }
            if seed % 2 == 0 && reader.next().is_some() {
                reader.release(500);
            }
        }
        reader.words().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect()
    };
    seeds::write("rings", (1..=8).map(filled));
}
