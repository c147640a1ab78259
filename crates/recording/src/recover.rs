//! Adds the ring of a killed process to its recording.

use std::{
    collections::HashSet,
    fs::{self, File, TryLockError},
    io::{self, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    budget::Budget,
    item::{CodeAddress, Finished, Item, ProcessEnd, RingDefinition},
    items::{Items, Next},
    record::{End, FILE_HEADER, Records},
    ring::{RingContent, RingReader, WHOLE_FILE},
    writer::Writer,
};
use gpumem_core::{model::StackId, regular_file};

/// The shared memory of this machine, which contains the rings.
pub trait Segments {
    /// Returns the content of a segment. `None` if there is no such segment.
    ///
    /// # Errors
    /// Returns an error if the segment cannot be read.
    fn read(&self, segment: u64) -> io::Result<Option<Segment>>;

    /// Removes a segment.
    fn remove(&self, segment: u64);
}

/// A segment of shared memory.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The content.
    pub bytes: Vec<u8>,
    /// The process that created the segment; `None` if it is not visible here.
    pub creator: Option<u32>,
    /// True if a process has it attached.
    pub is_in_use: bool,
    /// The second in which a process last detached it, since 1970. The kernel does this for a process that ends.
    pub detached: Option<Duration>,
}

/// Returns the path of the older part of a recording of the latest events.
pub fn old_path(recording: &Path) -> PathBuf {
    with(recording, ".old")
}

/// Returns the path of a new file that will replace a recording.
pub fn new_path(recording: &Path) -> PathBuf {
    with(recording, ".new")
}

fn with(recording: &Path, end: &str) -> PathBuf {
    let mut path = recording.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// A recording that its process no longer writes.
#[derive(Debug)]
pub struct Ended {
    /// The number of items that were moved from the ring of a killed process to the recording.
    pub added: u64,
    /// While held, no process can start a recording with this name.
    _lock: File,
}

/// A ring whose content is not in the recording yet.
struct Found {
    bytes: Vec<u8>,
    segment: u64,
    /// True if the process that fills it still runs.
    writer_runs: bool,
    detached: Option<Duration>,
}

impl Found {
    /// Returns the ring of a recording, if there is one.
    fn of(head: &Head, segments: &dyn Segments) -> io::Result<Option<Self>> {
        let Some(RingDefinition { segment: Some(segment), recording }) = head.ring else { return Ok(None) };
        let Some(Segment { bytes, creator, is_in_use, detached }) = segments.read(segment)? else { return Ok(None) };
        // The segment now belongs to another recording, or this version cannot read its ring.
        if RingReader::recording_in(&bytes) != Some(recording) {
            return Ok(None);
        }
        // A child that outlives the process keeps the segment in use. A creator that is not visible here may run in another container.
        let writer_runs = is_in_use && creator.is_none_or(is_running);
        Ok(Some(Self { bytes, segment, writer_runs, detached }))
    }

    fn content(&self) -> io::Result<RingContent<impl Iterator<Item = Item>>> {
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "its ring is damaged");
        RingReader::from_bytes(&self.bytes).ok_or_else(damaged)
    }
}

/// Returns whether a recording has a ring: its process runs, or was killed and left data that can be added to the file.
pub fn has_ring(file: &File, segments: &dyn Segments) -> bool {
    // If the ring cannot be read, assume that it exists.
    Found::of(&Head::of(file), segments).map_or(true, |found| found.is_some())
}

