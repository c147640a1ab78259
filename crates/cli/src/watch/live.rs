//! Reads a recording while its program writes it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    sync::{OnceLock, mpsc},
    thread,
    time::Instant,
};

use gpumem_core::{
    derive::Paths,
    model::{Bytes, Device, DriverGauge, Family},
    report::SharedNames,
};
#[cfg(feature = "export")]
use gpumem_driver::ring_memory::SharedMemory;
#[cfg(feature = "export")]
use gpumem_recording::left_in_ring;
use gpumem_recording::{CodeAddress, FileStart, Follower, ModuleDefinition, SymbolsDefinition, Totals, old_path};
use serde::Serialize;

use crate::{
    files,
    history::{Origin, taken_now},
    recording::of_module,
    report::json,
};

/// At most this many files are read in a row in one call.
const MOST_FILES: usize = 8;

/// At most this many places of a device are shown.
const MOST_PLACES: usize = 32;

/// The values of a running recording. The field names are those in JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RecordingView {
    #[serde(serialize_with = "json::path")]
    pub(crate) file: PathBuf,
    pub(crate) pid: Option<u32>,
    pub(crate) command: Option<String>,
    /// True if a process is writing the recording.
    pub(crate) is_running: bool,
    /// How long the recording has been running: until now, or until the latest event if no process is writing it. `None`,
    /// as all counts below, if nothing could be read.
    pub(crate) seconds: Option<f64>,
    /// When the recording started, in seconds since 1970.
    #[serde(skip)]
    pub(crate) started: Option<f64>,
    /// The number of allocations and frees since the recording started.
    pub(crate) allocations: Option<u64>,
    pub(crate) frees: Option<u64>,
    /// The number of allocations that the driver rejected, and of those after which the same thread got the memory
    /// within a second.
    #[serde(rename = "refused")]
    pub(crate) rejected: Option<u64>,
    pub(crate) obtained_soon: Option<u64>,
    /// The number of lost events. If it is not 0, values may be wrong.
    pub(crate) lost_events: Option<u64>,
    /// The number of events that this reader has not seen because the file was restarted several times between two
    /// readings. In that case, peaks since the last reading may have been higher; all other values are right.
    pub(crate) unread_events: Option<u64>,
    pub(crate) devices: Vec<DeviceView>,
    /// Why the recording cannot be read. The values are older in that case.
    pub(crate) error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct DeviceView {
    /// CUDA's ordinal in the program.
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    pub(crate) uuid: Option<String>,
    /// The bytes that the program has allocated and not freed.
    pub(crate) used_bytes: u64,
    /// What the driver took by itself, as it was measured last. `None` if it was not measured.
    pub(crate) driver_bytes: Option<u64>,
    /// True if `driver_bytes` is an upper bound.
    pub(crate) driver_is_at_most: bool,
    /// The peak since the recording started.
    pub(crate) peak_bytes: u64,
    /// When the peak was first reached, since the recording started.
    pub(crate) peak_seconds: f64,
    /// The peak since the last reading of this reader. `None` if the recording contains only the peaks, because the
    /// recent one is then not known.
    pub(crate) recent_peak_bytes: Option<u64>,
    /// The memory that is in use now, the largest place first.
    pub(crate) now: Vec<PlaceView>,
    /// The parts of the peak.
    pub(crate) at_peak: Vec<PlaceView>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PlaceView {
    pub(crate) scope: Vec<String>,
    pub(crate) place: String,
    pub(crate) bytes: i64,
}

#[derive(Debug)]
pub(crate) struct Live {
    path: PathBuf,
    /// The file that is being read.
    open: Option<Opened>,
    follower: Follower,
    lines: LineLookup,
    unread: u64,
    /// The totals at the end of the previous file. Those of the next file may be lower while it is being written.
    before: Totals,
    /// True if the reader has reached the end of the file.
    is_caught_up: bool,
    error: Option<String>,
    /// When a reading last found a complete record and no error.
    pub(crate) latest: Instant,
    /// The peaks of the previous file of this recording that were not taken yet, if its end and the start of this file
    /// do not meet.
    recent: HashMap<Device, u64>,
    follows: Follows,
}

/// The recording to read after another one has replaced the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Follows {
    /// The other recording.
    Path,
    /// The same recording, up to its end.
    Recording {
        /// True if another recording has replaced it.
        is_replaced: bool,
    },
    /// Nothing more: everything that the process left has been read.
    Nothing,
}

