//! After a process was killed: what was in the ring is added to its recording.

use std::{
    collections::HashSet,
    fs::{self, File, TryLockError},
    io::{self, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use super::{
    budget::Budget,
    item::{CodeAddress, Finished, Item, RingDefinition},
    items::Items,
    record::Records,
    ring::{RingContent, RingReader, WHOLE},
    writer::Writer,
};
use crate::model::StackId;

/// The shared memory of this machine, in which rings are.
pub trait Segments {
    /// What is in a segment. `None` if there is no such segment.
    ///
    /// # Errors
    /// If it cannot be read.
    fn read(&self, segment: u64) -> io::Result<Option<Segment>>;

    /// Removes a segment.
    fn remove(&self, segment: u64);
}

/// A segment of shared memory.
#[derive(Clone, Debug)]
pub struct Segment {
    /// What is in it.
    pub bytes: Vec<u8>,
    /// The process that made it; `None` if it is not visible here.
    pub creator: Option<u32>,
    /// A process uses it.
    pub is_in_use: bool,
}

/// Where the older part of a recording of the newest events is.
pub fn old_path(recording: &Path) -> PathBuf {
    with(recording, ".old")
}

/// Where a file is written that is to take the place of a recording.
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
    /// So many items were in the ring of a killed process, and are in the recording now.
    pub added: u64,
    /// Until it is closed, no process begins a recording with this name.
    _lock: File,
}

/// A ring that is not in the recording yet.
struct Found<I> {
    content: RingContent<I>,
    segment: u64,
    /// The process that fills it runs.
    is_filled: bool,
}

/// The ring of a recording, if there is one.
fn ring_of(file: &File, segments: &dyn Segments) -> io::Result<Option<Found<impl Iterator<Item = Item> + use<>>>> {
    let Some(RingDefinition { segment: Some(segment), recording }) = Head::of(file).ring else { return Ok(None) };
    let Some(Segment { bytes, creator, is_in_use }) = segments.read(segment)? else { return Ok(None) };
    // Another one may have got the number.
    let content = RingReader::from_bytes(&bytes).filter(|content| content.recording == recording);
    // A child that outlives the process has the segment too. What is not visible here may run elsewhere.
    let is_filled = is_in_use && creator.is_none_or(runs);
    Ok(content.map(|content| Found { content, segment, is_filled }))
}

/// Whether the process of a recording was killed, or runs: something is not in the file that can be added.
pub fn has_ring(recording: &Path, segments: &dyn Segments) -> bool {
    // A pipe would be waited for.
    let file = recording.is_file().then(|| File::open(recording).ok()).flatten();
    let Some(file) = file else { return false };
    // What cannot be read may be there.
    ring_of(&file, segments).map_or(true, |found| found.is_some())
}

/// Adds what was in the ring of a process that was killed to its recording, and removes the ring. `None` if the process records
/// still: nothing is done then. Two callers at the same time would both add the ring, so the caller has to exclude that.
///
/// # Errors
/// If a file or the ring cannot be read or written, or if the recording is shorter than the ring says. The ring is kept in these cases.
pub fn recover(recording: &Path, segments: &dyn Segments) -> io::Result<Option<Ended>> {
    // A pipe is not waited for if it is opened for both.
    let mut file = File::options().read(true).write(true).open(recording)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    // Before the lock: a process that begins a new file while somebody else has the lock gives up.
    if ring_of(&file, segments)?.is_some_and(|found| found.is_filled) {
        return Ok(None);
    }
    // The process holds a lock while it runs. Its children that did not call `exec` hold it too.
    let is_locked = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // Only now: a process writes what is in its ring to the recording when it ends, and removes the ring.
    let found = ring_of(&file, segments)?;
    // The process has put another file in its place.
    if !is_same_file(&file, recording)? {
        return Ok(None);
    }
    let Some(Found { content, segment, is_filled }) = found else {
        // A process that has no ring may write. While it writes a file that takes the place of this one, it has the lock of that one.
        let may_record = is_locked || is_held(&new_path(recording));
        // It has just begun if it has not written who it is.
        let records = may_record && Head::of(&file).pid.is_none_or(runs);
        return Ok((!records).then_some(Ended { added: 0, _lock: file }));
    };
    if is_filled {
        return Ok(None);
    }
    let RingContent { recorded, definitions, items, .. } = content;
    // What follows was written, and not given free in the ring any more: it is there.
    let length = file.metadata()?.len();
    let recorded = if recorded == WHOLE { length } else { recorded };
    if length < recorded {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the recording is shorter than its ring says"));
    }
    file.set_len(recorded)?;
    file.seek(SeekFrom::End(0))?;
    let mut writer = Writer::append(&file, recorded);
    let items: Vec<Item> = items.collect();
    // Before the events that need them. If they are in the recording too, they are the same.
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
    segments.remove(segment);
    Ok(Some(Ended { added, _lock: file }))
}

/// Whether the path still names this file.
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

/// Whether a process holds the lock of this file.
fn is_held(path: &Path) -> bool {
    // A pipe that somebody has put there would be waited for.
    path.is_file() && File::open(path).is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// What the beginning of a recording says, as far as it can be read.
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
        while let Ok(Some((item, _))) = items.next() {
            match item {
                Item::Process(process) => head.pid = Some(process.pid),
                Item::Ring(ring) => head.ring = Some(ring),
                Item::Event(_) => break,
                _ => {}
            }
        }
        head
    }
}

