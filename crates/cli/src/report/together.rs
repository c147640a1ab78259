//! The memory that several processes had on one device at the same time.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::PathBuf,
};

use gpumem_core::model::{Bytes, Device, Family, one_line};

use super::{
    annotations::Finding,
    change::signed,
    overview::Overview,
    place_peaks::{PlacePeak, changes_of},
};
use crate::{
    failure::Failure,
    history::{History, nanos},
};

/// At most this many processes are named.
const MOST_NAMED: usize = 4;

/// A device: its UUID, and the machine if the GPUs are not real ones. The processes of several containers may use the
/// same device.
type Shared = (String, Option<String>);

/// The devices of recorded processes. Only a few numbers of each recording are kept. The histories are read again if
/// their peaks together exceed a limit.
#[derive(Debug, Default)]
pub(super) struct Together {
    processes: BTreeMap<Shared, Vec<Process>>,
    /// The processes on devices whose UUIDs are not known, because the process was killed before they were recorded.
    on_unknown: Vec<Process>,
    /// The recordings already added, by path and by their own id, because the same one, or a copy of it, may be given
    /// twice.
    known: (BTreeSet<PathBuf>, BTreeSet<u64>),
}

#[derive(Debug)]
struct Process {
    file: PathBuf,
    host: Option<String>,
    device: Device,
    /// False if it is not known which device of the machine it is.
    is_known: bool,
    highest: u64,
    /// The peaks of places with a limit on the device.
    places: Vec<PlacePeak>,
    /// True if the recording contains only the peaks.
    has_only_peaks: bool,
    /// True if the recording does not show how the memory of the device changed over time: its pools keep unused
    /// memory, or it contains only the peaks.
    has_only_peak: bool,
}

/// A change of the memory of a process.
struct Step {
    /// In nanoseconds since 1970.
    time: u64,
    delta: i64,
    process: usize,
}

/// The most memory that processes held at the same time.
struct Highest {
    bytes: u64,
    /// How much of it each process had.
    held: Vec<i64>,
    /// False if it is not known when the processes had their memory.
    is_certain: bool,
}

/// The most memory that all recorded processes had on a device at the same time.
#[derive(Debug)]
pub(super) struct SharedPeak {
    pub(super) device: u32,
    pub(super) processes: usize,
    pub(super) bytes: u64,
    /// False if the processes may have had less.
    pub(super) is_certain: bool,
}

/// Something that several processes have: a device, or a place on it.
#[derive(Clone, Copy)]
enum Of<'a> {
    Device,
    Place { place: &'a str, is_of_tensors: bool },
}

impl Process {
    fn place(&self, of: Of<'_>) -> Option<&PlacePeak> {
        let Of::Place { place, is_of_tensors } = of else { return None };
        self.places.iter().find(|peak| peak.place == place && peak.is_of_tensors == is_of_tensors)
    }

    fn highest(&self, of: Of<'_>) -> u64 {
        match of {
            Of::Device => self.highest,
            Of::Place { .. } => self.place(of).map_or(0, |peak| peak.bytes),
        }
    }

    /// Returns whether the recording does not show how the memory of the process changed over time.
    fn is_timeless(&self, of: Of<'_>) -> bool {
        match of {
            Of::Device => self.has_only_peak,
            Of::Place { .. } => self.has_only_peaks,
        }
    }
}

