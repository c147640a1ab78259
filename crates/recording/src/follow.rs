//! Reads a recording while the program writes it.

use std::{
    collections::VecDeque,
    io::{self, Read},
};

use super::{
    budget::Budget,
    definitions::Definitions,
    item::{Item, PartDefinition, RingDefinition, SymbolsDefinition},
    items::{Items, Next},
    reader::{Reader, Skipped, Step},
    record::{End, FILE_HEADER, Records, check_header, length_of},
    totals::{Tally, Totals},
};
use gpumem_core::{
    derive::LedgerView,
    ledger::BlockChange,
    model::{Device, Time},
    report::PeakHolders,
};

/// The approximate memory of a symbol.
const SYMBOL_BYTES: u64 = 256;

/// The bytes of a growing file. Only complete records are read from it.
#[derive(Debug, Default)]
pub struct Growing {
    has_header: bool,
    records: VecDeque<u8>,
    /// The bytes of an incomplete record.
    rest: Vec<u8>,
}

impl Read for Growing {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.records.read(to)
    }
}

impl Growing {
    /// Appends bytes.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.rest.extend_from_slice(bytes);
        let mut at = 0;
        if !self.has_header {
            let Some(header) = self.rest.first_chunk::<FILE_HEADER>() else { return Ok(()) };
            check_header(header)?;
            self.has_header = true;
            at = FILE_HEADER;
        }
        while let Some(length) = length_of(&self.rest[at..]) {
            self.records.extend(&self.rest[at..at + length]);
            at += length;
        }
        self.rest.drain(..at);
        Ok(())
    }
}

/// Reads a recording as it grows. Its events are applied to a ledger.
///
/// The definitions of an event are in the file before it, so nothing is read twice. An exception are the functions at the addresses of
/// stacks, which are added after the program has ended.
///
/// A recording of the latest events continues in a new file when the file is full: see [`continue_in`](Self::continue_in).
#[derive(Debug)]
pub struct Follower {
    reader: Reader<Growing>,
    tally: Tally,
    /// The bytes of the earlier files.
    bytes_before: u64,
    /// Losses that no event of the file reports.
    lost_before: u64,
    changes: Vec<BlockChange>,
}

impl Default for Follower {
    fn default() -> Self {
        let records = Records::after_header(Growing::default());
        let reader = Reader::of(Items::of(records, Budget::default()), Definitions::default(), true);
        Self { reader, tally: Tally::default(), bytes_before: 0, lost_before: 0, changes: Vec::new() }
    }
}

