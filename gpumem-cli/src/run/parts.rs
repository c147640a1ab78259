//! `--max-size`: the recording of the newest events is in two files while the program runs.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write},
    path::Path,
};

use gpumem_core::capture::{Item, Writer, items_of, new_path, old_path};

/// Puts the older part of a recording before the newer one, if there are two. Both are complete.
pub(super) fn join(recording: &Path) -> io::Result<()> {
    let (old, new) = (old_path(recording), new_path(recording));
    if old.exists() {
        let read = |path: &Path| Ok::<_, io::Error>(items_of(BufReader::new(File::open(path)?))?.0);
        let (older, newer) = (read(&old)?, read(recording)?);
        let mut writer = Writer::new(BufWriter::new(File::create(&new)?))?;
        for item in older.iter().chain(newer.iter().filter(|item| follows(item, &older, &newer))) {
            writer.write(item)?;
        }
        writer.finish()?.flush()?;
        fs::rename(&new, recording)?;
        fs::remove_file(&old)?;
    }
    // What a killed process has not finished.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether an item of the newer part is not in the older one. The newer part begins with what was live.
fn follows(item: &Item, older: &[Item], newer: &[Item]) -> bool {
    let after = newer.iter().find_map(|item| match item {
        Item::Part(part) => Some(part.after),
        _ => None,
    });
    match item {
        Item::Process(_) | Item::Part(_) => false,
        Item::Event(event) => Some(event.number) > after,
        Item::Clock(pair) => !older.iter().any(|item| matches!(item, Item::Clock(known) if known.ticks >= pair.ticks)),
        // Counts and sources of both parts would be there twice.
        Item::Missed(_) | Item::Interception(_) => !older.contains(item),
        _ => true,
    }
}
