//! Reads a recording.

use std::{
    collections::{BTreeSet, HashMap},
    io::{self, BufReader},
    path::Path,
    time::Duration,
};

use gpumem_core::{
    ledger::{AllocGroup, BlockChange, BlockChangeKind, KnownPool},
    model::{Block, Device, EventKind, MemKind, ScopeId},
};
use gpumem_recording::{Definitions, Reader, RecordedEvent, Step};

use super::{
    block_lives::{BlockLife, LIVE, Lives, NewBlock, When},
    device::DeviceHistory,
    driver_blocks::DriverMemory,
    names::Origins,
    overlaps::OverlapFinder,
    recorded::{History, MarkedMoment, RejectedRequest, ScopeLife, UnknownValue},
    recording_bytes::RecordingBytes,
    tensors,
    time::nanos,
};
use crate::{
    failure::Failure,
    files,
    progress::Progress,
    recording::{is_snapshot, recording_of},
};

impl History {
    /// Reads a whole recording up to its last readable record. If that is not its end, [`incomplete`](Self::incomplete)
    /// returns the reason.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| {
            let next = if error.kind() == io::ErrorKind::InvalidData {
                "pass a file that `gpumem run`, GPUMEM_CAPTURE or torch.cuda.memory._dump_snapshot wrote"
            } else {
                ""
            };
            Failure::new(format!("`{}` cannot be read", path.display()), error, next)
        };
        // Pipes are rejected too, because they cannot be read twice.
        let file = files::open_to_read(path).map_err(|error| {
            let next = match error.kind() {
                io::ErrorKind::InvalidInput => "write the recording to a file first",
                io::ErrorKind::UnexpectedEof => "record the program again",
                _ => "",
            };
            Failure::new(format!("`{}` cannot be read", path.display()), error, next)
        })?;
        let length = file.metadata().map_err(failed)?.len();
        let is_snapshot = is_snapshot(&file).map_err(failed)?;
        let progress = |bytes| Progress::new(&format!("reading {}", path.display()), bytes);
        // The reader goes through the recording twice.
        let reader = if is_snapshot {
            let from = BufReader::with_capacity(1 << 16, RecordingBytes::new(file, progress(length)));
            let recording = recording_of(from, length).map_err(failed)?;
            let progress = progress(2 * recording.len() as u64);
            // How much work the recording may take depends on the size of the snapshot.
            Reader::of_size(RecordingBytes::new(io::Cursor::new(recording), progress), length)
        } else {
            Reader::new(RecordingBytes::new(BufReader::with_capacity(1 << 16, file), progress(2 * length)))
        };
        let mut reading = HistoryReading::new(reader.map_err(failed)?);
        // The ledger adds the changes that an event makes to blocks to this list.
        let mut changes = Vec::new();
        while let Some(step) = reading.reader.step_observed(&mut changes).map_err(failed)? {
            match step {
                Step::Event(event) => reading.event(&event, &mut changes),
                Step::Label(label) => {
                    let name = &label.label.name;
                    if !reading.history.driver.label(label.number, &label.label)
                        && let Some(block) = reading.live.get(&label.number)
                    {
                        reading.history.labels.insert(*block, name.as_str().into());
                    }
                }
                Step::Allocator(events) => {
                    let new = reading.tensors.add(&events);
                    reading.reader.spend(new * ORIGIN.0, new * ORIGIN.1);
                }
                Step::Totals(totals) => {
                    for peak in &totals.driver_peaks {
                        // Devices with pools were found in the events before this one.
                        if let Some(device) = reading.devices.get(&peak.device) {
                            let known = &mut reading.history.devices[usize::from(*device)].driver_peak;
                            *known = peak.bytes.max(*known);
                        }
                    }
                }
                _ => {}
            }
            if reading.is_too_large() {
                let cause = "it has more than 4,294,967,294 changes";
                return Err(Failure::new(format!("`{}` cannot be read", path.display()), cause, ""));
            }
        }
        // Events that the recording missed come after the last event.
        for change in &changes {
            reading.change(change);
        }
        Ok(History { is_snapshot, ..reading.finish(path, length) })
    }
}

/// The cost of an origin: bytes of memory, including those of reports about it, and nanoseconds.
const ORIGIN: (u64, u64) = (1 << 10, 3_000);

/// The cost of a change of memory that the list of allocations does not contain: bytes of memory, and nanoseconds.
const DRIVER_CHANGE: (u64, u64) = (192, 200);

/// A thread that gets rejected memory within this time has retried: allocators with a cache empty the cache and try
/// again. The library waits just as long before it reports a failed allocation.
const SOON: u64 = 1_000_000_000;