/// Reading stops if the definitions, blocks and scopes of a recording take more memory than this.
const MOST_MEMORY: u64 = 512 << 20;

/// A file of a recording.
#[derive(Debug)]
struct Opened {
    file: File,
    identity: (u64, u64),
    file_start: FileStart,
}

/// The error for a file that lost data which had already been read.
fn shorter() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it has become shorter")
}

impl Opened {
    fn at(path: &Path) -> io::Result<Self> {
        let mut file = files::open_to_read(path)?;
        let known = file.metadata()?;
        let file_start = FileStart::read(&file)?;
        file.rewind()?;
        Ok(Self { file, identity: (known.dev(), known.ino()), file_start })
    }
}

#[cfg(feature = "export")]
impl Live {
    pub(crate) fn follower(&self) -> &Follower {
        &self.follower
    }

    /// Reads only the recording that is at this path first.
    pub(crate) fn of_recording(path: PathBuf) -> Self {
        Self { follows: Follows::Recording { is_replaced: false }, ..Self::new(path) }
    }

    /// Returns whether the path now belongs to another recording.
    pub(crate) fn is_past(&self) -> bool {
        !matches!(self.follows, Follows::Path | Follows::Recording { is_replaced: false })
    }

    /// Returns the data that the process, which no longer writes, left in its ring: see [`left_in_ring`].
    pub(crate) fn left_in_ring(&self) -> io::Result<Option<Vec<u8>>> {
        let Some(open) = self.open.as_ref().filter(|_| self.follows != Follows::Nothing && !self.is_finished()) else {
            return Ok(None);
        };
        let at = (&open.file).stream_position()?;
        let left = left_in_ring(&open.file, &SharedMemory);
        (&open.file).seek(SeekFrom::Start(at))?;
        left
    }

    /// Reads the data that was left in the ring, after the end of the file.
    pub(crate) fn read_ring(&mut self, left: &[u8]) {
        let read = FileStart::read(left).and_then(|file_start| {
            if self.follower.continue_in(&file_start) { self.follower.read(left) } else { Ok(()) }
        });
        // Whatever the process left, nothing more will follow.
        self.follows = Follows::Nothing;
        self.error = read.err().map(|error| error.to_string());
    }

    /// Returns [`RecordingView::unread_events`].
    pub(crate) fn unread(&self) -> u64 {
        self.unread
    }

    /// Returns whether all data of the file has been read without an error, which means that the values are right.
    pub(crate) fn is_read(&self) -> bool {
        self.is_caught_up && self.error.is_none()
    }

    /// Returns why the recording cannot be read.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Returns whether the program has written the end of the recording.
    pub(crate) fn is_finished(&self) -> bool {
        self.follower.file_start().recording.is_some() && !self.follower.definitions().lacks_end()
    }
}