impl Follower {
    /// Reads everything that is available.
    ///
    /// # Errors
    /// Returns the errors of reading, and one of the kind [`InvalidData`](io::ErrorKind::InvalidData) if this is not a recording,
    /// if its version is too new, or if it is damaged.
    pub fn read(&mut self, mut from: impl Read) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return self.check_end(),
                Ok(read) => self.add(&buffer[..read])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Appends bytes.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.reader.items.underlying().add(bytes)?;
        while let Some(step) = self.reader.step_observed(&mut self.changes)? {
            match step {
                Step::Event(event) => self.tally.add(&event, &self.changes),
                Step::Totals(totals) => {
                    self.lost_before = totals.lost.saturating_sub(self.reader.ledger().counts().lost);
                    self.tally.continue_from(*totals);
                }
                Step::Label(_) | Step::Allocator(_) => continue,
            }
            self.changes.clear();
        }
        self.check_end()
    }

    fn check_end(&self) -> io::Result<()> {
        let in_file = |at: &u64| at.saturating_sub(self.bytes_before);
        let text = match self.reader.end() {
            Some(End::Damaged { at, why }) => format!("it is damaged at byte {}: {why}", in_file(at)),
            Some(End::AboveLimit { at, limit }) => format!("the data after byte {} is not read: {limit}", in_file(at)),
            _ => return Ok(()),
        };
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// Returns the offset in the file after its last complete record.
    pub fn offset(&self) -> u64 {
        let bytes = self.reader.items.bytes() - self.bytes_before;
        // Before the first record, the header may be incomplete, so it is read again.
        if bytes == FILE_HEADER as u64 { 0 } else { bytes }
    }

    /// Discards the bytes after the last complete record. The caller must read the file again from [`offset`](Self::offset), because the
    /// program may replace incomplete or damaged bytes.
    pub fn rewind(&mut self) {
        *self.reader.items.rewind() = Growing { has_header: self.offset() > 0, ..Growing::default() };
    }

    /// Continues with a new file after the end of the previous one. Returns true if all events before its start were read. Otherwise
    /// nothing changes, and only a new follower can read the new file.
    pub fn continue_in(&mut self, next: &FileStart) -> bool {
        let is_next = next.is_same(&self.file_start()) && !next.is_peaks && next.after <= self.reader.latest();
        if is_next {
            *self.reader.items.rewind() = Growing::default();
            self.bytes_before = self.reader.items.bytes() - FILE_HEADER as u64;
            self.reader.start_file();
        }
        is_next
    }

    /// Returns the start of the current file.
    pub fn file_start(&self) -> FileStart {
        let definitions = self.reader.definitions();
        FileStart::of(definitions.part(), definitions.ring(), definitions.process().pid)
    }

    /// Returns the number of events between the last one that was read and the first one after the start of a file.
    pub fn events_before(&self, next: &FileStart) -> u64 {
        next.after.saturating_sub(self.reader.latest())
    }

    /// Adds the functions at an address, which a recording contains only after its program has ended.
    pub fn add_symbols(&mut self, symbols: SymbolsDefinition) {
        let bytes = symbols.symbols.len() as u64 * SYMBOL_BYTES;
        self.reader.define(Item::Symbols(symbols), bytes);
    }

    /// Returns the approximate memory of the follower in bytes.
    pub fn memory(&self) -> u64 {
        self.reader.memory()
    }

    /// Returns the definitions that were read.
    pub fn definitions(&self) -> &Definitions {
        self.reader.definitions()
    }

    /// Returns the ledger after the last event that was read.
    pub fn ledger(&self) -> &dyn LedgerView {
        self.reader.ledger()
    }

    /// Returns the time of the ledger's last event.
    pub fn time(&self) -> Time {
        self.reader.time()
    }

    /// Returns the totals since the recording started.
    pub fn totals(&self) -> Totals {
        let lost = self.lost_before.saturating_add(self.reader.ledger().counts().lost);
        Totals { lost, ..self.tally.totals().clone() }
    }

    /// Returns the peak of a device since the last call, including the level then.
    pub fn take_recent_peak(&mut self, device: Device) -> u64 {
        self.tally.take_recent(device)
    }

    /// Returns the allocations that made up a device's peak, if they are known and there are any.
    pub fn device_peak(&mut self, device: Device) -> Option<PeakHolders> {
        self.reader.device_peak(device)
    }

    /// Returns the data that was left out so far.
    pub fn skipped(&self) -> Skipped {
        self.reader.skipped()
    }
}

/// The start of a file of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStart {
    /// The unique id of the recording. Only recordings of processes have one.
    pub recording: Option<u64>,
    /// The id of the process that writes the recording, in the process's own pid namespace; 0 if the recording does not contain it.
    pub pid: u32,
    /// The file contains the blocks that were live after the events up to this number, and all later events.
    pub after: u64,
    /// True if the file contains only the peaks.
    pub is_peaks: bool,
}

impl FileStart {
    fn of(part: Option<PartDefinition>, ring: Option<RingDefinition>, pid: u32) -> Self {
        let (after, is_peaks) = part.map_or((0, false), |part| (part.after, part.is_peaks));
        Self { recording: ring.map(|ring| ring.recording), pid, after, is_peaks }
    }

    /// Reads the start of a file.
    ///
    /// # Errors
    /// Returns an error if reading fails, or if the data is not a recording.
    pub fn read(from: impl Read) -> io::Result<Self> {
        let mut items = Items::of(Records::new(from)?, Budget::default());
        let (mut ring, mut pid) = (None, 0);
        while let Some(Next::Other(item, _)) = items.next()? {
            match *item {
                Item::Ring(definition) => ring = Some(definition),
                Item::Process(process) => pid = process.pid,
                Item::Part(part) => return Ok(Self::of(Some(part), ring, pid)),
                // The writer puts these three first.
                _ => break,
            }
        }
        Ok(Self::of(None, ring, pid))
    }

    /// Returns whether both are files of the same recording.
    pub fn is_same(&self, other: &Self) -> bool {
        self.recording.is_some() && self.recording == other.recording
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fastrand::Rng;

    use super::*;
    use crate::{Part, Process, RecordedEvent, Skipped, Writer, item::ThreadDefinition};
    use gpumem_core::{
        ledger::NodeId,
        model::{
            Block, Bytes, CallsiteId, Counted, Device, EventKind, Family, Gauge, Key, MemKind, ScopeId, ScopeSpec,
            Source, StackId, ThreadId,
        },
    };

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn recording() -> Vec<u8> {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file).unwrap();
        let process = Process { pid: 17, ..Process::default() };
        writer.write(&Item::Process(process)).unwrap();
        writer.write(&Item::Thread(ThreadDefinition { thread: ThreadId(1), os_id: 5, name: None })).unwrap();
        for number in 1..=60 {
            let key = Key::from_raw(512 * (1 + number / 2));
            let kind = if number % 2 == 0 {
                EventKind::Alloc { key, block: Block::new(DEVICE, Bytes::new(number), MemKind::Device) }
            } else {
                EventKind::Free { key: Key::from_raw(512 * (1 + (number - 1) / 2)), block: None }
            };
            let time = Duration::from_millis(number);
            if number > 1 {
                writer
                    .write_event(&RecordedEvent { number: number - 1, ticks: number, time, thread: ThreadId(1), kind })
                    .unwrap();
            }
            if number % 7 == 0 {
                writer.flush().unwrap();
            }
        }
        writer.flush().unwrap();
        drop(writer);
        file
    }

