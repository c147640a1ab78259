//! A recording that is read while its program writes it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io::{self, Read, Seek},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use gpumem_core::{
    derive::Paths,
    ledger::BlockChange,
    model::{Bytes, Device, Family},
    recording::{CodeAddress, Follower, ModuleDefinition, SymbolsDefinition},
};
use serde::Serialize;

use super::tally::Tally;
use crate::{files, history::Origin, recording::of_module, report::json};

/// At most this many places of a device are shown.
const MOST_PLACES: usize = 32;

/// What a running recording says. The names of the fields are those in JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RecordingView {
    #[serde(serialize_with = "json::path")]
    pub(crate) file: PathBuf,
    pub(crate) pid: Option<u32>,
    pub(crate) command: Option<String>,
    /// Whether a process writes it.
    pub(crate) is_running: bool,
    /// How long the recording has run: up to now, or up to the newest event if no process writes it.
    pub(crate) seconds: f64,
    /// When the recording began, in seconds since 1970.
    #[serde(skip)]
    pub(crate) began: Option<f64>,
    /// How many events were lost. If it is not 0, the figures may be wrong.
    pub(crate) lost_events: u64,
    pub(crate) devices: Vec<DeviceView>,
    /// Why it cannot be read. What is here was read before.
    pub(crate) error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceView {
    /// CUDA's ordinal in the program.
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    pub(crate) uuid: Option<String>,
    /// What the program has allocated.
    pub(crate) used_bytes: u64,
    pub(crate) peak_bytes: u64,
    /// What is in use now, the largest first.
    pub(crate) now: Vec<PlaceView>,
    /// What the peak consisted of.
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
    /// The file that is read, and which one it is.
    open: Option<(File, (u64, u64))>,
    follower: Follower,
    lines: Lines,
    tally: Tally,
    /// What events have done to blocks, until it is counted.
    changes: Vec<BlockChange>,
    /// Whether all was read that was there.
    is_caught_up: bool,
    error: Option<String>,
}

/// A recording whose definitions, blocks and scopes take more memory than this is not followed.
const MOST_MEMORY: u64 = 512 << 20;

impl Live {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            path,
            open: None,
            follower: Follower::default(),
            lines: Lines::default(),
            tally: Tally::default(),
            changes: Vec::new(),
            is_caught_up: false,
            error: None,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn follower(&mut self) -> &mut Follower {
        &mut self.follower
    }

    pub(crate) fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }

    pub(crate) fn lost(&self) -> u64 {
        self.tally.lost(&self.follower)
    }

    /// Whether all was read that was there, without an error.
    pub(crate) fn is_read(&self) -> bool {
        self.is_caught_up && self.error.is_none()
    }

    /// Reads what was written since, but at most so many bytes.
    pub(crate) fn read(&mut self, most: u64) {
        self.error = self.read_on(most).err().map(|error| error.to_string());
    }

    fn read_on(&mut self, most: u64) -> io::Result<()> {
        let known = match self.path.metadata() {
            // The file or the container has gone, and what was opened can still be read.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.open.is_some() => {
                self.is_caught_up = self.read_open(most)?;
                return Ok(());
            }
            known => known?,
        };
        // A pipe would be waited for.
        if !known.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
        }
        let identity = (known.dev(), known.ino());
        let is_same = match &mut self.open {
            Some((file, opened)) => *opened == identity && file.stream_position()? <= known.len(),
            None => false,
        };
        if !is_same {
            if self.open.is_some() {
                // The end of the file that was replaced (`--max-size`).
                if self.error.is_none() && !self.read_open(most)? {
                    self.is_caught_up = false;
                    return Ok(());
                }
                self.tally.begin_again(&self.follower);
            }
            self.open = Some((files::open_to_read(&self.path)?, identity));
            self.follower = Follower::default();
            self.lines = Lines::default();
        }
        self.is_caught_up = self.read_open(most)?;
        Ok(())
    }

    /// Whether all was read.
    fn read_open(&mut self, most: u64) -> io::Result<bool> {
        let Some((file, _)) = &self.open else { return Ok(true) };
        let tally = &mut self.tally;
        if self.follower.memory() > MOST_MEMORY {
            return Err(io::Error::other(format!("it takes more than {} of memory", Bytes::new(MOST_MEMORY))));
        }
        let mut part = file.take(most);
        self.follower.read_observed(&mut part, &mut self.changes, |follower, event, changes| {
            tally.event(follower, event, changes);
        })?;
        Ok(part.limit() > 0)
    }

    /// Finds the lines at the addresses of stacks.
    pub(crate) fn look_up_lines(&mut self) {
        self.lines.look_up(&mut self.follower);
    }

    pub(super) fn view(&mut self) -> RecordingView {
        self.look_up_lines();
        let mut devices: Vec<_> = self.follower.ledger().stats();
        devices.sort_by_key(|stats| stats.device.ordinal);
        let devices = devices.into_iter().map(|stats| {
            let device = stats.device;
            let (bytes, peak) = (stats.on_device.bytes, self.tally.peak(device));
            let at_peak = if bytes.peak >= peak { self.at_peak(device) } else { Vec::new() };
            DeviceView {
                device: device.ordinal,
                simulated: device.family == Family::Simulated,
                uuid: self.follower.definitions().device(device).and_then(|known| known.uuid.clone()),
                used_bytes: bytes.current,
                peak_bytes: peak,
                now: self.now(device),
                at_peak,
            }
        });
        let devices = devices.collect();
        let process = self.follower.definitions().process();
        let command = (!process.arguments.is_empty()).then(|| process.arguments.join(" "));
        RecordingView {
            file: self.path.clone(),
            pid: (process.pid != 0).then_some(process.pid),
            command,
            is_running: false,
            seconds: self.follower.time().as_secs_f64(),
            began: (!process.began.is_zero()).then_some(process.began.as_secs_f64()),
            lost_events: self.lost(),
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

    fn at_peak(&mut self, device: Device) -> Vec<PlaceView> {
        let holders = self.follower.device_peak(device).map(|peak| peak.holders).unwrap_or_default();
        largest(holders.into_iter().map(|holder| PlaceView {
            place: holder.who(),
            bytes: holder.bytes.get(),
            scope: holder.path,
        }))
    }
}

/// The lines at the addresses of stacks. To read the debug information of large libraries takes seconds, so a thread does it: until then,
/// lines are not known.
#[derive(Debug, Default)]
struct Lines {
    /// The addresses that were looked up, or are being looked up.
    known: HashSet<CodeAddress>,
    found: Option<mpsc::Receiver<Vec<SymbolsDefinition>>>,
}

/// At most this many groups of blocks are looked up, the largest ones.
const MOST_GROUPS: usize = 64;

impl Lines {
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
        let mut wanted: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for of in groups.iter().take(MOST_GROUPS) {
            for address in definitions.addresses(of.group.stack) {
                if self.known.insert(*address) {
                    wanted.entry(address.module).or_default().push(address.offset);
                }
            }
        }
        let modules: HashMap<u32, ModuleDefinition> =
            definitions.modules().map(|module| (module.id, module.clone())).collect();
        wanted.retain(|module, _| modules.contains_key(module));
        if wanted.is_empty() {
            return;
        }
        let (to, found) = mpsc::channel();
        let work = move || {
            for (module, offsets) in wanted {
                if to.send(of_module(&modules[&module], offsets.into_iter())).is_err() {
                    break;
                }
            }
        };
        // Without a thread, lines are not known.
        self.found = thread::Builder::new().name("gpumem-lines".to_owned()).spawn(work).ok().map(|_| found);
    }
}