/// Returns the data that a process left in its ring, as a file that continues the recording: see
/// [`Follower::continue_in`](super::Follower::continue_in). The process must have stopped writing its recording. Changes nothing. `None` if there
/// is no ring.
///
/// # Errors
/// Returns an error if the ring cannot be read, or if its process still fills it.
pub fn left_in_ring(file: &File, segments: &dyn Segments) -> io::Result<Option<Vec<u8>>> {
    let head = Head::of(file);
    let Some(found) = Found::of(&head, segments)? else { return Ok(None) };
    if found.writer_runs {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let RingContent { recorded, definitions, items, .. } = found.content()?;
    let (items, _) = missing(file, recorded, items)?;
    let mut writer = Writer::new(Vec::new())?;
    let items = head
        .ring
        .map(Item::Ring)
        .into_iter()
        .chain(definitions)
        .chain(items)
        .chain([Item::Finished(Finished::default())]);
    for item in items {
        writer.write(&item)?;
    }
    writer.finish().map(Some)
}

/// Adds the content of the ring of a killed process to its recording, and removes the ring. `file` is the recording, opened for
/// reading and writing. Returns `None` and does nothing if the process still records. Callers must not run this concurrently, because both
/// would add the ring. `ended` is the time at which somebody saw the process end, since 1970; without it, the time is known to a second.
///
/// # Errors
/// Returns an error if a file or the ring cannot be read or written. The ring is kept in these cases.
pub fn recover(
    recording: &Path,
    mut file: File,
    segments: &dyn Segments,
    ended: Option<Duration>,
) -> io::Result<Option<Ended>> {
    // Checked before taking the lock, because a process that starts a new file gives up if the lock is taken.
    if Found::of(&Head::of(&file), segments)?.is_some_and(|found| found.writer_runs) {
        return Ok(None);
    }
    // The process holds a lock while it runs. Its children that did not call `exec` hold it too.
    let is_locked = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // Looks for the ring again, because the process may have ended before the lock was tried. At exit, a process writes the content of its
    // ring to the recording, and removes the ring.
    let head = Head::of(&file);
    let found = Found::of(&head, segments)?;
    // The process has replaced this file with another one.
    if !is_same_file(&file, recording)? {
        return Ok(None);
    }
    let Some(found) = found else {
        // A process without a ring may still be writing. While it writes a replacement of this file, it holds the lock of the replacement.
        let may_record = is_locked || is_held(&new_path(recording));
        // If the file does not contain the process id yet, the process has just started and still records.
        let records = may_record && head.pid.is_none_or(is_running);
        return Ok((!records).then_some(Ended { added: 0, _lock: file }));
    };
    if found.writer_runs {
        return Ok(None);
    }
    let RingContent { recorded, definitions, items, .. } = found.content()?;
    if recorded != WHOLE_FILE && file.metadata()?.len() < recorded {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the recording is shorter than its ring says"));
    }
    let (items, whole) = missing(&file, recorded, items)?;
    file.set_len(whole)?;
    file.seek(SeekFrom::End(0))?;
    let mut writer = Writer::append(&file, whole);
    // Definitions come before the events that need them. Repeating a definition of the recording does no harm.
    for definition in needed(&items, &definitions) {
        writer.write(definition)?;
    }
    let defined = writer.written().items;
    for item in &items {
        writer.write(item)?;
    }
    let added = writer.written().items - defined;
    writer.write(&Item::Finished(Finished { ended: head.end_of_process(ended, found.detached) }))?;
    writer.flush()?;
    drop(writer);
    file.sync_all()?;
    segments.remove(found.segment);
    Ok(Some(Ended { added, _lock: file }))
}

/// Returns the items of a ring that are not in the recording, and the length of the recording up to the end of its last complete record.
/// The process releases slots only after it has written their items, so if it was killed in between, both contain them. Complete records
/// are not changed, because a reader may have read them while the process ran, and continues after them.
fn missing(mut file: &File, recorded: u64, items: impl Iterator<Item = Item>) -> io::Result<(Vec<Item>, u64)> {
    let recorded = recorded.min(file.metadata()?.len());
    file.seek(SeekFrom::Start(recorded))?;
    let mut rest = Items::of(Records::after_header(io::BufReader::new(file)), Budget::default());
    let (mut latest, mut after_it) = (None, Vec::new());
    while let Some(next) = rest.next()? {
        match next {
            Next::Event(event) => {
                latest = Some(event.number);
                after_it.clear();
            }
            // An idle process writes a clock each second. No ring contains clocks.
            Next::Other(item, _) if matches!(*item, Item::Clock(_)) => {}
            Next::Other(item, _) => after_it.push(*item),
        }
    }
    let read = match rest.end() {
        Some(End::Cut { at } | End::Damaged { at, .. } | End::AboveLimit { at, .. }) => *at,
        _ => rest.bytes(),
    };
    let mut items: Vec<Item> = items.collect();
    let is_latest = |item: &Item| matches!(item, Item::Event(event) if Some(event.number) == latest);
    let mut written = items.iter().rposition(is_latest).map_or(0, |at| at + 1);
    for item in &after_it {
        written += usize::from(items.get(written) == Some(item));
    }
    items.drain(..written);
    Ok((items, recorded + read - FILE_HEADER as u64))
}

/// Returns whether the path still names this file.
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let (open, there) = (file.metadata()?, path.metadata()?);
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
    }
    // There, an open file cannot be replaced.
    #[cfg(not(unix))]
    Ok(open.is_file() && there.is_file())
}

