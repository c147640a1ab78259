//! After a process was killed: what was in the ring is added to its recording.

use std::{
    collections::HashSet,
    fs::{self, File, TryLockError},
    io::{self, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use super::{
    item::{CodeAddress, Item},
    ring::{RingContent, RingOwner, RingReader, WHOLE},
    writer::Writer,
};
use crate::model::StackId;

/// Where the ring of a recording is while the program runs, or if it was killed.
pub fn ring_path(recording: &Path) -> PathBuf {
    with(recording, ".ring")
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

/// What [`recover`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovered {
    /// There was nothing to do: the process ended by itself.
    Complete,
    /// So many items were added.
    Added(u64),
    /// The process records still, so nothing was done.
    IsRunning,
}

/// Adds what was in the ring of a process that was killed to its recording, and removes the ring. Without effect if there is no
/// ring, or the process runs.
///
/// # Errors
/// Of reading and writing, and if the ring is damaged or of another version. The ring is kept then.
pub fn recover(recording: &Path) -> io::Result<Recovered> {
    let ring_path = ring_path(recording);
    let bytes = match fs::read(&ring_path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Recovered::Complete),
        bytes => bytes?,
    };
    let mut file = File::options().read(true).write(true).open(recording)?;
    let ring = RingReader::from_bytes(&bytes);
    // The process holds a lock while it runs. Its children that did not call `exec` hold it too.
    if let Err(TryLockError::WouldBlock) = file.try_lock()
        && ring.as_ref().is_none_or(|ring| is_running(&ring.owner))
    {
        return Ok(Recovered::IsRunning);
    }
    let Some(RingContent { recorded, definitions, items, .. }) = ring else {
        // Killed before the ring was in use.
        if bytes.iter().all(|byte| *byte == 0) {
            fs::remove_file(&ring_path)?;
            return Ok(Recovered::Complete);
        }
        let why =
            "is damaged, or of another version of gpumem: open the recording with the version that wrote it, or remove";
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("`{0}` {why} `{0}`", ring_path.display())));
    };
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
    writer.flush()?;
    let added = writer.written().items - defined;
    file.sync_all()?;
    fs::remove_file(&ring_path)?;
    Ok(Recovered::Added(added))
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

/// Whether the process runs. Another one may have got its number.
fn is_running(owner: &RingOwner) -> bool {
    let Ok(stat) = fs::read(format!("/proc/{}/stat", owner.pid)) else { return false };
    // The name in brackets need not be UTF-8.
    let stat = String::from_utf8_lossy(&stat);
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = after_name.split_whitespace();
    let is_dead = fields.next().is_some_and(|state| matches!(state, "Z" | "X"));
    !is_dead && fields.nth(18).and_then(|began| began.parse().ok()) == Some(owner.began)
}

#[cfg(test)]
mod tests {
    use std::{env, process, sync::atomic::Ordering::Relaxed, time::Duration};

    use super::*;
    use crate::{
        capture::{Item, ThreadDefinition, items_of, lines_for, on_the_heap, ring},
        model::{Event, EventKind, Key, ThreadId},
    };

    struct Files(PathBuf);

    impl Files {
        fn new(name: &str) -> Self {
            Self(env::temp_dir().join(format!("gpumem-recover-{}-{name}", process::id())))
        }

        fn ring(&self) -> PathBuf {
            ring_path(&self.0)
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
            let _ = fs::remove_file(self.ring());
        }
    }

    const DEAD: RingOwner = RingOwner { pid: u32::MAX as u64, began: 1 };

    /// A recording that ends in the middle of a record, and a ring with two events.
    fn killed(files: &Files, owner: RingOwner) {
        let mut writer = Writer::new(File::create(&files.0).unwrap()).unwrap();
        let thread = ThreadDefinition { thread: ThreadId(1), os_id: 5, name: None };
        writer.write(&Item::Thread(thread)).unwrap();
        writer.flush().unwrap();
        let recorded = writer.written().bytes;
        drop(writer);
        let memory = on_the_heap(16);
        let (mut to, mut from) = ring(memory, owner, recorded);
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
        fs::write(files.ring(), bytes).unwrap();
        let mut file = fs::read(&files.0).unwrap();
        file.extend([1, 0, 0, 0, 99, 0, 0, 0]);
        fs::write(&files.0, file).unwrap();
    }

    #[test]
    fn each_event_is_in_the_recording_once() {
        let files = Files::new("once");
        killed(&files, DEAD);
        assert_eq!(recover(&files.0).unwrap(), Recovered::Added(4));
        let (items, end) = items_of(File::open(&files.0).unwrap()).unwrap();
        assert_eq!(end, crate::capture::End::Complete);
        let numbers = items.iter().filter_map(|item| match item {
            Item::Event(event) => Some(event.number),
            _ => None,
        });
        assert_eq!((items.len(), numbers.collect::<Vec<_>>()), (5, vec![1, 2, 3, 4]));
        assert!(!files.ring().exists());
        assert_eq!(recover(&files.0).unwrap(), Recovered::Complete);
    }

    #[test]
    fn a_process_that_runs_keeps_its_ring() {
        let files = Files::new("running");
        // Linux cuts long names at a byte, which may be within a character.
        _ = fs::write("/proc/self/comm", b"recover\xff");
        let stat = fs::read("/proc/self/stat").unwrap_or_default();
        let stat = String::from_utf8_lossy(&stat);
        let began = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok());
        let Some(began) = began else { return };
        killed(&files, RingOwner { pid: process::id().into(), began });
        let held = File::open(&files.0).unwrap();
        held.lock().unwrap();
        assert_eq!(recover(&files.0).unwrap(), Recovered::IsRunning);
        assert!(files.ring().exists());
        // The lock of a child, which outlives the process.
        killed(&files, RingOwner { pid: process::id().into(), began: began + 1 });
        assert_eq!(recover(&files.0).unwrap(), Recovered::Added(4));
    }

    #[test]
    fn files_that_do_not_belong_together_are_left_alone() {
        let files = Files::new("other");
        killed(&files, DEAD);
        fs::write(&files.0, b"short").unwrap();
        assert!(recover(&files.0).is_err());
        assert!(files.ring().exists());
        // The version is the second word.
        let mut other = fs::read(files.ring()).unwrap();
        other[8] += 1;
        for ring in [other, b"no ring".to_vec()] {
            fs::write(files.ring(), ring).unwrap();
            let error = recover(&files.0).unwrap_err().to_string();
            assert!(error.contains("another version of gpumem: open the recording with"), "{error}");
        }
        fs::write(files.ring(), [0; 4096]).unwrap();
        assert_eq!(recover(&files.0).unwrap(), Recovered::Complete);
        assert!(!files.ring().exists());
        assert_eq!(fs::read(&files.0).unwrap(), b"short");
    }
}
