//! This target takes the bytes of a whole recording, or of its items, which get a record with a correct checksum. It reads the
//! recording and makes every report.

#![no_main]

use std::io::Cursor;

use gpumem_recording::{
    Item, Reader, VERSION,
    testing::{Random, items, written},
};
use libfuzzer_sys::fuzz_target;

mod seeds;

/// The first bytes of a file.
const MAGIC: &[u8] = b"\x89gpumem\n";
/// The lengths of the headers of a file and of a record.
const HEADER: usize = 16;
const RECORD: usize = 16;

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let made;
    let file = if data.starts_with(MAGIC) {
        data
    } else {
        made = file_of(data);
        &made
    };
    let Ok(mut reader) = Reader::new(Cursor::new(file)) else { return };
    while reader.step().expect("memory can be read").is_some() {}
    for stats in reader.ledger().stats() {
        drop(reader.device_peak(stats.device));
    }
    drop(reader.summary().map(|summary| summary.to_string()));
    assert!(reader.end().is_some());
});

/// Makes a file whose records contain these bytes.
fn file_of(items: &[u8]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.resize(HEADER, 0);
    for items in items.chunks(1 << 20) {
        let length = u32::try_from(items.len()).expect("a chunk is short").to_le_bytes();
        let mut header = vec![1, 0, 0, 0];
        header.extend_from_slice(&length);
        header.extend_from_slice(&length);
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&header);
        checksum.update(items);
        header.extend_from_slice(&checksum.finalize().to_le_bytes());
        file.extend_from_slice(&header);
        file.extend_from_slice(items);
    }
    file
}

fn write_seeds() {
    let recordings = (1..=8).map(|seed| items(&mut Random::new(seed), 60));
    let both = |items: Vec<Item>| {
        let file = written(&items);
        [items_in(&file), file]
    };
    seeds::write("recordings", recordings.flat_map(both));
}

/// Returns the items of a file with one record.
fn items_in(file: &[u8]) -> Vec<u8> {
    let stored = &file[HEADER + RECORD..];
    if file[HEADER + 1] == 0 {
        stored.to_vec()
    } else {
        miniz_oxide::inflate::decompress_to_vec(stored).expect("it was compressed")
    }
}