impl Live {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            path,
            open: None,
            follower: Follower::default(),
            lines: LineLookup::default(),
            unread: 0,
            before: Totals::default(),
            is_caught_up: false,
            error: None,
            latest: Instant::now(),
            recent: HashMap::new(),
            follows: Follows::Path,
        }
    }

    /// Returns the highest memory since the last call. See [`Follower::take_recent_peak`].
    pub(crate) fn take_recent_peak(&mut self, device: Device) -> u64 {
        let before = self.recent.remove(&device).unwrap_or(0);
        self.follower.take_recent_peak(device).max(before)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the totals since the recording started. They never fall.
    pub(crate) fn totals(&self) -> Totals {
        let (now, before) = (self.follower.totals(), &self.before);
        let mut peaks = now.peaks;
        for peak in &before.peaks {
            match peaks.iter_mut().find(|known| known.device == peak.device) {
                Some(known) if known.bytes < peak.bytes => *known = *peak,
                Some(_) => {}
                None => peaks.push(*peak),
            }
        }
        Totals {
            allocations: now.allocations.max(before.allocations),
            frees: now.frees.max(before.frees),
            rejected: now.rejected.max(before.rejected),
            obtained: now.obtained.max(before.obtained),
            lost: now.lost.max(before.lost),
            peaks,
            waiting: now.waiting,
            driver_peaks: now.driver_peaks,
        }
    }

    /// Reads new data, at most this many bytes.
    pub(crate) fn read(&mut self, most: u64) {
        if self.follows == Follows::Nothing {
            return;
        }
        self.is_caught_up = false;
        let place = |live: &Self| (live.open.as_ref().map(|open| open.identity), live.follower.offset());
        let before = place(self);
        self.error = self.read_on(most).err().map(|error| error.to_string());
        if self.error.is_none() && place(self) != before {
            self.latest = Instant::now();
        }
    }

    fn read_on(&mut self, mut most: u64) -> io::Result<()> {
        // If a program restarts its file faster than it is read, reading continues next time.
        for _ in 0..MOST_FILES {
            let is_shorter = match &self.open {
                Some(open) => open.file.metadata()?.len() < self.follower.offset(),
                None => false,
            };
            // Open the new file first: if it has replaced the one being read, the old one can no longer grow.
            let mut latest = match Opened::at(&self.path) {
                // The file or its container is gone, but the open file can still be read.
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.open.is_some() => None,
                Ok(latest) if self.is_another(&latest) => {
                    self.follows = Follows::Recording { is_replaced: true };
                    if self.open.as_ref().is_some_and(|open| open.identity == latest.identity) {
                        // The file was overwritten, so nothing more can be read.
                        self.is_caught_up = true;
                        return Ok(());
                    }
                    None
                }
                Err(_) if is_shorter => return Err(shorter()),
                // A file that cannot be opened is at the path now.
                Err(_) if self.open.is_some() && self.follows != Follows::Path => None,
                latest => Some(latest?),
            };
            if is_shorter && latest.as_ref().is_none_or(|latest| self.is_truncated(latest)) {
                return Err(shorter());
            }
            if let Some(open) = self.open.as_ref().filter(|_| !is_shorter) {
                if self.follower.memory() > MOST_MEMORY {
                    return Err(io::Error::other(format!("it needs more than {} of memory", Bytes::new(MOST_MEMORY))));
                }
                let mut part = (&open.file).take(most);
                let read = self.follower.read(&mut part);
                most = part.limit();
                if let (0, Ok(())) = (most, &read) {
                    return Ok(());
                }
                self.follower.rewind();
                (&open.file).seek(SeekFrom::Start(self.follower.offset()))?;
                if let Err(error) = read {
                    // The file that has replaced it may be readable.
                    let next = latest.filter(|latest| latest.identity != open.identity).ok_or(error)?;
                    self.restart(next);
                    continue;
                }
                if latest.as_ref().is_none_or(|latest| latest.identity == open.identity) {
                    self.is_caught_up = true;
                    return Ok(());
                }
                // The previous file is needed if this one starts after events that have not been read.
                let after = self.follower.file_start().after;
                let older = Opened::at(&old_path(&self.path)).ok();
                let older = older.filter(|older| older.identity != open.identity && older.file_start.after > after);
                if let Some(next) = latest.take_if(|latest| self.follower.continue_in(&latest.file_start)) {
                    self.open = Some(next);
                    continue;
                }
                if let Some(older) = older.filter(|older| self.follower.continue_in(&older.file_start)) {
                    self.open = Some(older);
                    continue;
                }
            }
            match latest {
                Some(latest) => self.restart(latest),
                None => break,
            }
        }
        Ok(())
    }

    /// Returns whether this is a different recording from the one to follow.
    fn is_another(&self, latest: &Opened) -> bool {
        let known = self.follower.file_start().recording;
        let is_other = latest.file_start.recording.is_some() && latest.file_start.recording != known;
        matches!(self.follows, Follows::Recording { .. }) && known.is_some() && is_other
    }

    /// Returns whether this is the open file, but shorter. Otherwise its program has started another recording.
    fn is_truncated(&self, latest: &Opened) -> bool {
        let known = self.follower.file_start().recording;
        let is_open = self.open.as_ref().is_some_and(|open| open.identity == latest.identity);
        is_open && known.is_some() && latest.file_start.recording.is_none_or(|latest| known == Some(latest))
    }

    /// Reads a file from its start.
    fn restart(&mut self, file: Opened) {
        let is_same = file.file_start.is_same(&self.follower.file_start()) && !file.file_start.is_peaks;
        self.unread = if is_same { self.unread + self.follower.events_before(&file.file_start) } else { 0 };
        self.before = if is_same { self.totals() } else { Totals::default() };
        let devices = if is_same { self.follower.ledger().stats() } else { Vec::new() };
        self.recent = devices.iter().map(|of| (of.device, self.take_recent_peak(of.device))).collect();
        self.follower = Follower::default();
        self.lines = LineLookup::default();
        self.open = Some(file);
    }

    /// Looks up the lines at the addresses of stacks.
    pub(crate) fn look_up_lines(&mut self) {
        self.lines.look_up(&mut self.follower);
    }

    pub(super) fn view(&mut self) -> RecordingView {
        self.look_up_lines();
        let mut devices: Vec<_> = self.follower.ledger().stats();
        devices.sort_by_key(|stats| stats.device.ordinal);
        let totals = self.totals();
        let is_peaks = self.follower.file_start().is_peaks;
        let devices = devices.into_iter().map(|stats| {
            let device = stats.device;
            let peak = totals.peaks.iter().find(|peak| peak.device == device);
            let (peak_bytes, peak_time) = peak.map_or_else(Default::default, |peak| (peak.bytes, peak.time));
            DeviceView {
                device: device.ordinal,
                simulated: device.family == Family::Simulated,
                uuid: self.follower.definitions().device(device).and_then(|known| known.uuid.clone()),
                used_bytes: stats.on_device.bytes.current,
                driver_bytes: stats.driver_measured_by.map(|_| taken_now(&stats).map(|(_, bytes)| bytes).sum()),
                driver_is_at_most: stats.driver_measured_by == Some(DriverGauge::AtMost),
                peak_bytes,
                peak_seconds: peak_time.as_secs_f64(),
                recent_peak_bytes: (!is_peaks).then(|| self.take_recent_peak(device)),
                now: self.now(device),
                at_peak: self.at_peak(device, peak_bytes),
            }
        });
        let devices: Vec<_> = devices.collect();
        let is_known = self.follower.offset() > 0 || !devices.is_empty();
        let known = |count: u64| is_known.then_some(count);
        let process = self.follower.definitions().process();
        let command = (!process.arguments.is_empty()).then(|| process.arguments.join(" "));
        RecordingView {
            file: self.path.clone(),
            pid: (process.pid != 0).then_some(process.pid),
            command,
            is_running: false,
            seconds: is_known.then(|| self.follower.time().as_secs_f64()),
            started: (!process.started.is_zero()).then_some(process.started.as_secs_f64()),
            allocations: known(totals.allocations),
            frees: known(totals.frees),
            rejected: known(totals.rejected),
            obtained_soon: known(totals.obtained),
            lost_events: known(totals.lost),
            unread_events: known(self.unread),
            devices,
            error: self.error.clone(),
        }
    }

    fn now(&self, device: Device) -> Vec<PlaceView> {
        let (ledger, definitions) = (self.follower.ledger(), self.follower.definitions());
        let mut groups = ledger.groups();
        groups.retain(|of| of.device == device && of.group.kind.is_on_device() && of.bytes.get() > 0);
        let paths = Paths::now(ledger, definitions);
        let places = groups.into_iter().map(|of| {
            let origin = Origin::of(&of.group, &paths, definitions);
            PlaceView { place: origin.place(), scope: origin.path, bytes: of.bytes.get().cast_signed() }
        });
        largest(places)
    }

    /// Returns the parts of the peak. Empty if the peak is in a file that this reader has not read.
    fn at_peak(&mut self, device: Device, bytes: u64) -> Vec<PlaceView> {
        let peak = self.follower.device_peak(device).filter(|peak| peak.bytes.get() == bytes);
        let holders = peak.map(|peak| peak.holders).unwrap_or_default();
        largest(holders.into_iter().map(|holder| PlaceView {
            place: holder.who(),
            bytes: holder.bytes.get(),
            scope: holder.path,
        }))
    }
}

