//! Reads a recording.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
    path::Path,
    time::Duration,
};

use gpumem_core::{
    capture::{Reader, RecordedEvent, Step},
    model::{Block, Device, EventKind, Key, MemKind, ScopeId, ThreadId},
};

use super::{BlockLife, Change, ChangeKind, DeviceHistory, History, LIVE, Refusal, ScopeLife, names::Origins, tensors};
use crate::{failure::Failure, files, progress::Progress, run, terminal};

/// The bytes of a recording. It shows how much was read.
#[derive(Debug)]
pub(crate) struct Bytes {
    from: BufReader<File>,
    progress: Progress,
}

impl Read for Bytes {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(to)?;
        self.progress.advance(read as u64);
        Ok(read)
    }
}

impl Seek for Bytes {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.from.seek(to)
    }
}

/// The process of the recording was killed, or runs still.
fn add_ring(path: &Path) {
    let next = "the report covers what comes before";
    let file = format!("`{}`", path.display());
    match run::complete(path) {
        Ok(Some(_)) => {}
        Ok(None) => terminal::error(&Failure::new(file, "its process records still", next)),
        // `gpumem run` has ended and given it its name meanwhile. That it cannot be read is said next.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !path.exists() => {}
        Err(error) => {
            let what = format!("what the process of {file} recorded last cannot be added");
            terminal::error(&Failure::new(what, error, next));
        }
    }
}

impl History {
    /// Reads a whole recording, as far as it is readable: [`incomplete`](Self::incomplete) says where it ends too early.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| {
            let next = if error.kind() == io::ErrorKind::InvalidData {
                "give a file that `gpumem run` or GPUMEM_CAPTURE wrote"
            } else {
                ""
            };
            Failure::new(format!("`{}` cannot be read", path.display()), error, next)
        };
        // A pipe would be waited for, and cannot be read twice.
        if path.metadata().is_ok_and(|known| !known.is_file()) {
            let next = "write the recording to a file first";
            return Err(Failure::new(format!("`{}` cannot be read", path.display()), "it is no file", next));
        }
        if run::is_unfinished(path) {
            add_ring(path);
        }
        let file = files::open_to_read(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        // The reader reads it twice.
        let progress = Progress::new(&format!("reading {}", path.display()), 2 * length);
        let bytes = Bytes { from: BufReader::with_capacity(1 << 16, file), progress };
        let reader = Reader::new(bytes).map_err(failed)?;
        let mut reading = Reading::new(reader);
        while let Some(step) = reading.reader.step().map_err(failed)? {
            match step {
                Step::Event(event, _) => reading.event(&event),
                Step::Label(label) => {
                    if let Some(block) = reading.live.get(&label.key) {
                        reading.history.labels.insert(*block, label.label.name.into());
                    }
                }
                Step::Allocator(events) => {
                    let new = reading.tensors.add(&events);
                    reading.reader.spend(new * ORIGIN.0, new * ORIGIN.1);
                }
                _ => {}
            }
            if reading.is_too_large() {
                let cause = "it has more than 4,294,967,294 changes";
                return Err(Failure::new(format!("`{}` cannot be read", path.display()), cause, ""));
            }
        }
        Ok(reading.finish(path, length))
    }
}

/// What a place costs that allocates: memory, with that of the reports about it, and nanoseconds.
const ORIGIN: (u64, u64) = (1 << 10, 3_000);

/// How soon a thread that was refused memory has to obtain it: allocators with a cache empty the cache and try again. The library
/// waits as long before it reports a refusal.
const SOON: u64 = 1_000_000_000;

/// What is known while a recording is read.
struct Reading {
    reader: Reader<Bytes>,
    history: Parts,
    origins: Origins,
    live: HashMap<Key, u32>,
    /// The newest free of each thread: a failed one is undone.
    freed: HashMap<ThreadId, (Key, u32)>,
    open: HashMap<ScopeId, usize>,
    /// In the history.
    devices: HashMap<Device, u16>,
    /// Refusals whose thread may still obtain the memory, by how much that is.
    pending: HashMap<(u16, Wanted), BTreeSet<(u64, usize)>>,
    /// When the newest of them was.
    refused: u64,
    /// Refusals after which their device was not read yet, by device.
    unread: HashMap<u16, Vec<usize>>,
    has_clock: bool,
    time: u64,
    tensors: tensors::Reading,
}

/// Where a thread wants memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wanted {
    /// On a device of the history.
    On(u16),
    /// The device is not known.
    Of(MemKind),
}

/// What a [`History`] is made of.
#[derive(Default)]
struct Parts {
    changes: Vec<Change>,
    blocks: Vec<BlockLife>,
    shrunk: HashMap<u32, Vec<(u32, u64)>>,
    labels: HashMap<u32, Box<str>>,
    scopes: Vec<ScopeLife>,
    devices: Vec<DeviceHistory>,
    refusals: Vec<Refusal>,
}