    #[test]
    fn the_ledger_is_the_same_however_the_file_grows() {
        let file = recording();
        let result = |pieces: usize| {
            let mut follower = Follower::default();
            for piece in file.chunks(pieces) {
                follower.read(piece).unwrap();
            }
            let stats = follower.ledger().stats();
            assert_eq!(follower.skipped(), Skipped::default());
            assert_eq!(follower.definitions().process().pid, 17);
            (stats[0].on_device.bytes.current, stats[0].on_device.bytes.peak, follower.time())
        };
        let whole = result(file.len());
        assert_eq!(whole, (60, 60, Duration::from_millis(60)));
        for pieces in [1, 7, 16, 100] {
            assert_eq!(result(pieces), whole, "{pieces}");
        }
    }

    #[test]
    fn what_is_no_recording_or_damaged_is_an_error() {
        assert!(Follower::default().read(&b"this is not a recording"[..]).is_err());
        let mut file = recording();
        let at = file.len() - 3;
        file[at] ^= 1;
        let error = Follower::default().read(&file[..]).unwrap_err();
        assert!(error.to_string().starts_with("it is damaged at byte "), "{error}");
        // The reader does not wait for an impossible length.
        let mut file = recording();
        file.extend([255; 16]);
        let mut follower = Follower::default();
        assert!(follower.read(&file[..]).is_err());
        assert!(follower.read(io::empty()).is_err(), "it is still damaged");
    }

    /// Another program appends to the file, and the writer then overwrites that.
    #[test]
    fn what_was_incomplete_or_damaged_is_read_again() {
        let file = recording();
        for garbage in [&[0; 7][..], &[255; 16]] {
            let mut follower = Follower::default();
            follower.read(&file[..file.len() / 2]).unwrap();
            let complete = usize::try_from(follower.offset()).unwrap();
            assert!(complete > FILE_HEADER && complete < file.len() / 2, "{complete}");
            follower.rewind();
            assert_eq!(follower.read(garbage).is_err(), garbage.len() == 16);
            follower.rewind();
            assert_eq!(follower.offset(), complete as u64);
            follower.read(&file[complete..]).unwrap();
            assert_eq!((follower.offset(), follower.time()), (file.len() as u64, Duration::from_millis(60)));
            assert_eq!(follower.skipped(), Skipped::default());
        }
    }

    /// The actions of a program: events, and threads whose ids are reused.
    fn program(seed: u64) -> Vec<Item> {
        let mut numbers = Rng::with_seed(seed);
        let mut random = |below: u64| numbers.u64(..below);
        let (mut items, mut live) = (Vec::new(), Vec::<u64>::new());
        // The open scopes: their threads, and the threads that have entered them.
        let (mut open, mut inside) = (Vec::<(ScopeId, u32)>::new(), Vec::<(ScopeId, u32)>::new());
        let mut number = 0;
        while number < 600 {
            let thread = u32::try_from(random(3)).unwrap() + 1;
            let kind = match random(20) {
                0 | 1 => {
                    let spec = ScopeSpec {
                        device: DEVICE,
                        callsite: CallsiteId(10 + u32::try_from(random(4)).unwrap()),
                        gauge: Gauge::Exact,
                        source: Source::Dispatch,
                        counts: if random(3) == 0 { Counted::Task } else { Counted::OwnAndUnscoped },
                        at_peak: random(2) == 0,
                        every: Duration::ZERO,
                    };
                    let scope = ScopeId(number + 1);
                    open.push((scope, thread));
                    EventKind::Open { scope, spec }
                }
                2 if !open.is_empty() => {
                    let (scope, thread) = open.swap_remove(usize::try_from(random(open.len() as u64)).unwrap());
                    inside.retain(|(of, _)| *of != scope);
                    number += 1;
                    items.push(event(number, thread, EventKind::Close { scope }));
                    continue;
                }
                3 if !open.is_empty() => {
                    let (scope, _) = open[usize::try_from(random(open.len() as u64)).unwrap()];
                    inside.push((scope, thread));
                    EventKind::Enter { scope }
                }
                4 if !inside.is_empty() => {
                    let (scope, thread) = inside.swap_remove(usize::try_from(random(inside.len() as u64)).unwrap());
                    number += 1;
                    items.push(event(number, thread, EventKind::Leave { scope }));
                    continue;
                }
                5 if random(8) == 0 => EventKind::Lost { count: 2 },
                6 if random(4) == 0 => EventKind::Rejected {
                    device: Some(DEVICE),
                    bytes: Bytes::new(1 + random(1_000)),
                    kind: MemKind::Device,
                    stack: StackId::NONE,
                },
                7 if random(8) == 0 => {
                    inside.retain(|(_, of)| *of != thread);
                    items.push(Item::ThreadReused(ThreadId(thread)));
                    continue;
                }
                8..14 => {
                    live.push(number + 1);
                    let kind =
                        [MemKind::Device, MemKind::Pool, MemKind::PinnedHost][usize::try_from(random(3)).unwrap()];
                    let block = Block::new(DEVICE, Bytes::new(1 + random(1_000)), kind);
                    EventKind::Alloc { key: Key::from_raw(512 * (number + 1)), block }
                }
                _ if !live.is_empty() => {
                    let key = live.swap_remove(usize::try_from(random(live.len() as u64)).unwrap());
                    EventKind::Free { key: Key::from_raw(512 * key), block: None }
                }
                _ => continue,
            };
            number += 1;
            items.push(event(number, thread, kind));
        }
        items
    }