/// The state while a recording is read.
struct HistoryReading {
    reader: Reader<RecordingBytes>,
    history: HistoryParts,
    origins: Origins,
    /// The device of each origin. An origin is on one device.
    origin_devices: Vec<u16>,
    /// The live blocks, by the number of the event that allocated them.
    live: HashMap<u64, u32, foldhash::fast::RandomState>,
    open: HashMap<ScopeId, usize>,
    /// The index of each device in the history.
    devices: HashMap<Device, u16>,
    /// Failed allocations whose thread may still get the memory, by the number of bytes.
    pending: HashMap<(u16, RequestTarget), BTreeSet<(u64, usize)>>,
    /// The time of the latest failed allocation.
    rejected: u64,
    /// Failed allocations after which their device has not been read yet, by device.
    unread: HashMap<u16, Vec<usize>>,
    has_clock: bool,
    has_pools: bool,
    overlaps: OverlapFinder,
    /// The threads of blocks whose owner is not decided yet, by the number of the allocation.
    undecided: HashMap<u64, u16>,
    /// The number of events that are missing so far.
    missed: u64,
    /// The latest event.
    latest: When,
    tensors: tensors::TensorReading,
}

/// Where a thread requests memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RequestTarget {
    /// On the device with this index in the history.
    On(u16),
    /// Memory of this kind, on an unknown device.
    Of(MemKind),
}

/// The parts of a [`History`].
#[derive(Default)]
struct HistoryParts {
    lives: Lives,
    driver: DriverMemory,
    labels: HashMap<u32, Box<str>>,
    scopes: Vec<ScopeLife>,
    marks: Vec<MarkedMoment>,
    devices: Vec<DeviceHistory>,
    rejections: Vec<RejectedRequest>,
    real_blocks: Option<u64>,
    unknown_values: Vec<UnknownValue>,
}

impl HistoryReading {
    fn new(reader: Reader<RecordingBytes>) -> Self {
        let has_clock = reader.definitions().time(0).is_some();
        Self {
            reader,
            history: HistoryParts::default(),
            origins: Origins::default(),
            origin_devices: Vec::new(),
            live: HashMap::default(),
            open: HashMap::new(),
            devices: HashMap::new(),
            pending: HashMap::new(),
            rejected: 0,
            unread: HashMap::new(),
            has_clock,
            has_pools: false,
            overlaps: OverlapFinder::default(),
            undecided: HashMap::new(),
            missed: 0,
            latest: When { time: 0, number: 0, thread: 0 },
            tensors: tensors::TensorReading::default(),
        }
    }

    fn is_too_large(&self) -> bool {
        self.history.lives.change_count() >= LIVE as usize
    }

    fn device(&mut self, device: Device) -> u16 {
        let devices = &mut self.history.devices;
        *self.devices.entry(device).or_insert_with(|| {
            devices.push(DeviceHistory::new(device));
            // The reader rejects recordings with that many devices.
            u16::try_from(devices.len() - 1).unwrap_or(u16::MAX)
        })
    }

    /// Returns the time of an event. For stream-ordered memory, the ledger uses the time of an earlier event. The
    /// event's own processor counter is more exact: threads read it shortly before or after their event is numbered.
    fn time_of(&self, event: &RecordedEvent) -> u64 {
        let time = if self.has_clock { self.reader.definitions().time(event.ticks) } else { None };
        nanos(time.unwrap_or(event.time)).max(self.latest.time)
    }