impl Reading {
    fn new(reader: Reader<Bytes>) -> Self {
        let has_clock = reader.definitions().time(0).is_some();
        Self {
            reader,
            history: Parts::default(),
            origins: Origins::default(),
            live: HashMap::new(),
            freed: HashMap::new(),
            open: HashMap::new(),
            devices: HashMap::new(),
            pending: HashMap::new(),
            refused: 0,
            unread: HashMap::new(),
            has_clock,
            time: 0,
            tensors: tensors::Reading::default(),
        }
    }

    fn is_too_large(&self) -> bool {
        self.history.changes.len() >= LIVE as usize
    }

    fn device(&mut self, device: Device) -> u16 {
        let devices = &mut self.history.devices;
        *self.devices.entry(device).or_insert_with(|| {
            devices.push(DeviceHistory {
                device,
                live: 0,
                peak: 0,
                peak_at: None,
                less_at: None,
                highest_sample: None,
                samples: 0,
                pool_reserved: None,
            });
            // A reader of recordings refuses numbers of devices that are too many.
            u16::try_from(devices.len() - 1).unwrap_or(u16::MAX)
        })
    }

    /// The ledger's time is that of an earlier event for stream-ordered memory. The counter of the processor is of this event; threads
    /// read it a little before or after their event is numbered.
    fn time_of(&self, event: &RecordedEvent) -> u64 {
        let time = if self.has_clock { self.reader.definitions().time(event.ticks) } else { None };
        let nanos = time.unwrap_or(event.time).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX).max(self.time)
    }

    fn event(&mut self, event: &RecordedEvent) {
        self.time = self.time_of(event);
        match event.kind {
            EventKind::Alloc { key, block } => self.alloc(event, key, &block),
            EventKind::Free { key, .. } => {
                self.freed.remove(&event.thread);
                if let Some(block) = self.live.remove(&key) {
                    self.freed.insert(event.thread, (key, block));
                    self.end(event, block, ChangeKind::Free);
                }
            }
            EventKind::FreeFailed => {
                if let Some((key, block)) = self.freed.remove(&event.thread) {
                    let mut again = self.history.blocks[block as usize];
                    again.bytes = self.bytes(block);
                    self.begin(event, key, again, ChangeKind::FreeFailed);
                }
            }
            EventKind::Shrink { key, bytes } => {
                if let Some(block) = self.live.get(&key).copied() {
                    let delta = bytes.get().cast_signed() - self.bytes(block).cast_signed();
                    let change = self.change(event, block, delta, ChangeKind::Shrink);
                    self.history.shrunk.entry(block).or_default().push((change, bytes.get()));
                }
            }
            EventKind::ContextDestroyed { context } => {
                let blocks = &self.history.blocks;
                let is_of = |block: &u32| blocks[*block as usize].context == context;
                let mut gone: Vec<_> = self.live.extract_if(|_, block| is_of(block)).map(|(_, block)| block).collect();
                gone.sort_unstable();
                for block in gone {
                    self.end(event, block, ChangeKind::FreeWithContext);
                }
            }
            EventKind::Sample { device, memory } => {
                let (time, device) = (self.time, self.device(device));
                let refusals = &mut self.history.refusals;
                for at in self.unread.remove(&device).unwrap_or_default() {
                    let refused = &mut refusals[at];
                    refused.memory = (time - refused.time <= SOON).then_some(memory);
                }
                let device = &mut self.history.devices[usize::from(device)];
                device.samples += 1;
                if device.highest_sample.is_none_or(|(_, highest)| highest.used < memory.used) {
                    device.highest_sample = Some((time, memory));
                }
            }
            EventKind::PoolUsage { device, usage } => {
                let device = self.device(device);
                let reserved = &mut self.history.devices[usize::from(device)].pool_reserved;
                *reserved = (*reserved).max(Some(usage.reserved_high.get().max(usage.reserved.get())));
            }
            EventKind::Open { scope, spec } => {
                // A device on which a scope is opened is reported, even if nothing is allocated there.
                self.device(spec.device);
                self.open.insert(scope, self.history.scopes.len());
                self.history.scopes.push(ScopeLife {
                    callsite: spec.callsite,
                    thread: thread(event),
                    opened: self.time,
                    closed: None,
                });
            }
            EventKind::Refused { device, bytes, kind, stack } => {
                let device = device.map(|device| self.device(device));
                let history = &mut self.history;
                let live = device.map(|device| history.devices[usize::from(device)].live);
                let wanted = device.map_or(Wanted::Of(kind), Wanted::On);
                let pending = self.pending.entry((thread(event), wanted)).or_default();
                pending.insert((bytes.get(), history.refusals.len()));
                self.refused = self.time;
                if let Some(device) = device {
                    self.unread.entry(device).or_default().push(history.refusals.len());
                }
                history.refusals.push(Refusal {
                    time: self.time,
                    number: event.number,
                    bytes: bytes.get(),
                    kind,
                    device,
                    stack,
                    after: u32::try_from(history.changes.len()).unwrap_or(LIVE).checked_sub(1),
                    live,
                    memory: None,
                    was_obtained: false,
                });
            }
            EventKind::Close { scope } => {
                if let Some(at) = self.open.remove(&scope) {
                    self.history.scopes[at].closed = Some(self.time);
                }
            }
            _ => {}
        }
    }

    fn alloc(&mut self, event: &RecordedEvent, key: Key, block: &Block) {
        if !self.pending.is_empty() {
            self.obtained(event, block);
        }
        // The ledger has just got it.
        let Some(known) = self.reader.ledger().block(key) else { return };
        let (origin, is_new) = self.origins.number(known.group);
        if is_new {
            // If that is too much, this event is the last one.
            self.reader.spend(ORIGIN.0, ORIGIN.1);
        }
        let life = BlockLife {
            key: key.get(),
            bytes: block.bytes.get(),
            born: 0,
            died: LIVE,
            origin,
            device: self.device(block.device),
            context: block.context,
        };
        self.begin(event, key, life, ChangeKind::Alloc);
    }

    /// A thread has obtained memory: perhaps what it was refused.
    #[cold]
    fn obtained(&mut self, event: &RecordedEvent, block: &Block) {
        if self.time - self.refused > SOON {
            return self.pending.clear();
        }
        let on_device = (block.kind != MemKind::PinnedHost).then(|| Wanted::On(self.device(block.device)));
        for wanted in on_device.into_iter().chain([Wanted::Of(block.kind)]) {
            let Some(pending) = self.pending.get_mut(&(thread(event), wanted)) else { continue };
            let larger = pending.split_off(&(block.bytes.get() + 1, 0));
            for (_, at) in std::mem::replace(pending, larger) {
                let refused = &mut self.history.refusals[at];
                refused.was_obtained = self.time - refused.time <= SOON;
            }
        }
    }

    /// A block is live from now on.
    fn begin(&mut self, event: &RecordedEvent, key: Key, block: BlockLife, kind: ChangeKind) {
        let number = u32::try_from(self.history.blocks.len()).unwrap_or(LIVE);
        if let Some(missed) = self.live.insert(key, number) {
            self.end(event, missed, ChangeKind::FreeMissed);
        }
        self.history.blocks.push(BlockLife { died: LIVE, ..block });
        let change = self.change(event, number, block.bytes.cast_signed(), kind);
        self.history.blocks[number as usize].born = change;
    }

    /// A block is not live any more.
    fn end(&mut self, event: &RecordedEvent, block: u32, kind: ChangeKind) {
        let change = self.change(event, block, -self.bytes(block).cast_signed(), kind);
        self.history.blocks[block as usize].died = change;
    }

    fn bytes(&self, block: u32) -> u64 {
        let shrunk = self.history.shrunk.get(&block).and_then(|shrunk| shrunk.last());
        shrunk.map_or(self.history.blocks[block as usize].bytes, |(_, bytes)| *bytes)
    }

    fn change(&mut self, event: &RecordedEvent, block: u32, delta: i64, kind: ChangeKind) -> u32 {
        let Parts { changes, blocks, devices, .. } = &mut self.history;
        let number = u32::try_from(changes.len()).unwrap_or(LIVE);
        let (time, event_number, thread) = (self.time, event.number, thread(event));
        changes.push(Change { time, number: event_number, delta, block, thread, kind });
        let BlockLife { device, origin, .. } = blocks[block as usize];
        if self.origins.kind(origin).is_on_device() {
            let device = &mut devices[usize::from(device)];
            device.live = device.live.saturating_add_signed(delta);
            if device.live > device.peak {
                (device.peak, device.peak_at, device.less_at) = (device.live, Some(number), None);
            } else if delta < 0 && device.peak_at.is_some() {
                device.less_at.get_or_insert(number);
            }
        }
        number
    }

    fn finish(self, path: &Path, bytes: u64) -> History {
        let Self { reader, history, origins, time, tensors, .. } = self;
        let Parts { changes, blocks, shrunk, labels, scopes, devices, refusals } = history;
        let allocated = changes.iter().filter(|change| change.kind == ChangeKind::Alloc).map(|change| {
            let block = &blocks[change.block as usize];
            ((devices[usize::from(block.device)].device, block.key, block.bytes), change.time)
        });
        let mut names_left = reader.names_left();
        let origins = origins.in_words(reader.ledger(), reader.definitions(), &mut names_left);
        let tensors = tensors.finish(reader.definitions(), allocated, &mut names_left);
        History {
            path: path.to_owned(),
            bytes,
            changes,
            blocks,
            origins,
            shrunk,
            labels,
            scopes,
            devices,
            refusals,
            end: reader.definitions().last_clock().unwrap_or_default().max(Duration::from_nanos(time)),
            tensors,
            reader,
        }
    }
}

/// A reader of recordings refuses numbers of threads that do not fit.
fn thread(event: &RecordedEvent) -> u16 {
    u16::try_from(event.thread.0).unwrap_or(u16::MAX)
}