/// Adds up the blocks of one scope and place.
fn largest(all: impl Iterator<Item = PlaceView>) -> Vec<PlaceView> {
    let mut sums: HashMap<(Vec<String>, String), i64> = HashMap::new();
    for PlaceView { scope, place, bytes } in all {
        *sums.entry((scope, place)).or_default() += bytes;
    }
    let mut places: Vec<_> =
        sums.into_iter().map(|((scope, place), bytes)| PlaceView { scope, place, bytes }).collect();
    places.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| (&a.scope, &a.place).cmp(&(&b.scope, &b.place))));
    places.truncate(MOST_PLACES);
    places
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use super::*;
    const ALL: u64 = u64::MAX;
    use crate::{
        history::History,
        made::{MIB, Made},
        report::overview::Overview,
    };

    #[test]
    fn a_recording_that_grows_is_read_on_and_one_that_is_replaced_from_the_start() {
        let folder = env::temp_dir().join(format!("gpumem-live-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (path, whole) = (folder.join("a.capture"), Made::new("train").training(3, 10, 10 * MIB).file());
        let mut live = Live::new(path.clone());
        live.read(ALL);
        assert!(live.view().error.is_some());
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        live.read(ALL);
        fs::write(&path, &whole).unwrap();
        live.read(ALL);
        let view = live.view();
        let expected = Overview::of(&History::read(&path).unwrap());
        let device = &view.devices[0];
        assert_eq!((Some(device.peak_bytes), device.used_bytes), (expected.devices[0].peak_bytes, 32 * MIB));
        assert_eq!((view.error.clone(), view.pid, view.lost_events), (None, Some(4711), 0));
        assert_eq!((device.now[0].place.as_str(), device.now[0].bytes.unsigned_abs()), ("cuBLAS", 32 * MIB));
        // The summary of a recording has the same.
        let places: Vec<_> =
            device.at_peak.iter().map(|place| (place.scope.clone(), place.place.clone(), place.bytes)).collect();
        let known = &expected.devices[0].peak_by_place;
        assert_eq!(
            places,
            known.iter().map(|sum| (sum.scope.clone(), sum.place.clone(), sum.bytes)).collect::<Vec<_>>()
        );
        let smaller = Made::new("train").training(1, 1, MIB).file();
        fs::write(folder.join("new"), smaller).unwrap();
        fs::rename(folder.join("new"), &path).unwrap();
        live.read(ALL);
        let replaced = live.view();
        assert_eq!((replaced.error, replaced.devices[0].peak_bytes), (None, device.peak_bytes));
        assert!(replaced.devices[0].used_bytes <= 32 * MIB && replaced.devices[0].at_peak.is_empty());
        fs::write(&path, "something else, and no recording").unwrap();
        live.read(ALL);
        assert!(live.view().error.is_some());
        let _ = fs::remove_dir_all(&folder);
    }
}