/// Of these definitions, those of stacks that events have, and what those stacks consist of.
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

/// Whether a process with this number runs.
fn runs(pid: u32) -> bool {
    let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { return false };
    // The name in brackets need not be UTF-8.
    let stat = String::from_utf8_lossy(&stat);
    // The state is that of the first thread: it may have ended before the others.
    let state = stat.rsplit_once(')').and_then(|(_, after_name)| after_name.split_whitespace().next());
    let has_others = || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1);
    state.is_some_and(|state| !matches!(state, "Z" | "X") || has_others())
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, env, process, sync::atomic::Ordering::Relaxed, time::Duration};

    use super::*;
    use crate::{
        model::{Event, EventKind, Key, ThreadId},
        recording::{End, Item, Process, Reader, ThreadDefinition, items_of, lines_for, on_the_heap, ring},
    };

    /// A recording, and shared memory with one segment, whose number is 7.
    struct Files {
        recording: PathBuf,
        segment: RefCell<Option<Segment>>,
    }

    impl Files {
        fn new(name: &str) -> Self {
            let recording = env::temp_dir().join(format!("gpumem-recover-{}-{name}", process::id()));
            Self { recording, segment: RefCell::default() }
        }

        fn has_ring(&self) -> bool {
            has_ring(&self.recording, self)
        }

        /// `None` if the process records still.
        #[track_caller]
        fn added(&self) -> Option<u64> {
            recover(&self.recording, self).unwrap().map(|ended| ended.added)
        }

        fn lacks_end(&self) -> bool {
            Reader::new(File::open(&self.recording).unwrap()).unwrap().definitions().lacks_end()
        }

        /// A recording that ends in the middle of a record, and a ring with two events. The ring is of the recording with this number.
        fn killed(&self, ring_of: u64, creator: Option<u32>, is_in_use: bool) {
            let mut writer = Writer::new(File::create(&self.recording).unwrap()).unwrap();
            let thread = ThreadDefinition { thread: ThreadId(1), os_id: 5, name: None };
            writer.write(&Item::Thread(thread)).unwrap();
            writer.write(&Item::Ring(RingDefinition { segment: Some(7), recording: 9 })).unwrap();
            writer.flush().unwrap();
            let (mut to, mut from) = ring(on_the_heap(16), ring_of, writer.written().bytes);
            drop(writer);
            for number in 1..=4 {
                let kind = EventKind::Free { key: Key::from_raw(512 * number), block: None };
                to.event(&Event { number, time: Duration::ZERO, thread: ThreadId(1), kind: &kind }, number * 10);
                if number == 2 {
                    // These two are in the file as well, as if the process had been killed before it gave them free.
                    assert_eq!(from.by_ref().count(), 2);
                }
            }
            let bytes: Vec<u8> = from.words().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
            assert_eq!(bytes.len(), 64 * lines_for(16));
            self.segment.replace(Some(Segment { bytes, creator, is_in_use }));
            let mut file = fs::read(&self.recording).unwrap();
            file.extend([1, 0, 0, 0, 99, 0, 0, 0]);
            fs::write(&self.recording, file).unwrap();
        }
    }

    impl Segments for Files {
        fn read(&self, segment: u64) -> io::Result<Option<Segment>> {
            Ok(self.segment.borrow().clone().filter(|_| segment == 7))
        }

        fn remove(&self, segment: u64) {
            assert_eq!(segment, 7);
            self.segment.take();
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.recording);
        }
    }

    #[test]
    fn each_event_is_in_the_recording_once() {
        let files = Files::new("once");
        files.killed(9, Some(u32::MAX), false);
        assert_eq!(files.added(), Some(4));
        let (items, end) = items_of(File::open(&files.recording).unwrap()).unwrap();
        assert_eq!(end, End::Complete);
        let numbers = items.iter().filter_map(|item| match item {
            Item::Event(event) => Some(event.number),
            _ => None,
        });
        assert_eq!((items.len(), numbers.collect::<Vec<_>>()), (7, vec![1, 2, 3, 4]));
        assert!(files.segment.borrow().is_none());
        assert_eq!(files.added(), Some(0));
    }

    #[test]
    fn a_process_that_runs_keeps_its_ring() {
        if !Path::new("/proc/self/stat").exists() {
            return;
        }
        // Linux cuts long names at a byte, which may be within a character.
        _ = fs::write("/proc/self/comm", b"recover\xff");
        let files = Files::new("running");
        // A process that is not visible may run.
        for creator in [Some(process::id()), None] {
            files.killed(9, creator, true);
            // Without its lock as well: not every file system has locks, and the process replaces the file with `--max-size`.
            assert!(files.has_ring() && files.added().is_none());
            let held = File::open(&files.recording).unwrap();
            held.lock().unwrap();
            assert_eq!(files.added(), None);
            assert!(files.segment.borrow().is_some());
        }
    }

    /// The ring is on the heap where a segment cannot be reserved.
    #[test]
    fn a_process_without_a_ring_is_left_alone_too() {
        if !Path::new("/proc/self/stat").exists() {
            return;
        }
        let files = Files::new("heap");
        let write = |pid| {
            let mut writer = Writer::new(File::create(&files.recording).unwrap()).unwrap();
            writer.write(&Item::Process(Process { pid, ..Process::default() })).unwrap();
            writer.flush().unwrap();
        };
        let held = File::create(&files.recording).unwrap();
        held.lock().unwrap();
        assert_eq!(files.added(), None);
        write(process::id());
        assert_eq!(files.added(), None);
        // It writes a file that takes the place of this one.
        held.unlock().unwrap();
        let new = File::create(new_path(&files.recording)).unwrap();
        new.lock().unwrap();
        assert_eq!(files.added(), None);
        fs::remove_file(new_path(&files.recording)).unwrap();
        assert_eq!(files.added(), Some(0));
        // The lock of a child, which outlives the process.
        held.lock().unwrap();
        write(u32::MAX);
        assert_eq!(files.added(), Some(0));
    }

    #[test]
    fn a_ring_is_added_when_its_process_does_not_run() {
        let files = Files::new("segment");
        // A process that has called `exec`; one whose child has the memory and the lock still.
        for (creator, is_in_use) in [(process::id(), false), (u32::MAX, true)] {
            files.killed(9, Some(creator), is_in_use);
            let held = File::open(&files.recording).unwrap();
            held.lock().unwrap();
            assert!(files.lacks_end());
            assert_eq!(files.added(), Some(4));
            assert!(files.segment.borrow().is_none() && !files.has_ring() && !files.lacks_end());
            held.unlock().unwrap();
            assert_eq!(files.added(), Some(0));
        }
        // The segment is another recording's now: what this one lacks is lost, and the file says that it lacks something.
        files.killed(10, Some(u32::MAX), false);
        assert_eq!((files.has_ring(), files.added()), (false, Some(0)));
        assert!(files.segment.borrow().is_some() && files.lacks_end());
    }

    #[test]
    fn a_ring_that_does_not_fit_the_recording_is_kept() {
        let files = Files::new("other");
        files.killed(9, Some(u32::MAX), false);
        let whole = fs::read(&files.recording).unwrap();
        let mut writer = Writer::new(File::create(&files.recording).unwrap()).unwrap();
        writer.write(&Item::Ring(RingDefinition { segment: Some(7), recording: 9 })).unwrap();
        writer.flush().unwrap();
        assert!(recover(&files.recording, &files).is_err(), "the file is shorter than the ring says");
        fs::write(&files.recording, whole).unwrap();
        // The version is the second word.
        let other = |change: &dyn Fn(&mut Vec<u8>)| {
            files.segment.borrow_mut().as_mut().map(|segment| change(&mut segment.bytes))
        };
        for change in [&(|bytes: &mut Vec<u8>| bytes[8] += 1) as &dyn Fn(&mut Vec<u8>), &|bytes| bytes.fill(0)] {
            other(change);
            assert_eq!(files.added(), Some(0));
            assert!(files.segment.borrow().is_some());
        }
    }
}