/// Returns whether a process holds the lock of this file.
fn is_held(path: &Path) -> bool {
    regular_file::open(path, File::options().read(true))
        .is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The data at the start of a recording, as far as it can be read.
#[derive(Default)]
struct Head {
    /// The process id.
    pid: Option<u32>,
    /// The time when the session started, since 1970.
    started: Option<Duration>,
    ring: Option<RingDefinition>,
}

impl Head {
    fn of(mut file: &File) -> Self {
        let mut head = Self::default();
        // Another reader of the same file may have moved the position.
        let records = file.rewind().and_then(|()| Records::new(io::BufReader::new(file)));
        let Ok(mut items) = records.map(|records| Items::of(records, Budget::default())) else { return head };
        while let Ok(Some(next)) = items.next() {
            match next.into() {
                Item::Process(process) => (head.pid, head.started) = (Some(process.pid), Some(process.started)),
                Item::Ring(ring) => head.ring = Some(ring),
                Item::Event(_) => break,
                _ => {}
            }
        }
        head
    }

    /// `detached` is the start of the second in which the process ended.
    fn end_of_process(&self, seen: Option<Duration>, detached: Option<Duration>) -> Option<ProcessEnd> {
        const SECOND: Duration = Duration::from_secs(1);
        let (latest, within) = match (seen, detached) {
            (Some(seen), _) => (seen, Duration::ZERO),
            (None, Some(detached)) => (detached.saturating_add(SECOND), SECOND),
            (None, None) => return None,
        };
        Some(ProcessEnd { latest: latest.saturating_sub(self.started?), within })
    }
}

/// Returns the definitions that describe the stacks of events, and the modules and functions of these stacks.
fn needed<'a>(items: &[Item], definitions: &'a [Item]) -> impl Iterator<Item = &'a Item> {
    let stack_of = |item: &Item| match item {
        Item::Event(event) => event.kind.stack(),
        _ => None,
    };
    let stacks: HashSet<StackId> = items.iter().filter_map(stack_of).collect();
    let of_stacks = definitions.iter().filter_map(|item| match item {
        Item::Stack(stack) if stacks.contains(&stack.id) => Some(&stack.addresses),
        _ => None,
    });
    let addresses: HashSet<CodeAddress> = of_stacks.flatten().copied().collect();
    let modules: HashSet<u32> = addresses.iter().map(|address| address.module).collect();
    definitions.iter().filter(move |item| match item {
        Item::Stack(stack) => stacks.contains(&stack.id),
        Item::Module(module) => modules.contains(&module.id),
        Item::Symbols(symbols) => addresses.contains(&symbols.address),
        _ => false,
    })
}

