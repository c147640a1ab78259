//! Creates a recording from a snapshot that a program saved with `torch.cuda.memory._dump_snapshot`. In this recording,
//! only PyTorch's allocator calls the driver.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io::{self, BufRead, Read},
    time::Duration,
};

use gpumem_core::model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, Space, StackId, ThreadId};
use gpumem_recording::{
    AllocatorAction as Action, ClockPair, CodeAddress, Item, PartDefinition, Process, RecordedEvent, StackDefinition,
    Writer,
};

use super::{
    super::{content::Content, ranges::remove_range},
    address,
    before::Before,
    history::{LoggedEvent, TorchHistory},
    objects::Objects,
    pickle,
};

/// PyTorch's library that calls the driver, which is the first library of the history.
const LIBRARY: CodeAddress = CodeAddress { module: 1, offset: 0 };

/// Returns whether a file starts as PyTorch's snapshots do.
pub(crate) fn is_snapshot(mut file: &File) -> io::Result<bool> {
    let mut head = [0; 2];
    let is_pickle = match file.read_exact(&mut head) {
        Ok(()) => pickle::is_pickle(head),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(error),
    };
    io::Seek::rewind(&mut file)?;
    Ok(is_pickle)
}

/// Creates a recording from a snapshot of `length` bytes.
///
/// # Errors
/// Returns an error if the file cannot be read. The kind is [`InvalidData`](io::ErrorKind::InvalidData) if it is not a
/// snapshot.
pub(crate) fn recording_of(from: impl BufRead, length: u64) -> io::Result<Vec<u8>> {
    let mut objects = Objects::new(length);
    let snapshot = pickle::read(from, length, &mut objects)?;
    let history = objects.history(snapshot)?;
    let first = history.devices.iter().filter_map(|device| device.trace.first()).min().unwrap_or(0);
    let started = Duration::from_micros(first);
    let mut writer = Writer::new(Vec::new())?;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    writer.write(&Item::Process(Process { started, version, ..Process::default() }))?;
    let content = Content { started: Some(started), ..Content::default() };
    super::write(&history, &mut io::empty(), &content, &mut writer)?;
    write_driver(&history, first, &mut writer)?;
    writer.finish()
}

/// Returns the calls that PyTorch's allocator made to the driver, with their times in microseconds since the recording
/// started. The memory that the allocator held before comes first.
fn driver_events(history: &TorchHistory, started: u64) -> io::Result<Vec<(u64, Device, LoggedEvent)>> {
    let mut events = Vec::new();
    for of_device in &history.devices {
        let device = Device { family: Family::Cuda, ordinal: of_device.ordinal };
        // The clock may be set back, but the times must not fall.
        let mut time = 0;
        for piece in of_device.trace.pieces(&mut io::empty()) {
            for event in piece? {
                time = event.micros.saturating_sub(started).max(time);
                if matches!(event.action, Action::SegmentAlloc | Action::SegmentFree | Action::OutOfMemory) {
                    events.push((time, device, event));
                }
            }
        }
    }
    events.sort_by_key(|(time, ..)| *time);
    Ok(events)
}

/// Writes the calls that PyTorch's allocator made to the driver.
fn write_driver(history: &TorchHistory, started: u64, writer: &mut Writer<Vec<u8>>) -> io::Result<()> {
    let mut driver =
        Driver { history, writer, number: 0, stacks: BTreeSet::new(), parts: HashMap::new(), left: HashMap::new() };
    let mut is_part_missing = false;
    for of_device in &history.devices {
        let device = Device { family: Family::Cuda, ordinal: of_device.ordinal };
        let Before { segments, blocks, .. } = of_device.before(&mut io::empty())?;
        is_part_missing |= !segments.is_empty() || !blocks.is_empty();
        for (address, (bytes, about)) in segments {
            driver.alloc(0, device, address, bytes, about.is_expandable, 0)?;
        }
    }
    if is_part_missing {
        driver.writer.write(&Item::Part(PartDefinition { is_peaks: false, after: driver.number }))?;
    }
    for (time, device, event) in driver_events(history, started)? {
        driver.event(time, device, &event)?;
    }
    let ends = history.devices.iter().filter_map(|device| device.trace.last());
    let end = ends.max().unwrap_or(started).saturating_sub(started);
    // A snapshot without a history is a single moment.
    [0].into_iter().chain((end > 0).then_some(end)).try_for_each(|micros| {
        let time = Duration::from_micros(micros);
        driver.writer.write(&Item::Clock(ClockPair { ticks: ticks(micros), time }))
    })
}