/// The lines at the addresses of stacks. A separate thread looks them up, because reading the debug information of
/// large libraries takes seconds. Until then, lines are not known.
#[derive(Debug, Default)]
struct LineLookup {
    /// The addresses that were looked up or are being looked up.
    known: HashSet<CodeAddress>,
    found: Option<mpsc::Receiver<Vec<SymbolsDefinition>>>,
}

/// Lines are looked up for the largest groups of blocks, at most this many groups at a time.
const MOST_GROUPS: usize = 1_000;
const MOST_AT_ONCE: usize = 64;

impl LineLookup {
    fn look_up(&mut self, follower: &mut Follower) {
        if let Some(found) = &self.found {
            loop {
                match found.try_recv() {
                    Ok(symbols) => symbols.into_iter().for_each(|symbols| follower.add_symbols(symbols)),
                    Err(mpsc::TryRecvError::Empty) => return,
                    Err(mpsc::TryRecvError::Disconnected) => break,
                }
            }
            self.found = None;
        }
        let mut groups = follower.ledger().groups();
        groups.sort_by_key(|of| Reverse(of.bytes));
        let definitions = follower.definitions();
        let mut needed: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        let mut new_groups = 0;
        for of in groups.iter().take(MOST_GROUPS) {
            let known = self.known.len();
            for address in definitions.addresses(of.group.stack) {
                if self.known.insert(*address) {
                    needed.entry(address.module).or_default().push(address.offset);
                }
            }
            new_groups += usize::from(self.known.len() > known);
            if new_groups == MOST_AT_ONCE {
                break;
            }
        }
        let modules: HashMap<u32, ModuleDefinition> =
            definitions.modules().map(|module| (module.id, module.clone())).collect();
        needed.retain(|module, _| modules.contains_key(module));
        if needed.is_empty() {
            return;
        }
        let (to, found) = mpsc::channel();
        let work = move || {
            for (module, offsets) in needed {
                if to.send(of_module(&modules[&module], offsets.into_iter())).is_err() {
                    break;
                }
            }
        };
        // If no thread can be started, lines stay unknown.
        self.found = later(work).then_some(found);
    }
}