/// Returns whether a process with this id runs.
fn is_running(pid: u32) -> bool {
    let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { return false };
    // The name in parentheses need not be UTF-8.
    let stat = String::from_utf8_lossy(&stat);
    let state = stat.rsplit_once(')').and_then(|(_, after_name)| after_name.split_whitespace().next());
    // This is the state of the main thread, which may have ended before the others.
    let has_others = || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1);
    state.is_some_and(|state| !matches!(state, "Z" | "X") || has_others())
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, process, sync::atomic::Ordering::Relaxed};

    use tempfile::TempDir;

    use super::*;
    use crate::{ClockPair, End, Follower, Process, Reader, ThreadDefinition, items_of, lines_for, on_the_heap, ring};
    use gpumem_core::model::{Event, EventKind, Key, ThreadId};

    struct Files(PathBuf, #[expect(dead_code, reason = "it is removed with its files")] TempDir);

    impl Files {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            Self(folder.path().join("a.capture"), folder)
        }

        fn file(&self) -> File {
            regular_file::open(&self.0, File::options().read(true).write(true)).unwrap()
        }
    }

    /// Returns `None` if the process still records.
    #[track_caller]
    fn added(files: &Files, shared: &Shared) -> Option<u64> {
        recover(&files.0, files.file(), shared, None).unwrap().map(|ended| ended.added)
    }

    /// Replaces shared memory in tests. There is one segment, with the id 7.
    #[derive(Default)]
    struct Shared(RefCell<Option<Segment>>);

    impl Shared {
        fn with(bytes: &[u8], creator: Option<u32>, is_in_use: bool) -> Self {
            Self(RefCell::new(Some(Segment { bytes: bytes.to_vec(), creator, is_in_use, detached: None })))
        }

        fn is_empty(&self) -> bool {
            self.0.borrow().is_none()
        }
    }

    impl Segments for Shared {
        fn read(&self, segment: u64) -> io::Result<Option<Segment>> {
            Ok(self.0.borrow().clone().filter(|_| segment == 7))
        }

        fn remove(&self, segment: u64) {
            assert_eq!(segment, 7);
            self.0.take();
        }
    }

    const MISSED: Item = Item::Missed(1);

    /// Writes a recording with this id that ends in the middle of a record. Returns its ring with four events, two of which are also in the
    /// recording.
    fn killed(files: &Files, recording: u64) -> Vec<u8> {
        let mut writer = Writer::new(File::create(&files.0).unwrap()).unwrap();
        writer.write(&Item::Ring(RingDefinition { segment: Some(7), recording })).unwrap();
        writer.flush().unwrap();
        let thread = ThreadDefinition { thread: ThreadId(1), os_id: 5, name: None };
        writer.write(&Item::Thread(thread)).unwrap();
        writer.flush().unwrap();
        let (mut to, mut from) = ring(on_the_heap(16), recording, writer.written().bytes);
        for number in 1..=4 {
            let kind = EventKind::Free { key: Key::from_raw(512 * number), block: None };
            to.event(
                &Event { number, time: Duration::from_nanos(number), thread: ThreadId(1), kind: &kind },
                number * 10,
            );
            to.item(&MISSED);
            if number == 2 {
                // The process was killed before it released these.
                from.by_ref().for_each(|item| writer.write(&item).unwrap());
                writer.write(&Item::Clock(ClockPair { ticks: 25, time: Duration::ZERO })).unwrap();
                writer.flush().unwrap();
            }
        }
        drop(writer);
        let bytes: Vec<u8> = from.words().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        assert_eq!(bytes.len(), 64 * lines_for(16));
        let mut file = fs::read(&files.0).unwrap();
        file.extend([1, 0, 0, 0, 99, 0, 0, 0]);
        fs::write(&files.0, file).unwrap();
        bytes
    }

    #[test]
    fn each_event_is_in_the_recording_once() {
        let files = Files::new();
        let shared = Shared::with(&killed(&files, 9), None, false);
        // A reader that read the file while the process ran can continue.
        let (mut reader, mut from) = (Follower::default(), File::open(&files.0).unwrap());
        reader.read(&from).unwrap();
        reader.rewind();
        assert_eq!(added(&files, &shared), Some(4));
        from.seek(SeekFrom::Start(reader.offset())).unwrap();
        reader.read(from).unwrap();
        assert!(!reader.definitions().lacks_end() && reader.time() == Duration::from_nanos(4), "{reader:?}");
        let (items, end) = items_of(File::open(&files.0).unwrap()).unwrap();
        assert_eq!(end, End::Complete);
        let numbers = items.iter().filter_map(|item| match item {
            Item::Event(event) => Some(event.number),
            _ => None,
        });
        assert_eq!(numbers.collect::<Vec<_>>(), [1, 2, 3, 4]);
        // The others define the ring, the thread, the clock and the end.
        assert_eq!((items.iter().filter(|item| **item == MISSED).count(), items.len()), (4, 12));
        assert!(shared.is_empty());
        assert_eq!(added(&files, &shared), Some(0));
    }

    /// The ring is private memory of the process if there is no space for a segment.
    #[test]
    fn a_process_without_a_ring_is_left_alone_too() {
        if !Path::new("/proc/self/stat").exists() {
            return;
        }
        let files = Files::new();
        let write = |pid| {
            let mut writer = Writer::new(File::create(&files.0).unwrap()).unwrap();
            writer.write(&Item::Process(Process { pid, ..Process::default() })).unwrap();
            writer.flush().unwrap();
        };
        let held = File::create(&files.0).unwrap();
        held.lock().unwrap();
        assert_eq!(added(&files, &Shared::default()), None);
        write(process::id());
        assert_eq!(added(&files, &Shared::default()), None);
        // The process writes a file that will replace this one.
        held.unlock().unwrap();
        let new = File::create(new_path(&files.0)).unwrap();
        new.lock().unwrap();
        assert_eq!(added(&files, &Shared::default()), None);
        fs::remove_file(new_path(&files.0)).unwrap();
        assert_eq!(added(&files, &Shared::default()), Some(0));
        // A child that outlives the process holds the lock.
        held.lock().unwrap();
        write(u32::MAX);
        assert_eq!(added(&files, &Shared::default()), Some(0));
    }

    #[test]
    fn a_ring_is_added_when_its_process_does_not_run() {
        let files = Files::new();
        // Linux truncates long names at a byte, which may split a character.
        _ = fs::write("/proc/self/comm", b"recover\xff");
        let lacks_end = || Reader::new(File::open(&files.0).unwrap()).unwrap().definitions().lacks_end();
        let bytes = killed(&files, 9);
        // This process runs, and one that is not visible may run. Not every file system has locks.
        for (creator, is_locked) in [(Some(process::id()), false), (Some(process::id()), true), (None, false)] {
            let held = File::open(&files.0).unwrap();
            if is_locked {
                held.lock().unwrap();
            }
            let shared = Shared::with(&bytes, creator, true);
            assert!(has_ring(&files.file(), &shared) && added(&files, &shared).is_none() && !shared.is_empty());
        }
        // The process has called `exec`, or its child still has the memory and the lock.
        for (creator, is_in_use) in [(Some(process::id()), false), (Some(u32::MAX), true)] {
            let shared = Shared::with(&killed(&files, 9), creator, is_in_use);
            let held = File::open(&files.0).unwrap();
            held.lock().unwrap();
            assert!(lacks_end());
            assert_eq!(added(&files, &shared), Some(4));
            assert!(shared.is_empty() && !has_ring(&files.file(), &shared) && !lacks_end());
        }
    }

    #[test]
    fn a_ring_that_does_not_belong_to_the_recording_is_left_alone() {
        let files = Files::new();
        let bytes = killed(&files, 9);
        // The last byte that the process wrote before it released slots is missing.
        let RingContent { recorded, .. } = RingReader::from_bytes(&bytes).unwrap();
        files.file().set_len(recorded - 1).unwrap();
        let shared = Shared::with(&bytes, None, false);
        let error = recover(&files.0, files.file(), &shared, None).unwrap_err().to_string();
        assert!(error.contains("shorter than its ring says") && !shared.is_empty(), "{error}");
        // The segment now belongs to another recording, or to another gpumem version: the version is the second word. The data is lost,
        // and the file reports the loss.
        let mut other_version = killed(&files, 9);
        other_version[8] += 1;
        for other in [other_version, killed(&files, 10)] {
            killed(&files, 9);
            let shared = Shared::with(&other, None, false);
            assert_eq!((has_ring(&files.file(), &shared), added(&files, &shared)), (false, Some(0)));
            assert!(!shared.is_empty());
            assert!(Reader::new(File::open(&files.0).unwrap()).unwrap().definitions().lacks_end());
        }
    }
}
