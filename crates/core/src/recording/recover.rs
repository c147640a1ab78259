//! Adds the ring of a killed process to its recording.

use std::{
    collections::HashSet,
    fs::{self, File, TryLockError},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use super::{
    budget::Budget,
    item::{CodeAddress, Finished, Item, RingDefinition},
    items::{Items, Next},
    record::{End, FILE_HEADER, Records},
    ring::{RingContent, RingOwner, RingReader, WHOLE_FILE},
    writer::Writer,
};
use crate::{model::StackId, regular_file};

/// Returns the file in which early versions had the ring of a recording.
pub fn ring_path(recording: &Path) -> PathBuf {
    with(recording, ".ring")
}

/// The shared memory of this machine, which has the rings.
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
    /// The process that made it; `None` if it is not visible here.
    pub creator: Option<u32>,
    /// True if a process uses it.
    pub is_in_use: bool,
}

/// Returns the path of the older part of a recording of the newest events.
pub fn old_path(recording: &Path) -> PathBuf {
    with(recording, ".old")
}

/// Returns the path of a new file that will take the place of a recording.
pub fn new_path(recording: &Path) -> PathBuf {
    with(recording, ".new")
}

fn with(recording: &Path, end: &str) -> PathBuf {
    let mut path = recording.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// A recording to which its process does not write any more.
#[derive(Debug)]
pub struct Ended {
    /// The number of items that were in the ring of a killed process, and are in the recording now.
    pub added: u64,
    /// No process begins a recording with this name until it is closed.
    _lock: File,
}

/// A ring that is not in the recording yet.
struct Found {
    bytes: Vec<u8>,
    place: RingPlace,
    /// True if the process that fills it still runs. `None` if the ring does not say which process that is.
    writer_runs: Option<bool>,
}

enum RingPlace {
    File(PathBuf),
    Segment(u64),
}

impl Found {
    /// Returns the ring of a recording, if there is one.
    fn of(recording: &Path, file: &File, segments: &dyn Segments) -> io::Result<Option<Self>> {
        let path = ring_path(recording);
        if let Some(bytes) = read(&path)? {
            let writer_runs = RingReader::owner_in(&bytes).map(|owner| is_running(&owner));
            return Ok(Some(Self { bytes, place: RingPlace::File(path), writer_runs }));
        }
        Self::in_segment(&Head::of(file), segments)
    }

    fn in_segment(head: &Head, segments: &dyn Segments) -> io::Result<Option<Self>> {
        let Some(RingDefinition { segment: Some(segment), recording }) = head.ring else { return Ok(None) };
        let Some(Segment { bytes, creator, is_in_use }) = segments.read(segment)? else { return Ok(None) };
        // The segment belongs to another recording now, or it has no ring that this version can read.
        if RingReader::owner_in(&bytes).is_none_or(|owner| owner.recording != recording) {
            return Ok(None);
        }
        // A child that outlives the process keeps the segment in use. A creator that is not visible here may run in another container.
        let writer_runs = is_in_use && creator.is_none_or(|pid| start_time(pid).is_some());
        Ok(Some(Self { bytes, place: RingPlace::Segment(segment), writer_runs: Some(writer_runs) }))
    }

    fn remove(&self, segments: &dyn Segments) -> io::Result<()> {
        match &self.place {
            RingPlace::File(path) => fs::remove_file(path),
            RingPlace::Segment(segment) => {
                segments.remove(*segment);
                Ok(())
            }
        }
    }
}

/// Returns whether a recording has a ring: its process runs, or was killed and left data that can be added to the file.
pub fn has_ring(recording: &Path, file: &File, segments: &dyn Segments) -> bool {
    // A ring that cannot be read may be there, so the answer is yes.
    Found::of(recording, file, segments).map_or(true, |found| found.is_some())
}

/// Returns what a process that does not write its recording any more left in its ring, as a file that continues the recording: see
/// [`Follower::go_on_in`](super::Follower::go_on_in). Nothing is changed. `None` if there is no ring.
///
/// # Errors
/// Returns an error if the ring cannot be read, or if its process still fills it.
pub fn left_in_ring(file: &File, segments: &dyn Segments) -> io::Result<Option<Vec<u8>>> {
    let head = Head::of(file);
    let Some(found) = Found::in_segment(&head, segments)? else { return Ok(None) };
    if found.writer_runs != Some(false) {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let content = RingReader::from_bytes(&found.bytes).zip(head.ring);
    let Some((RingContent { recorded, definitions, items, .. }, ring)) = content else { return Ok(None) };
    let (items, _) = missing(file, recorded, items)?;
    let mut writer = Writer::new(Vec::new())?;
    let items = [Item::Ring(ring)].into_iter().chain(definitions).chain(items).chain([Item::Finished(Finished)]);
    for item in items {
        writer.write(&item)?;
    }
    writer.finish().map(Some)
}

/// Adds the content of the ring of a killed process to its recording, and removes the ring. `file` is the recording, opened for reading and
/// writing. `None` if the process still records: nothing is done then. Two callers at the same time would both add the ring, so the caller
/// has to exclude that.
///
/// # Errors
/// Returns an error if a file or the ring cannot be read or written, or if the ring is damaged or of another version. The ring is
/// kept in these cases.
pub fn recover(recording: &Path, mut file: File, segments: &dyn Segments) -> io::Result<Option<Ended>> {
    // This check comes before the lock: while we have the lock, a process that begins a new file gives up.
    if Found::of(recording, &file, segments)?.is_some_and(|found| found.writer_runs == Some(true)) {
        return Ok(None);
    }
    // The process holds a lock while it runs. Its children that did not call `exec` hold it too.
    let is_locked = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // The ring is looked up again, because the process may have ended before the lock was tried. A process that ends writes the
    // content of its ring to the recording, and removes the ring.
    let found = Found::of(recording, &file, segments)?;
    // The process has put another file in its place.
    if !is_same_file(&file, recording)? {
        return Ok(None);
    }
    let Some(found) = found else {
        // A process that has no ring may write. While it writes a file that takes the place of this one, it has the lock of that one.
        let may_record = is_locked || is_held(&new_path(recording));
        // If the file does not name its process yet, the process has just begun, and still records.
        let records = may_record && Head::of(&file).pid.is_none_or(|pid| start_time(pid).is_some());
        return Ok((!records).then_some(Ended { added: 0, _lock: file }));
    };
    if found.writer_runs.unwrap_or(is_locked) {
        return Ok(None);
    }
    let Some(RingContent { recorded, definitions, items, .. }) = RingReader::from_bytes(&found.bytes) else {
        // The process was killed before the ring was in use.
        if found.bytes.iter().all(|byte| *byte == 0) {
            found.remove(segments)?;
            return Ok(Some(Ended { added: 0, _lock: file }));
        }
        let ring = ring_path(recording);
        let why =
            "is damaged, or of another version of gpumem: open the recording with the version that wrote it, or remove";
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("`{0}` {why} `{0}`", ring.display())));
    };
    if recorded != WHOLE_FILE && file.metadata()?.len() < recorded {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the recording is shorter than its ring says"));
    }
    let (items, whole) = missing(&file, recorded, items)?;
    file.set_len(whole)?;
    file.seek(SeekFrom::End(0))?;
    let mut writer = Writer::append(&file, whole);
    // The definitions come before the events that need them. If they are in the recording too, they are the same.
    for definition in needed(&items, &definitions) {
        writer.write(definition)?;
    }
    let defined = writer.written().items;
    for item in &items {
        writer.write(item)?;
    }
    let added = writer.written().items - defined;
    writer.write(&Item::Finished(Finished))?;
    writer.flush()?;
    drop(writer);
    file.sync_all()?;
    found.remove(segments)?;
    Ok(Some(Ended { added, _lock: file }))
}

