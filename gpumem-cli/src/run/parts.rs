//! `--max-size`: the recording of the newest events is in two files while the program runs.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

use gpumem_core::capture::{Item, Writer, items_of, new_path, old_path};

use crate::files;

/// Puts the older part of a recording before the newer one, if there are two. Both are complete.
pub(super) fn join(recording: &Path) -> io::Result<()> {
    let (old, new) = (old_path(recording), new_path(recording));
    if is_same_file(&old, recording) {
        // The process was killed before the newer part was there under this name.
        fs::remove_file(&old)?;
    } else if old.exists() {
        let read = |path: &Path| Ok::<_, io::Error>(items_of(BufReader::new(files::open_to_read(path)?))?.0);
        let (older, newer) = (read(&old)?, read(recording)?);
        // What lies there is not opened: it may be a pipe.
        _ = fs::remove_file(&new);
        let mut writer = Writer::new(BufWriter::new(File::options().write(true).create_new(true).open(&new)?))?;
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

fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|known| (known.dev(), known.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
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

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, time::Duration};

    use gpumem_core::{
        capture::RecordedEvent,
        model::{EventKind, ThreadId},
    };

    use super::*;

    /// A process that is killed while a new file takes the place of the recording.
    #[test]
    fn a_recording_whose_older_part_is_itself_is_kept_as_it_is() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/tmp");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("parts-{}.capture", std::process::id()));
        let mut writer = Writer::new(File::create(&path).unwrap()).unwrap();
        for number in 1..=3 {
            let (time, thread, kind) = (Duration::ZERO, ThreadId(1), EventKind::Lost { count: number });
            writer.write_event(&RecordedEvent { number, ticks: number, time, thread, kind }).unwrap();
        }
        writer.finish().unwrap();
        let items = items_of(File::open(&path).unwrap()).unwrap();
        _ = fs::remove_file(old_path(&path));
        fs::hard_link(&path, old_path(&path)).unwrap();
        fs::write(new_path(&path), "the beginning of a newer part").unwrap();
        join(&path).unwrap();
        assert_eq!(items_of(File::open(&path).unwrap()).unwrap(), items);
        assert!(!old_path(&path).exists() && !new_path(&path).exists());
        fs::remove_file(path).unwrap();
    }
}