    fn event(number: u64, thread: u32, kind: EventKind) -> Item {
        let time = Duration::from_millis(number);
        Item::Event(RecordedEvent { number, ticks: number, time, thread: ThreadId(thread), kind })
    }

    fn file(items: impl IntoIterator<Item = Item>) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new()).unwrap();
        let ring = RingDefinition { segment: None, recording: 7 };
        [Item::Ring(ring)].into_iter().chain(items).for_each(|item| writer.write(&item).unwrap());
        writer.finish().unwrap()
    }

    /// Returns the totals, and the live blocks with their scopes.
    fn results(follower: &Follower) -> (Totals, Vec<(u64, Bytes, Vec<CallsiteId>)>) {
        let (nodes, blocks) = (follower.ledger().nodes(), follower.ledger().blocks(None));
        let path = |node: NodeId| {
            let above = |node: &NodeId| Some(nodes[node.0 as usize].1.parent).filter(|parent| *parent != NodeId::NONE);
            let path = std::iter::successors(Some(node), above).map(|node| nodes[node.0 as usize].1.callsite);
            path.collect()
        };
        let mut live: Vec<_> = blocks.iter().map(|block| (block.number, block.bytes, path(block.group.node))).collect();
        live.sort_by_key(|(number, ..)| *number);
        assert_eq!(follower.skipped(), Skipped::default());
        (follower.totals(), live)
    }

    /// The recording of the latest events has three files. One reader follows it, one starts at each file, and one reads all events.
    #[test]
    fn a_reader_that_starts_late_knows_what_the_others_know() {
        for seed in 0..30 {
            let items = program(seed);
            let cuts = [0, 150 + usize::try_from(seed).unwrap(), 400, items.len()];
            let (mut part, mut whole, mut follower) = (Part::latest(), Follower::default(), Follower::default());
            whole.read(&file([])[..]).unwrap();
            for (at, cut) in cuts.windows(2).enumerate() {
                let start =
                    if at == 0 { Vec::new() } else { [vec![Item::Part(part.definition())], part.items()].concat() };
                let this = file(start.into_iter().chain(items[cut[0]..cut[1]].iter().cloned()));
                if at > 0 {
                    assert!(follower.continue_in(&FileStart::read(&this[..]).unwrap()));
                }
                let mut late = Follower::default();
                late.read(&this[..]).unwrap();
                follower.read(&this[..]).unwrap();
                let more = file(items[cut[0]..cut[1]].iter().cloned());
                whole.read(&more[FILE_HEADER..]).unwrap();
                let expected = results(&whole);
                assert_eq!(results(&follower), expected, "seed {seed}, file {at}");
                assert_eq!(results(&late), expected, "seed {seed}, file {at}, begun late");
                for item in &items[cut[0]..cut[1]] {
                    match item {
                        Item::Event(event) => part.apply(event),
                        Item::ThreadReused(thread) => part.start_thread(*thread),
                        _ => {}
                    }
                }
            }
            assert!(!follower.continue_in(&FileStart { after: 1_000, ..follower.file_start() }), "events are missing");
            assert_eq!(follower.events_before(&FileStart { after: 1_000, ..follower.file_start() }), 400);
        }
    }
}