/// Returns the items of a ring that are not in the recording, and the length of the recording up to the end of its last complete record. The
/// process writes items, and only then it releases their slots: if it was killed in between, both have them. Complete records stay as they are,
/// because a reader may have read them while the process ran, and reads on after them.
fn missing(mut file: &File, recorded: u64, items: impl Iterator<Item = Item>) -> io::Result<(Vec<Item>, u64)> {
    let recorded = recorded.min(file.metadata()?.len());
    file.seek(SeekFrom::Start(recorded))?;
    let mut rest = Items::of(Records::after_header(io::BufReader::new(file)), Budget::default());
    let (mut newest, mut after_it) = (None, Vec::new());
    while let Some(next) = rest.next()? {
        match next {
            Next::Event(event) => {
                newest = Some(event.number);
                after_it.clear();
            }
            // A process that does nothing writes a clock each second. No ring has one.
            Next::Other(item, _) if matches!(*item, Item::Clock(_)) => {}
            Next::Other(item, _) => after_it.push(*item),
        }
    }
    let read = match rest.end() {
        Some(End::Cut { at } | End::Damaged { at, .. } | End::AboveLimit { at, .. }) => *at,
        _ => rest.bytes(),
    };
    let mut items: Vec<Item> = items.collect();
    let is_newest = |item: &Item| matches!(item, Item::Event(event) if Some(event.number) == newest);
    let mut written = items.iter().rposition(is_newest).map_or(0, |at| at + 1);
    for item in &after_it {
        written += usize::from(items.get(written) == Some(item));
    }
    items.drain(..written);
    Ok((items, recorded + read - FILE_HEADER as u64))
}