impl Together {
    /// Adds a recording. `places` are the peaks of places with a limit.
    pub(super) fn add(&mut self, history: &History, overview: &Overview, places: &[PlacePeak]) {
        let (paths, ids) = &mut self.known;
        let is_new_path = paths.insert(history.path.canonicalize().unwrap_or_else(|_| history.path.clone()));
        let is_new_id = history.definitions().ring().is_none_or(|ring| ids.insert(ring.recording));
        if !is_new_path || !is_new_id {
            return;
        }
        for of in overview.devices.iter().filter(|of| !of.simulated) {
            let device = Device { family: Family::Cuda, ordinal: of.device };
            let uuid = history.definitions().device(device).and_then(|defined| defined.uuid.clone());
            if let Some(highest) = of.highest_bytes() {
                let has_only_peaks = history.has_only_peaks();
                let has_only_peak = has_only_peaks || of.driver_peak_bytes.is_some();
                let places = places.iter().filter(|peak| peak.device == of.device).cloned().collect();
                let file = history.path.clone();
                let is_known = uuid.is_some();
                let host = overview.host.clone();
                let process = Process { file, host, device, is_known, highest, places, has_only_peaks, has_only_peak };
                let machine = overview.host.clone().filter(|_| overview.cards.is_some());
                match uuid {
                    Some(uuid) => self.processes.entry((uuid, machine)).or_default().push(process),
                    // A PyTorch snapshot names neither the GPU nor the machine.
                    None if history.is_snapshot => {}
                    None => self.on_unknown.push(process),
                }
            }
        }
    }

    /// Returns the devices on which the processes together exceeded the limit at the same time, although none of them did by
    /// itself. The limit is for the device, or for a place on it.
    pub(super) fn above(&self, place: Option<&str>, limit: Bytes) -> Result<Vec<Finding>, Failure> {
        let list = match place {
            None => vec![Of::Device],
            Some(place) => [false, true].map(|is_of_tensors| Of::Place { place, is_of_tensors }).to_vec(),
        };
        let mut found = Vec::new();
        for of in list {
            for processes in &self.devices() {
                let highest = || processes.iter().map(|process| process.highest(of));
                let sum = highest().fold(0_u64, u64::saturating_add);
                if sum > limit.get() && highest().all(|highest| highest <= limit.get()) {
                    found.extend(on_device(processes, of, limit)?);
                }
            }
        }
        Ok(found)
    }

    /// Returns the processes of each device. A device without a UUID may be any of its machine with the same ordinal.
    fn devices(&self) -> Vec<Vec<&Process>> {
        let mut all: Vec<Vec<&Process>> = self.processes.values().map(|of_device| of_device.iter().collect()).collect();
        for process in &self.on_unknown {
            let mut is_placed = false;
            let may_be_it = |other: &&Process| (other.device, &other.host) == (process.device, &process.host);
            for others in all.iter_mut().filter(|others| others.iter().any(may_be_it)) {
                others.push(process);
                is_placed = true;
            }
            if !is_placed {
                all.push(vec![process]);
            }
        }
        all
    }

    /// Returns the peak of each device, sorted by its ordinal and then by the peak, the highest first.
    pub(super) fn peaks(&self) -> Result<Vec<SharedPeak>, Failure> {
        let peak = |processes: &Vec<&Process>| {
            let (bytes, is_certain) = match processes.as_slice() {
                [only] => (only.highest, true),
                processes => {
                    let highest = Highest::of(processes, Of::Device)?;
                    (highest.bytes, highest.is_certain)
                }
            };
            Ok(SharedPeak { device: processes[0].device.ordinal, processes: processes.len(), bytes, is_certain })
        };
        let mut peaks = self.devices().iter().map(peak).collect::<Result<Vec<_>, Failure>>()?;
        peaks.sort_by_key(|peak| (peak.device, Reverse(peak.bytes)));
        Ok(peaks)
    }
}

