//! Joins the two parts of a recording. With `--max-size`, a recording that keeps the latest events is in two files
//! while the program runs.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

use gpumem_recording::{Interception, Item, Writer, for_each_item, new_path, old_path};

use crate::files;

/// Puts the older part of a recording before the newer one, if there are two. Both are complete.
pub(super) fn join(recording: &Path) -> io::Result<()> {
    let (old, new) = (old_path(recording), new_path(recording));
    if is_same_file(&old, recording) {
        // The process was killed before the newer part got the recording's name, so both names refer to the same file.
        fs::remove_file(&old)?;
    } else if old.exists() {
        let read = |path: &Path| Ok::<_, io::Error>(BufReader::new(files::open_to_read(path)?));
        let mut join = Join::default();
        // The existing file is removed without opening it, because it may be a pipe.
        _ = fs::remove_file(&new);
        let mut writer = Writer::new(BufWriter::new(File::options().write(true).create_new(true).open(&new)?))?;
        for_each_item(read(&old)?, |item| {
            writer.write(&item)?;
            join.older(item);
            Ok(())
        })?;
        for_each_item(read(recording)?, |item| if join.follows(&item) { writer.write(&item) } else { Ok(()) })?;
        writer.finish()?.flush()?;
        fs::rename(&new, recording)?;
        fs::remove_file(&old)?;
    }
    // Remove the new file that a killed process did not finish.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|known| (known.dev(), known.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// Decides which items of the newer part are written.
#[derive(Default)]
struct Join {
    /// The newer part starts with the blocks that were live after the event with this number.
    after: Option<u64>,
    /// True while the items of the newer part are in its list of live blocks, which repeats the older part.
    is_in_list: bool,
    /// The latest clock value of the older part.
    ticks: Option<u64>,
    /// The sources of the older part.
    sources: HashSet<String>,
}

impl Join {
    fn older(&mut self, item: Item) {
        match item {
            Item::Clock(pair) => self.ticks = self.ticks.max(Some(pair.ticks)),
            Item::Interception(by) => _ = self.sources.insert(source(&by)),
            _ => {}
        }
    }

    /// Returns whether an item of the newer part is missing in the older one. The newer part starts with the live
    /// blocks.
    fn follows(&mut self, item: &Item) -> bool {
        match item {
            Item::Process(_) | Item::Inside(_) | Item::PoolBlock(_) => false,
            Item::Part(part) => {
                self.after.get_or_insert(part.after);
                self.is_in_list = true;
                false
            }
            Item::Totals(_) => {
                self.is_in_list = false;
                false
            }
            // In the list, `missed` contains the sum of the older part.
            Item::ThreadReused(_) | Item::Missed(_) => !self.is_in_list,
            Item::Event(event) => Some(event.number) > self.after,
            Item::Clock(pair) => self.ticks < Some(pair.ticks),
            // Sources that are in both parts would appear twice.
            Item::Interception(by) => !self.sources.contains(&source(by)),
            _ => true,
        }
    }
}

fn source(by: &Interception) -> String {
    format!("{} {}", by.source.name(), by.library)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpumem_core::model::{EventKind, ThreadId};
    use gpumem_recording::{PartDefinition, RecordedEvent, Totals, items_of};

    use super::*;

    /// The newer part starts with the sum of what the older one missed.
    #[test]
    fn what_was_missed_counts_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missed.capture");
        let write = |path: &Path, items: &[Item]| {
            let mut writer = Writer::new(File::create(path).unwrap()).unwrap();
            for item in items {
                writer.write(item).unwrap();
            }
            writer.finish().unwrap();
        };
        write(&old_path(&path), &[Item::Missed(3), Item::Missed(4)]);
        let part = Item::Part(PartDefinition { is_peaks: false, after: 9 });
        write(&path, &[part, Item::Missed(7), Item::Totals(Totals::default()), Item::Missed(4)]);
        join(&path).unwrap();
        let (items, _) = items_of(File::open(&path).unwrap()).unwrap();
        assert_eq!(items, [Item::Missed(3), Item::Missed(4), Item::Missed(4)]);
    }

    /// The process is killed while a new file replaces the recording.
    #[test]
    fn a_recording_whose_older_part_is_itself_is_kept_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("parts.capture");
        let mut writer = Writer::new(File::create(&path).unwrap()).unwrap();
        for number in 1..=3 {
            let (time, thread, kind) = (Duration::ZERO, ThreadId(1), EventKind::Lost { count: number });
            writer.write_event(&RecordedEvent { number, ticks: number, time, thread, kind }).unwrap();
        }
        writer.finish().unwrap();
        let items = items_of(File::open(&path).unwrap()).unwrap();
        fs::hard_link(&path, old_path(&path)).unwrap();
        fs::write(new_path(&path), "the beginning of a newer part").unwrap();
        join(&path).unwrap();
        assert_eq!(items_of(File::open(&path).unwrap()).unwrap(), items);
        assert!(!old_path(&path).exists() && !new_path(&path).exists());
    }
}