/// Runs work on the thread that reads the debug information of all recordings in turn. There is only one, because debug
/// information takes much memory.
fn later(work: impl FnOnce() + Send + 'static) -> bool {
    type Work = Box<dyn FnOnce() + Send>;
    static TO: OnceLock<Option<mpsc::Sender<Work>>> = OnceLock::new();
    let to = TO.get_or_init(|| {
        let (to, from) = mpsc::channel::<Work>();
        // Malformed debug information may make one lookup panic. The others continue.
        let work = move || from.into_iter().for_each(|work| drop(panic::catch_unwind(AssertUnwindSafe(work))));
        thread::Builder::new().name("gpumem-lines".to_owned()).spawn(work).ok().map(|_| to)
    });
    to.as_ref().is_some_and(|to| to.send(Box::new(work)).is_ok())
}

/// Adds up the blocks of one scope and place, and of scopes whose names differ only in numbers if there are many.
fn largest(all: impl Iterator<Item = PlaceView>) -> Vec<PlaceView> {
    let all: Vec<_> = all.collect();
    let names = SharedNames::of(all.iter().map(|place| &*place.scope));
    let mut sums: HashMap<(Vec<String>, &str), i64> = HashMap::new();
    for PlaceView { scope, place, bytes } in &all {
        *sums.entry((names.path(scope).into_owned(), place)).or_default() += bytes;
    }
    let mut places: Vec<_> =
        sums.into_iter().map(|((scope, place), bytes)| PlaceView { scope, place: place.to_owned(), bytes }).collect();
    places.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| (&a.scope, &a.place).cmp(&(&b.scope, &b.place))));
    places.truncate(MOST_PLACES);
    places
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use gpumem_core::model::{Block, Bytes, EventKind, Key, MemKind, ThreadId};
    use gpumem_recording::{Item, Part, RecordedEvent, RingDefinition, Writer};

    use super::*;
    use crate::{
        history::History,
        recording_builder::{MIB, RecordingBuilder},
        report::overview::Overview,
    };

    #[test]
    fn scopes_that_differ_in_numbers_are_one_place() {
        let place = |number: i64| PlaceView {
            scope: vec![format!("request {number}")],
            place: "src/model.rs:42".to_owned(),
            bytes: number,
        };
        let place_of_all = PlaceView { scope: vec!["request #".to_owned()], bytes: 231, ..place(0) };
        assert_eq!(largest((0..22).map(place)), [place_of_all]);
        assert_eq!(largest((0..16).map(place)).len(), 16);
    }

    /// Returns a program that allocates and frees blocks of these sizes, one after the other.
    fn events(bytes: impl IntoIterator<Item = u64>) -> Vec<Item> {
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let kinds = bytes.into_iter().zip(1..).flat_map(|(bytes, number)| {
            let key = Key::from_raw(512 * number);
            let block = Block::new(device, Bytes::new(bytes), MemKind::Device);
            [EventKind::Alloc { key, block }, EventKind::Free { key, block: None }]
        });
        let event = |(kind, number)| {
            let time = Duration::from_millis(number);
            Item::Event(RecordedEvent { number, ticks: number, time, thread: ThreadId(1), kind })
        };
        kinds.zip(1..).map(event).collect()
    }

    #[test]
    fn lines_are_still_looked_up_after_one_has_failed() {
        assert!(later(|| panic::resume_unwind(Box::new("wrong debug information"))));
        let (to, from) = mpsc::channel();
        assert!(later(move || to.send(()).unwrap()));
        assert_eq!(from.recv_timeout(Duration::from_secs(60)), Ok(()));
    }

    /// With `--max-size`, a fast reader sees each peak, and a slow one reports how many events it missed.
    #[test]
    fn a_recording_that_is_started_again_is_read_on() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let path = folder.join("a.capture");
        // The highest peak is in the middle of the first file.
        let all = events((0..50).map(|number| if number == 4 { 1_000 } else { number }));
        let file = |number: usize| {
            let mut part = Part::latest();
            for item in &all[..10 * number] {
                let Item::Event(event) = item else { unreachable!("they are events") };
                part.apply(event);
            }
            let start =
                if number == 0 { Vec::new() } else { [vec![Item::Part(part.definition())], part.items()].concat() };
            let mut writer = Writer::new(Vec::new()).unwrap();
            let ring = Item::Ring(RingDefinition { segment: None, recording: 7 });
            let items = [ring].into_iter().chain(start).chain(all[10 * number..][..10].iter().cloned());
            items.for_each(|item| writer.write(&item).unwrap());
            writer.finish().unwrap()
        };
        // Files are replaced, not overwritten.
        let write = |path: &Path, bytes: &[u8]| {
            fs::write(folder.join("new"), bytes).unwrap();
            fs::rename(folder.join("new"), path).unwrap();
        };
        let mut live = Live::new(path.clone());
        // The end of the first file is written after the file was read, and before the second one replaces it.
        let first = file(0);
        fs::write(&path, &first[..first.len() - 1]).unwrap();
        live.read(u64::MAX);
        assert!(live.view().devices.is_empty());
        fs::write(&path, first).unwrap();
        fs::hard_link(&path, old_path(&path)).unwrap();
        // Each case: the latest of the files (the one before it exists too), the visible peak since the last reading,
        // and how many events are missed.
        for (number, recent, unread) in [(1, 1_000, 0), (2, 14, 0), (4, 24, 0), (7, 39, 20), (8, 44, 20)] {
            if number > 1 {
                write(&old_path(&path), &file(number - 1));
            }
            write(&path, &file(number));
            live.read(u64::MAX);
            let view = live.view();
            assert_eq!((view.error, view.unread_events), (None, Some(unread)), "{number}");
            assert_eq!([view.allocations, view.frees], [Some(5 * (number as u64 + 1)); 2], "{number}");
            let device = &view.devices[0];
            assert_eq!((device.peak_bytes, device.peak_seconds), (1_000, 0.009), "{number}");
            assert_eq!(device.recent_peak_bytes, Some(recent), "{number}");
            // A reader that starts now gets the same values.
            let mut late = Live::new(path.clone());
            late.read(u64::MAX);
            let seen = late.view();
            assert_eq!(
                (seen.allocations, seen.unread_events, seen.devices[0].peak_bytes),
                (view.allocations, Some(0), 1_000)
            );
        }
    }

    #[test]
    fn a_recording_that_grows_is_read_on_and_one_that_is_replaced_from_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (path, whole) = (folder.join("a.capture"), RecordingBuilder::new("train").training(3, 10, 10 * MIB).file());
        let mut live = Live::new(path.clone());
        live.read(u64::MAX);
        let unknown = live.view();
        assert!(unknown.error.is_some() && unknown.allocations.is_none() && unknown.seconds.is_none(), "{unknown:?}");
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        live.read(u64::MAX);
        fs::write(&path, &whole).unwrap();
        live.read(u64::MAX);
        let view = live.view();
        let expected = Overview::of(&History::read(&path).unwrap());
        let device = &view.devices[0];
        assert_eq!((Some(device.peak_bytes), device.used_bytes), (expected.devices[0].peak_bytes, 32 * MIB));
        assert_eq!((view.error.clone(), view.pid, view.lost_events), (None, Some(4711), Some(0)));
        assert_eq!((device.now[0].place.as_str(), device.now[0].bytes.unsigned_abs()), ("cuBLAS", 32 * MIB));
        // The summary of a recording shows the same.
        let places: Vec<_> =
            device.at_peak.iter().map(|place| (place.scope.clone(), place.place.clone(), place.bytes)).collect();
        let known = &expected.devices[0].peak_by_place;
        assert_eq!(
            places,
            known.iter().map(|sum| (sum.scope.clone(), sum.place.clone(), sum.bytes)).collect::<Vec<_>>()
        );
        fs::write(&path, [&whole[..], &[255; 16]].concat()).unwrap();
        for _ in 0..2 {
            live.read(u64::MAX);
            assert!(live.view().error.is_some_and(|error| error.starts_with("it is damaged")));
        }
        let smaller = RecordingBuilder::new("train").training(1, 1, MIB).file();
        fs::write(folder.join("new"), smaller).unwrap();
        fs::rename(folder.join("new"), &path).unwrap();
        live.read(u64::MAX);
        let replaced = live.view();
        // The file belongs to another program.
        assert!(replaced.error.is_none() && replaced.devices[0].peak_bytes < device.peak_bytes);
        assert!(replaced.devices[0].used_bytes <= 32 * MIB && !replaced.devices[0].at_peak.is_empty());
        fs::write(&path, "something else, and no recording").unwrap();
        live.read(u64::MAX);
        assert!(live.view().error.is_some());
    }
}