fn on_device(processes: &[&Process], of: Of<'_>, limit: Bytes) -> Result<Option<Finding>, Failure> {
    let highest = Highest::of(processes, of)?;
    if highest.bytes <= limit.get() {
        return Ok(None);
    }
    let mut held: Vec<_> = processes.iter().zip(highest.held).filter(|(_, bytes)| *bytes > 0).collect();
    held.sort_by_key(|(_, bytes)| Reverse(*bytes));
    let amount = |bytes: i64| Bytes::new(bytes.unsigned_abs());
    let names = held.iter().take(MOST_NAMED);
    let mut names: Vec<_> =
        names.map(|(of, bytes)| format!("{} {}", one_line(&of.file.to_string_lossy()), amount(*bytes))).collect();
    names.extend((held.len() > MOST_NAMED).then(|| format!("{} more", held.len() - MOST_NAMED)));
    let had = if highest.is_certain { "had" } else { "may have had" };
    let (what, place) = match of {
        Of::Device => (String::new(), None),
        Of::Place { place, is_of_tensors } => {
            let what = if is_of_tensors { "tensors of " } else { "" };
            (format!(" in {what}`{place}`"), Some(place.to_owned()))
        }
    };
    let text = format!(
        "device {}: {} processes {had} {}{what} at the same time, {} above the limit of {limit}: {}",
        processes[0].device.ordinal,
        held.len(),
        Bytes::new(highest.bytes),
        Bytes::new(highest.bytes - limit.get()),
        names.join(", ")
    );
    Ok(Some(Finding { text, place }))
}

impl Highest {
    fn of(processes: &[&Process], of: Of<'_>) -> Result<Self, Failure> {
        let (mut steps, mut ends) = (Vec::new(), vec![0..0; processes.len()]);
        for (number, process) in processes.iter().enumerate().filter(|(_, process)| process.highest(of) > 0) {
            ends[number] = steps_of(number, process, of, &mut steps)?;
        }
        // At equal times, frees come first: one process may allocate the memory that another one frees.
        steps.sort_by_key(|step| (step.time, step.delta));
        let (mut now, mut most, mut count) = (0_i64, 0, 0);
        for (number, step) in steps.iter().enumerate() {
            now = now.saturating_add(step.delta);
            if now > most {
                (most, count) = (now, number + 1);
            }
        }
        let steps = &steps[..count];
        let mut held = vec![0_i64; processes.len()];
        for step in steps {
            held[step.process] += step.delta;
        }
        let has_ended = |end: &Range<u64>| steps.last().is_some_and(|last| end.contains(&last.time));
        let holds = processes.iter().zip(&ends).zip(&held).filter(|(_, bytes)| **bytes > 0);
        let is_certain = !processes.iter().any(|process| process.is_timeless(of))
            && holds.map(|(of, _)| of).all(|(process, end)| process.is_known && !has_ended(end));
        Ok(Self { bytes: most.unsigned_abs(), held, is_certain })
    }
}

/// Adds the changes of the memory of one process. Returns the earliest and the latest time at which the process may
/// have ended, in nanoseconds since 1970.
fn steps_of(number: usize, process: &Process, of: Of<'_>, steps: &mut Vec<Step>) -> Result<Range<u64>, Failure> {
    let history = History::read(&process.file)?;
    let started = nanos(history.definitions().process().started);
    let mut step = |time: u64, delta| {
        let time = started.saturating_add(time);
        steps.push(Step { time, delta, process: number });
    };
    let end = history.end_nanos();
    let within = history.definitions().ended().map_or(0, |ended| nanos(ended.within));
    let ends = started.saturating_add(end.saturating_sub(within))..started.saturating_add(end);
    if process.is_timeless(of) {
        let highest = signed(process.highest(of));
        step(0, highest);
        step(end, -highest);
        return Ok(ends);
    }
    let Some(device) = history.devices.iter().position(|device| device.device == process.device) else {
        return Ok(ends);
    };
    let changes = match process.place(of) {
        Some(peak) => changes_of(&history, peak),
        None => changes_on(&history, device),
    };
    let mut live = 0;
    for (time, delta) in changes {
        live += delta;
        step(time, delta);
    }
    // When a process ends, the device takes back all its memory.
    step(end, -live);
    Ok(ends)
}

/// Returns the changes of the memory of a process on a device, each with its time.
fn changes_on(history: &History, device: usize) -> Vec<(u64, i64)> {
    let changes = history.lives.changes().filter(|change| {
        let block = history.lives.block(change.block);
        let origin = history.origins.get(block.origin as usize);
        usize::from(block.device) == device && origin.is_none_or(|origin| origin.kind.is_on_device())
    });
    changes.map(|change| (change.time, change.delta)).collect()
}