    fn event(&mut self, event: &RecordedEvent, changes: &mut Vec<BlockChange>) {
        self.latest = When { time: self.time_of(event), number: event.number, thread: thread(event) };
        let missed = self.reader.skipped().missed;
        if std::mem::replace(&mut self.missed, missed) < missed {
            self.overlaps.lose();
        }
        match event.kind {
            // The ledger stores blocks in no particular order. The blocks of a context are ended in the order of their
            // allocations.
            EventKind::ContextDestroyed { .. } => {
                changes.sort_by_key(|change| self.live.get(&change.number).copied());
            }
            EventKind::Alloc { block, .. } if !self.pending.is_empty() => self.obtained(event, &block),
            EventKind::Sample { device, memory } => {
                let (time, device) = (self.latest.time, self.device(device));
                let rejections = &mut self.history.rejections;
                for at in self.unread.remove(&device).unwrap_or_default() {
                    let rejected = &mut rejections[at];
                    rejected.memory = (time - rejected.time <= SOON).then_some(memory);
                }
                let device = &mut self.history.devices[usize::from(device)];
                device.samples += 1;
                if device.highest_sample.is_none_or(|(_, highest)| highest.used < memory.used) {
                    device.highest_sample = Some((time, memory));
                }
            }
            EventKind::Open { scope, spec } => {
                // A device is reported if a scope is opened on it, even if nothing is allocated there.
                self.device(spec.device);
                self.open.insert(scope, self.history.scopes.len());
                self.history.scopes.push(ScopeLife {
                    callsite: spec.callsite,
                    thread: thread(event),
                    opened: self.latest.time,
                    closed: None,
                });
            }
            EventKind::Rejected { device, bytes, kind, stack } => {
                let device = device.map(|device| self.device(device));
                let history = &mut self.history;
                let live = device.map(|device| history.devices[usize::from(device)].driver_live);
                let pools = if self.has_pools { self.reader.ledger().pools() } else { Vec::new() };
                // If the cost is too high, the reader stops after this event.
                self.reader.spend((pools.len() * size_of::<KnownPool>()) as u64, 100 * pools.len() as u64);
                let target = device.map_or(RequestTarget::Of(kind), RequestTarget::On);
                let pending = self.pending.entry((thread(event), target)).or_default();
                pending.insert((bytes.get(), history.rejections.len()));
                self.rejected = self.latest.time;
                if let Some(device) = device {
                    self.unread.entry(device).or_default().push(history.rejections.len());
                }
                history.rejections.push(RejectedRequest {
                    time: self.latest.time,
                    number: event.number,
                    bytes: bytes.get(),
                    kind,
                    device,
                    stack,
                    after: history.lives.last_change(),
                    live,
                    pools,
                    memory: None,
                    was_obtained: false,
                });
            }
            EventKind::PoolRegistered { pool, device } => {
                // The device is reported, even if the pool never hands out a part.
                self.device(device);
                self.overlaps.start(pool);
                self.has_pools = true;
            }
            EventKind::RealBlocks { largest } => self.history.real_blocks = Some(largest.get()),
            EventKind::UnknownValue { bytes, stack } => {
                let (time, bytes) = (self.latest.time, bytes.get());
                self.history.unknown_values.push(UnknownValue { time, bytes, stack });
            }
            EventKind::Mark { callsite } => {
                self.history.marks.push(MarkedMoment { callsite, thread: thread(event), time: self.latest.time });
            }
            EventKind::Lost { .. } | EventKind::Displaced { .. } => self.overlaps.lose(),
            EventKind::Close { scope } => {
                if let Some(at) = self.open.remove(&scope) {
                    self.history.scopes[at].closed = Some(self.latest.time);
                }
            }
            _ => {}
        }
        changes.drain(..).for_each(|change| self.change(&change));
    }

    /// Applies a change that the latest event made to a block.
    fn change(&mut self, change: &BlockChange) {
        let BlockChange { mut kind, key, number, before, after, device, group } = *change;
        if group.kind.is_taken_by_driver() {
            return self.taken_by_driver(change);
        }
        self.overlaps.note(change);
        let is_of_driver = group.kind.is_on_device() && group.kind != MemKind::Part;
        if is_of_driver && !matches!(kind, BlockChangeKind::GivenToProgram | BlockChangeKind::TakenByPool) {
            let device = self.device(device);
            self.history.devices[usize::from(device)].count_driver(before.get(), after.get());
        }
        let mut when = self.latest;
        if let Some(thread) = self.undecided.remove(&number) {
            // The event that decides who owns the block may come from another thread.
            when.thread = thread;
        }
        match kind {
            // From here on, the program's view contains the block. No view contained it before.
            BlockChangeKind::GivenToProgram => {
                self.of_pool(change, false);
                kind = BlockChangeKind::Allocated;
            }
            BlockChangeKind::TakenByPool => {}
            _ if group.kind.is_on_device() && !group.is_in_program() => {
                if kind == BlockChangeKind::Allocated {
                    self.undecided.insert(number, when.thread);
                }
                self.of_pool(change, true);
                return;
            }
            _ => {}
        }
        let (at, device) = if kind.blocks() > 0 {
            let (device, origin) = self.origin(device, group);
            let block = NewBlock {
                key: if key.is_part() { key.address() } else { key.get() },
                bytes: after.get(),
                origin,
                device,
            };
            let (block, at) = self.history.lives.start(when, block, kind);
            self.live.insert(number, block);
            (at, device)
        } else if kind == BlockChangeKind::Shrunk {
            let Some(block) = self.live.get(&number).copied() else { return };
            let at = self.history.lives.shrink(self.latest, block, after.get());
            (at, self.history.lives.block(block).device)
        } else {
            let Some(block) = self.live.remove(&number) else { return };
            let at = self.history.lives.end(self.latest, block, kind);
            (at, self.history.lives.block(block).device)
        };
        if kind == BlockChangeKind::TakenByPool {
            self.of_pool(change, true);
        }
        if !group.kind.is_on_device() {
            return;
        }
        let device = &mut self.history.devices[usize::from(device)];
        if device.count(at, before.get(), after.get()) && self.has_pools {
            device.pools = self.reader.ledger().pools();
            device.pools.retain(|pool| pool.device == device.device);
        }
    }