/// Returns the value of the processor's counter at a time. The counter counts nanoseconds.
fn ticks(micros: u64) -> u64 {
    micros.saturating_mul(1_000)
}

/// The driver's side of PyTorch's allocator.
struct Driver<'a> {
    history: &'a TorchHistory,
    writer: &'a mut Writer<Vec<u8>>,
    /// The number of the latest event.
    number: u64,
    /// The stacks that are already written.
    stacks: BTreeSet<u32>,
    /// For each part of a block, by address: its length, and the number of the event that allocated the block.
    parts: HashMap<Device, BTreeMap<u64, (u64, u64)>>,
    /// The key of each block, and the number of its bytes that are not freed.
    left: HashMap<u64, (Key, u64)>,
}

impl Driver<'_> {
    fn event(&mut self, time: u64, device: Device, event: &LoggedEvent) -> io::Result<()> {
        let LoggedEvent { action, is_part, address, bytes, stack, .. } = *event;
        match action {
            Action::SegmentAlloc => self.alloc(time, device, address, bytes, is_part, stack),
            Action::SegmentFree => self.free(time, device, address, bytes),
            _ => {
                let (bytes, stack) = (Bytes::new(bytes), self.stack(stack)?);
                self.put(time, EventKind::Rejected { device: Some(device), bytes, kind: MemKind::Device, stack })
            }
        }
    }

    fn alloc(
        &mut self,
        time: u64,
        device: Device,
        address: u64,
        bytes: u64,
        is_part: bool,
        stack: u32,
    ) -> io::Result<()> {
        let stack = self.stack(stack)?;
        let number = self.number + 1;
        // Parts of an expandable segment may be freed in other pieces than those in which they were mapped.
        let (key, kind) = if is_part {
            (Key::new(Space::Handle, number), MemKind::Vmm)
        } else {
            (Key::new(Space::Address, address), MemKind::Device)
        };
        self.parts.entry(device).or_default().insert(address, (bytes, number));
        self.left.insert(number, (key, bytes));
        self.put(time, EventKind::Alloc { key, block: Block { stack, ..Block::new(device, Bytes::new(bytes), kind) } })
    }

    fn free(&mut self, time: u64, device: Device, address: u64, bytes: u64) -> io::Result<()> {
        let mut removed = Vec::new();
        let parts = self.parts.entry(device).or_default();
        remove_range(parts, address, bytes, |(_, block), bytes| removed.push((block, bytes)));
        for (block, bytes) in removed {
            let Some((key, left)) = self.left.get_mut(&block) else { continue };
            *left = left.saturating_sub(bytes);
            let (key, bytes) = (*key, Bytes::new(*left));
            if bytes == Bytes::ZERO {
                self.left.remove(&block);
                self.put(time, EventKind::Free { key, block: None })?;
            } else {
                self.put(time, EventKind::Shrink { key, bytes })?;
            }
        }
        Ok(())
    }

    fn put(&mut self, time: u64, kind: EventKind) -> io::Result<()> {
        self.number += 1;
        let (ticks, time) = (ticks(time), Duration::from_micros(time));
        self.writer.write_event(&RecordedEvent { number: self.number, ticks, time, thread: ThreadId(1), kind })
    }

    /// Writes a stack of the history once, with the driver call from PyTorch's library on top. Returns its id.
    fn stack(&mut self, number: u32) -> io::Result<StackId> {
        let id = StackId(
            u32::try_from(self.history.stacks.len()).unwrap_or(u32::MAX).saturating_add(number).saturating_add(1),
        );
        if self.stacks.insert(number) {
            let frames = number.checked_sub(1).map_or(&[][..], |at| &self.history.stacks[at as usize]);
            let addresses =
                [LIBRARY].into_iter().chain(frames.iter().map(|frame| address(self.history, *frame))).collect();
            self.writer.write(&Item::Stack(StackDefinition { id, addresses }))?;
        }
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SNAPSHOT: &[u8] = include_bytes!("../../../tests/data/snapshot-4.pickle");

    /// Returns why a pickle is rejected.
    #[track_caller]
    fn error_of(pickle: &[u8]) -> String {
        let error = recording_of(pickle, pickle.len() as u64).expect_err("it is refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        error.to_string()
    }

    #[test]
    fn a_snapshot_that_is_cut_is_rejected() {
        assert!(recording_of(SNAPSHOT, SNAPSHOT.len() as u64).is_ok());
        for length in 0..SNAPSHOT.len() {
            error_of(&SNAPSHOT[..length]);
        }
    }

    #[test]
    fn code_is_named_and_not_run() {
        let system = b"cos\nsystem\n";
        for (opcodes, said) in [
            (&system[..], "byte 2 of the pickle: the opcode GLOBAL would run `os.system`."),
            (
                b"\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
                "byte 14 of the pickle: the opcode STACK_GLOBAL would run `os.system`.",
            ),
            (b"(X\x02\0\0\0idios\nsystem\n.", "INST would run `os.system`."),
            (b"(No.", "OBJ would run code."),
            (b"N)R.", "REDUCE would run code."),
            (b"N)\x81.", "NEWOBJ would run code."),
            (b"N)}\x92.", "NEWOBJ_EX would run code."),
            (b"N}b.", "BUILD would run code."),
            (b"\x82\x01.", "EXT would run code."),
            (b"\x83\x01\x01.", "EXT would run code."),
            (b"\x84\x01\0\0\0.", "EXT would run code."),
            (b"P1\n.", "PERSID would run code."),
            (b"NQ.", "BINPERSID would run code."),
            (b"\x8f.", "no snapshot has the opcode 0x8f"),
        ] {
            let why = error_of(&[b"\x80\x04", opcodes].concat());
            assert!(why.contains(said), "{why}");
        }
    }

    #[test]
    fn pickles_that_no_writer_makes_are_rejected() {
        let refs = |count: usize| b"h\0".repeat(count);
        let event = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeK\x01u";
        let traces = |traces: &[&[u8]]| {
            let start: &[u8] = b"}(\x8c\x08segments]\x8c\x0ddevice_traces](";
            [start, &traces.concat(), b"eu."].concat()
        };
        let trace = [b"](", &event[..], b"e\x94"].concat();
        let segment = |bytes: &[u8], device: &[u8], address: &[u8]| {
            let names: [&[u8]; 3] = [b"}(\x8c\x0atotal_size", b"\x8c\x06device", b"\x8c\x07address"];
            [names[0], bytes, names[1], device, names[2], address, b"u"].concat()
        };
        assert_eq!(recording_of(&*traces(&[&trace]), 1 << 20).map(drop).map_err(|error| error.to_string()), Ok(()));
        for (opcodes, said) in [
            (b"(".repeat(101), "more than 100 values are inside each other"),
            (b"X\xff\xff\xff\xff".to_vec(), "a value has 4294967295 bytes, which is more than the file has"),
            (b"U\x01".to_vec(), "a value has 1 byte, which is more than the file has"),
            (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(), "more than the file has"),
            (b"\x8b\xff\xff\xff\x7f".to_vec(), "more than the file has"),
            (b"Nr\xff\xff\xff\xff".to_vec(), "the index of a value is too high"),
            (b"Nj\xff\xff\xff\xff".to_vec(), "it refers to a value that does not exist"),
            (b"N".repeat(1 << 17), "a snapshot of this size has fewer values"),
            (b"]".repeat(1 << 17), "a snapshot of this size has fewer values"),
            ([b"]\x94(", &refs(1 << 17)[..]].concat(), "a snapshot of this size has fewer values"),
            ([b"]\x94".to_vec(), [b"(", &refs(1000)[..], b"e"].concat().repeat(100)].concat(), "has fewer values"),
            (b"(t(u".to_vec(), "only lists and dictionaries get values"),
            (b"}(Nu".to_vec(), "a field has no value"),
            (b"(\x85".to_vec(), "it needs a value that does not exist"),
            (b"e".to_vec(), "it needs a mark that does not exist"),
            ([&event[..], b"(NNu"].concat(), "a complete dictionary gets more fields"),
            ([b"](", &event[..], b"\x94h\0e"].concat(), "a list has something twice"),
            (traces(&[&trace, b"h\0"]), "an event of the snapshot is in two lists"),
            (b"].".to_vec(), "it is not a PyTorch snapshot"),
            (b"N.".to_vec(), "it is not a PyTorch snapshot"),
            (b"}(\x8c\x08segments]u.".to_vec(), "it is not a PyTorch snapshot"),
            (
                b"}(\x8c\x06action\x8c\x05alloc\x8c\x04size\x8a\x07\0\0\0\0\0\0\x01u".to_vec(),
                "no GPU has an address or a size as large as this one",
            ),
            (b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeNu".to_vec(), "the `size` of an event is not"),
            (b"}(\x8c\x06action\x8c\x05alloc\x8c\x04sizeK\x01u".to_vec(), "the `addr` of an event is not"),
            (b"}(\x8c\x05state\x8c\x08inactiveu".to_vec(), "the `size` of a block is not"),
            (segment(b"K\x01", b"K\0", b"N"), "the `address` of a segment is not"),
            (segment(b"N", b"K\0", b"K\x01"), "the `total_size` of a segment is not"),
        ] {
            let why = error_of(&[b"\x80\x04", &opcodes[..]].concat());
            assert!(why.contains(said), "{said}: {why}");
        }
        // `None`, a text, a float, -1, a boolean and 128.
        for device in [&b"N"[..], b"\x8c\x011", b"G\x3f\xf0\0\0\0\0\0\0", b"J\xff\xff\xff\xff", b"\x88", b"K\x80"] {
            let why = error_of(&[b"\x80\x04", &segment(b"K\x01", device, b"K\x01")[..]].concat());
            assert!(why.contains("the `device` of a segment is not the number of a device"), "{why}");
        }
        assert!(error_of(b"\x80\x04}(\x8c\x0atotal_sizeK\x01u").contains("the `device` of a segment"));
    }

    /// Changed bytes lead to a recording or to an error, never to a panic.
    #[test]
    fn changed_snapshots_do_no_harm() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut below = |bound: usize| random.usize(..bound);
        let (mut read, runs) = (0, 1_000);
        for _ in 0..runs {
            let mut pickle = SNAPSHOT.to_vec();
            for _ in 0..=below(3) {
                let at = below(pickle.len());
                match below(3) {
                    0 => pickle[at] = [0, 1, b'(', b'e', b'u', 0x7f, 0x80, 0xff][below(8)],
                    1 => drop(pickle.drain(at..(at + below(30)).min(pickle.len()))),
                    _ => {
                        let part = pickle[at..(at + below(60)).min(pickle.len())].to_vec();
                        drop(pickle.splice(at..at, part));
                    }
                }
            }
            read += usize::from(recording_of(&*pickle, pickle.len() as u64).is_ok());
        }
        assert!((runs / 20..runs).contains(&read), "{read} of {runs} were read");
    }
}
