//! A snapshot that a program saved with `torch.cuda.memory._dump_snapshot` becomes a recording: that of a program in which only PyTorch's
//! allocator calls the driver.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io::{self, BufRead, Read},
    time::Duration,
};

use gpumem_core::{
    model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, Space, StackId, ThreadId},
    recording::{
        AllocatorAction as Action, ClockPair, CodeAddress, Item, PartDefinition, Process, RecordedEvent,
        StackDefinition, Writer,
    },
};

use super::{
    super::{content::Content, ranges::remove_range},
    address,
    history::{LoggedEvent, TorchHistory},
    objects::Objects,
    pickle,
};

/// The library of PyTorch that calls the driver is the first one of the history.
const LIBRARY: CodeAddress = CodeAddress { module: 1, offset: 0 };

/// Whether a file begins as the snapshots of PyTorch do.
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

/// Makes a recording of a snapshot of `length` bytes.
///
/// # Errors
/// Of reading. Of the kind [`InvalidData`](io::ErrorKind::InvalidData) if this is no snapshot.
pub(crate) fn recording_of(from: impl BufRead, length: u64) -> io::Result<Vec<u8>> {
    let mut objects = Objects::new(length);
    let snapshot = pickle::read(from, length, &mut objects)?;
    let history = objects.history(snapshot)?;
    let first = history.devices.iter().filter_map(|device| device.trace.first()).min().unwrap_or(0);
    let began = Duration::from_micros(first);
    let mut writer = Writer::new(Vec::new())?;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    writer.write(&Item::Process(Process { began, version, ..Process::default() }))?;
    let content = Content { began: Some(began), ..Content::default() };
    super::write(&history, &mut io::empty(), &content, &mut writer)?;
    write_driver(&history, first, &mut writer)?;
    writer.finish()
}

/// What PyTorch's allocator asked the driver for, with the times in microseconds since the recording began. First comes what it had
/// before.
fn driver_events(history: &TorchHistory, began: u64) -> io::Result<Vec<(u64, Device, LoggedEvent)>> {
    let mut events = Vec::new();
    for of_device in &history.devices {
        let device = Device { family: Family::Cuda, ordinal: of_device.ordinal };
        // The clock may be set back.
        let mut time = 0;
        for piece in of_device.trace.pieces(&mut io::empty()) {
            for event in piece? {
                time = event.micros.saturating_sub(began).max(time);
                if matches!(event.action, Action::SegmentAlloc | Action::SegmentFree | Action::OutOfMemory) {
                    events.push((time, device, event));
                }
            }
        }
    }
    events.sort_by_key(|(time, ..)| *time);
    Ok(events)
}

/// Writes what PyTorch's allocator asked the driver for.
fn write_driver(history: &TorchHistory, began: u64, writer: &mut Writer<Vec<u8>>) -> io::Result<()> {
    let mut driver =
        Driver { history, writer, number: 0, stacks: BTreeSet::new(), parts: HashMap::new(), left: HashMap::new() };
    let mut is_part_missing = false;
    for of_device in &history.devices {
        let device = Device { family: Family::Cuda, ordinal: of_device.ordinal };
        let (segments, blocks) = of_device.before(&mut io::empty())?;
        is_part_missing |= !segments.is_empty() || !blocks.is_empty();
        for (address, (bytes, is_part)) in segments {
            driver.alloc(0, device, address, bytes, is_part, 0)?;
        }
    }
    if is_part_missing {
        driver.writer.write(&Item::Part(PartDefinition { is_peaks: false, after: driver.number }))?;
    }
    for (time, device, event) in driver_events(history, began)? {
        driver.event(time, device, &event)?;
    }
    let ends = history.devices.iter().filter_map(|device| device.trace.last());
    let end = ends.max().unwrap_or(began).saturating_sub(began);
    [0, end].into_iter().try_for_each(|micros| {
        let time = Duration::from_micros(micros);
        driver.writer.write(&Item::Clock(ClockPair { ticks: ticks(micros), time }))
    })
}

/// The counter of the processor at a time: it counts nanoseconds.
fn ticks(micros: u64) -> u64 {
    micros.saturating_mul(1_000)
}

/// What the driver does for PyTorch's allocator.
struct Driver<'a> {
    history: &'a TorchHistory,
    writer: &'a mut Writer<Vec<u8>>,
    /// The number of the newest event.
    number: u64,
    /// The stacks that are written.
    stacks: BTreeSet<u32>,
    /// Where the parts of blocks begin, their lengths, and the events that allocated the blocks.
    parts: HashMap<Device, BTreeMap<u64, (u64, u64)>>,
    /// The keys of the blocks, and how many bytes are left of them.
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
                self.put(time, EventKind::Refused { device: Some(device), bytes, kind: MemKind::Device, stack })
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
        // Parts of an expandable segment are freed in other parts than they came in.
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

    /// The number of a stack of the history below which PyTorch's library called the driver.
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