    /// Returns the index of the device, and the id of the origin.
    fn origin(&mut self, device: Device, group: AllocGroup) -> (u16, u32) {
        let (origin, is_new) = self.origins.number(group);
        if is_new {
            // If the cost is too high, the reader stops after this event.
            self.reader.spend(ORIGIN.0, ORIGIN.1);
            let device = self.device(device);
            self.origin_devices.push(device);
        }
        (self.origin_devices[origin as usize], origin)
    }

    /// Applies a change of a block that the driver took by itself.
    fn taken_by_driver(&mut self, change: &BlockChange) {
        let of = self.origin(change.device, change.group);
        self.reader.spend(DRIVER_CHANGE.0, DRIVER_CHANGE.1);
        let after = self.history.lives.change_count();
        self.history.driver.note_taken(self.latest, after, change, of);
    }

    /// Notes a block of the driver that the list of allocations does not contain, because its pool's parts are there.
    fn of_pool(&mut self, change: &BlockChange, is_added: bool) {
        if change.group.kind == MemKind::Part {
            return;
        }
        let device = self.device(change.device);
        self.reader.spend(DRIVER_CHANGE.0, DRIVER_CHANGE.1);
        let after = self.history.lives.change_count();
        self.history.driver.note_of_pool(self.latest, after, change, device, is_added);
    }

    /// Checks whether a thread has now got memory after an earlier request for it failed.
    #[cold]
    fn obtained(&mut self, event: &RecordedEvent, block: &Block) {
        if self.latest.time - self.rejected > SOON {
            return self.pending.clear();
        }
        let on_device = (block.kind != MemKind::PinnedHost).then(|| RequestTarget::On(self.device(block.device)));
        for target in on_device.into_iter().chain([RequestTarget::Of(block.kind)]) {
            let Some(pending) = self.pending.get_mut(&(thread(event), target)) else { continue };
            let larger = pending.split_off(&(block.bytes.get() + 1, 0));
            for (_, at) in std::mem::replace(pending, larger) {
                let rejected = &mut self.history.rejections[at];
                rejected.was_obtained = self.latest.time - rejected.time <= SOON;
            }
        }
    }

    fn finish(self, path: &Path, bytes: u64) -> History {
        let Self { mut reader, history, origins, latest, tensors, overlaps, .. } = self;
        let HistoryParts { lives, driver, labels, scopes, marks, devices, rejections, real_blocks, unknown_values } =
            history;
        let allocated = || {
            let allocations = lives.changes().filter(|change| change.kind == BlockChangeKind::Allocated);
            allocations.map(|change| {
                let block = lives.block(change.block);
                let driver_block = (devices[usize::from(block.device)].device, block.key, block.bytes);
                (driver_block, change.time, origins.stack(block.origin))
            })
        };
        for (stack, callers) in tensors.callers(allocated()) {
            reader.add_callers(stack, callers);
        }
        let mut names_left = reader.names_left();
        let origins = origins.in_words(reader.ledger(), reader.definitions(), &mut names_left);
        let is_part = |block: &BlockLife| origins[block.origin as usize].is_expandable_segment();
        let parts = lives.blocks().map(|(_, block)| block).filter(is_part);
        let expandable = parts.map(|block| devices[usize::from(block.device)].device).collect();
        let tensors = tensors.finish(reader.definitions(), allocated(), &expandable, &mut names_left);
        History {
            path: path.to_owned(),
            bytes,
            lives,
            driver,
            origins,
            labels,
            scopes,
            marks,
            real_blocks,
            unknown_values,
            devices,
            rejections,
            end: end_of(reader.definitions(), Duration::from_nanos(latest.time)),
            tensors,
            overlapping_parts: overlaps.finish(),
            is_snapshot: false,
            still_records: false,
            reader,
        }
    }
}

/// Returns the end of the program, which ran at least until the last event.
fn end_of(definitions: &Definitions, last_event: Duration) -> Duration {
    let ended = definitions.ended().map_or(Duration::ZERO, |ended| ended.latest);
    definitions.last_clock().unwrap_or_default().max(ended).max(last_event)
}

/// Returns the thread of an event. The reader rejects recordings whose thread ids do not fit.
fn thread(event: &RecordedEvent) -> u16 {
    u16::try_from(event.thread.0).unwrap_or(u16::MAX)
}