/// Returns the content of a file, if there is one.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match regular_file::open(path, File::options().read(true)).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(|_| Some(bytes)),
    }
}

/// Returns whether the path still names this file.
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let (open, there) = (file.metadata()?, path.metadata()?);
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
    }
    // A file that is open cannot be replaced there.
    #[cfg(not(unix))]
    Ok(open.is_file() && there.is_file())
}

/// Returns whether a process holds the lock of this file.
fn is_held(path: &Path) -> bool {
    regular_file::open(path, File::options().read(true))
        .is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The facts at the beginning of a recording, as far as it can be read.
#[derive(Default)]
struct Head {
    /// The number of the process.
    pid: Option<u32>,
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
                Item::Process(process) => head.pid = Some(process.pid),
                Item::Ring(ring) => head.ring = Some(ring),
                Item::Event(_) => break,
                _ => {}
            }
        }
        head
    }
}

/// Returns those of these definitions that are of stacks of events, and of the parts of these stacks.
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

/// Returns whether the process runs. Another one may have got its number.
fn is_running(owner: &RingOwner) -> bool {
    u32::try_from(owner.pid).is_ok_and(|pid| start_time(pid) == Some(owner.began))
}

/// Returns the start time of the process with this number. `None` if no such process runs.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets need not be UTF-8.
    let stat = String::from_utf8_lossy(&stat);
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    // The state is that of the first thread: it may have ended before the others.
    let has_ended = matches!(fields.next()?, "Z" | "X");
    let has_others = || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1);
    if has_ended && !has_others() { None } else { fields.nth(18)?.parse().ok() }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, process, sync::atomic::Ordering::Relaxed, time::Duration};

    use tempfile::TempDir;

    use super::*;
    use crate::{
        model::{Event, EventKind, Key, ThreadId},
        recording::{ClockPair, Follower, Item, Process, ThreadDefinition, items_of, lines_for, on_the_heap, ring},
    };

    struct Files(PathBuf, #[expect(dead_code, reason = "it is removed with its files")] TempDir);

    impl Files {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            Self(folder.path().join("a.capture"), folder)
        }

        fn ring(&self) -> PathBuf {
            ring_path(&self.0)
        }

        fn file(&self) -> File {
            regular_file::open(&self.0, File::options().read(true).write(true)).unwrap()
        }
    }

    /// Returns `None` if the process still records.
    #[track_caller]
    fn added(files: &Files) -> Option<u64> {
        recover(&files.0, files.file(), &Shared::default()).unwrap().map(|ended| ended.added)
    }

    /// A test uses it instead of shared memory. It has one segment, and the number of the segment is 7.
    #[derive(Default)]
    struct Shared(RefCell<Option<Segment>>);

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
    const DEAD: RingOwner = RingOwner { pid: u32::MAX as u64, began: 1, recording: 0 };

    /// Makes a recording that ends in the middle of a record, and a ring with four events, of which two are in the recording.
    fn killed(files: &Files, owner: RingOwner) {
        let mut writer = Writer::new(File::create(&files.0).unwrap()).unwrap();
        let thread = ThreadDefinition { thread: ThreadId(1), os_id: 5, name: None };
        writer.write(&Item::Thread(thread)).unwrap();
        if owner.recording != 0 {
            writer.write(&Item::Ring(RingDefinition { segment: Some(7), recording: owner.recording })).unwrap();
        }
        writer.flush().unwrap();
        let memory = on_the_heap(16);
        let (mut to, mut from) = ring(memory, owner, writer.written().bytes);
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
        fs::write(files.ring(), bytes).unwrap();
        let mut file = fs::read(&files.0).unwrap();
        file.extend([1, 0, 0, 0, 99, 0, 0, 0]);
        fs::write(&files.0, file).unwrap();
    }

    #[test]
    fn each_event_is_in_the_recording_once() {
        let files = Files::new();
        killed(&files, DEAD);
        // A reader has read it while the process ran, and reads on.
        let (mut reader, mut from) = (Follower::default(), File::open(&files.0).unwrap());
        reader.read(&from).unwrap();
        reader.go_back();
        assert_eq!(added(&files), Some(4));
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
        // The others are the thread, the clock and the end.
        assert_eq!((items.iter().filter(|item| **item == MISSED).count(), items.len()), (4, 11));
        assert!(!files.ring().exists());
        assert_eq!(added(&files), Some(0));
    }

    #[test]
    fn a_process_that_runs_keeps_its_ring() {
        let files = Files::new();
        // Linux cuts long names at a byte, which may be within a character.
        _ = fs::write("/proc/self/comm", b"recover\xff");
        let stat = fs::read("/proc/self/stat").unwrap_or_default();
        let stat = String::from_utf8_lossy(&stat);
        let began = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok());
        let Some(began) = began else { return };
        killed(&files, RingOwner { pid: process::id().into(), began, recording: 0 });
        // The process still records without its lock as well: not every file system has locks, and the process replaces
        // the file with `--max-size`.
        assert_eq!(added(&files), None);
        let held = File::open(&files.0).unwrap();
        held.lock().unwrap();
        assert_eq!(added(&files), None);
        assert!(files.ring().exists());
        // A child of the process, which outlives it, has the lock.
        killed(&files, RingOwner { pid: process::id().into(), began: began + 1, recording: 0 });
        assert_eq!(added(&files), Some(4));
    }

    /// The ring is on the heap if space in a file cannot be reserved.
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
        assert_eq!(added(&files), None);
        write(process::id());
        assert_eq!(added(&files), None);
        // The process writes a file that takes the place of this one.
        held.unlock().unwrap();
        let new = File::create(new_path(&files.0)).unwrap();
        new.lock().unwrap();
        assert_eq!(added(&files), None);
        fs::remove_file(new_path(&files.0)).unwrap();
        assert_eq!(added(&files), Some(0));
        // A child of the process, which outlives it, has the lock.
        held.lock().unwrap();
        write(u32::MAX);
        assert_eq!(added(&files), Some(0));
    }

    #[test]
    fn a_ring_in_shared_memory_is_added_when_its_process_does_not_run() {
        let files = Files::new();
        let killed = |recording| {
            killed(&files, RingOwner { recording, ..DEAD });
            let bytes = fs::read(files.ring()).unwrap();
            fs::remove_file(files.ring()).unwrap();
            bytes
        };
        let added = |shared: &Shared| recover(&files.0, files.file(), shared).unwrap().map(|ended| ended.added);
        let shared = |segment: &Segment| Shared(RefCell::new(Some(segment.clone())));
        let lacks_end =
            || crate::recording::Reader::new(File::open(&files.0).unwrap()).unwrap().definitions().lacks_end();
        let mut segment = Segment { bytes: killed(9), creator: Some(process::id()), is_in_use: true };
        // This process runs, and so may one that is not visible.
        assert!(has_ring(&files.0, &files.file(), &shared(&segment)) && added(&shared(&segment)).is_none());
        segment.creator = None;
        assert_eq!(added(&shared(&segment)), None);
        // The process has called `exec`, or its child still has the memory.
        for (creator, is_in_use) in [(Some(process::id()), false), (Some(u32::MAX), true)] {
            segment = Segment { bytes: killed(9), creator, is_in_use };
            let shared = shared(&segment);
            assert!(lacks_end());
            assert_eq!(added(&shared), Some(4));
            assert!(shared.0.borrow().is_none() && !has_ring(&files.0, &files.file(), &shared) && !lacks_end());
            assert_eq!(added(&shared), Some(0));
        }
        // The segment belongs to another recording now. The missing data of this one is lost, and the file says that data
        // is missing.
        killed(10);
        let shared = shared(&segment);
        assert_eq!((has_ring(&files.0, &files.file(), &shared), added(&shared)), (false, Some(0)));
        assert!(shared.0.borrow().is_some() && lacks_end());
    }

    #[test]
    fn files_that_do_not_belong_together_are_left_alone() {
        let files = Files::new();
        killed(&files, DEAD);
        fs::write(&files.0, b"short").unwrap();
        assert!(recover(&files.0, files.file(), &Shared::default()).is_err());
        assert!(files.ring().exists());
        // The version is the second word.
        let mut other = fs::read(files.ring()).unwrap();
        other[8] += 1;
        for ring in [other, b"no ring".to_vec()] {
            fs::write(files.ring(), ring).unwrap();
            let error = recover(&files.0, files.file(), &Shared::default()).unwrap_err().to_string();
            assert!(error.contains("another version of gpumem: open the recording with"), "{error}");
        }
        fs::write(files.ring(), [0; 4096]).unwrap();
        assert_eq!(added(&files), Some(0));
        assert!(!files.ring().exists());
        assert_eq!(fs::read(&files.0).unwrap(), b"short");
    }
}
