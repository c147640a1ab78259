//! The memory that several processes had on one device at one time, for `--max-peak`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use gpumem_core::model::{Bytes, Device, Family, one_line};

use super::{annotations::Finding, change::signed, overview::Overview};
use crate::{failure::Failure, history::History};

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
    /// The recordings already added, because the same one may be given twice.
    known: BTreeSet<PathBuf>,
}

#[derive(Debug)]
struct Process {
    file: String,
    device: Device,
    highest: u64,
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

impl Together {
    pub(super) fn add(&mut self, history: &History, overview: &Overview) {
        if !self.known.insert(history.path.canonicalize().unwrap_or_else(|_| history.path.clone())) {
            return;
        }
        for of in overview.devices.iter().filter(|of| !of.simulated) {
            let device = Device { family: Family::Cuda, ordinal: of.device };
            let uuid = history.definitions().device(device).and_then(|defined| defined.uuid.clone());
            if let Some((uuid, highest)) = uuid.zip(of.highest_bytes()) {
                let has_only_peak = history.has_only_peaks() || of.driver_peak_bytes.is_some();
                let process = Process { file: overview.file.clone(), device, highest, has_only_peak };
                let machine = overview.host.clone().filter(|_| overview.cards.is_some());
                self.processes.entry((uuid, machine)).or_default().push(process);
            }
        }
    }

    /// Returns the devices on which the processes together exceeded the limit at one time, although none of them did by
    /// itself.
    pub(super) fn above(&self, limit: Bytes) -> Result<Vec<Finding>, Failure> {
        let may_be_above = |processes: &&Vec<Process>| {
            let sum = processes.iter().fold(0_u64, |sum, process| sum.saturating_add(process.highest));
            processes.iter().all(|process| process.highest <= limit.get()) && sum > limit.get()
        };
        let found = self.processes.values().filter(may_be_above).map(|processes| of_device(processes, limit));
        Ok(found.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }
}

fn of_device(processes: &[Process], limit: Bytes) -> Result<Option<Finding>, Failure> {
    let mut steps = Vec::new();
    for (number, process) in processes.iter().enumerate() {
        steps_of(number, process, &mut steps)?;
    }
    // At equal times, frees come first: what one process frees may be what another one allocates.
    steps.sort_by_key(|step| (step.time, step.delta));
    let (mut now, mut most, mut at) = (0_i64, 0, 0);
    for (number, step) in steps.iter().enumerate() {
        now = now.saturating_add(step.delta);
        if now > most {
            (most, at) = (now, number + 1);
        }
    }
    if most <= limit.signed() {
        return Ok(None);
    }
    let mut held = vec![0_i64; processes.len()];
    steps[..at].iter().for_each(|step| held[step.process] += step.delta);
    let mut held: Vec<_> = processes.iter().zip(held).filter(|(_, bytes)| *bytes > 0).collect();
    held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let amount = |bytes: i64| Bytes::new(bytes.unsigned_abs());
    let names = held.iter().take(MOST_NAMED);
    let mut names: Vec<_> = names.map(|(of, bytes)| format!("{} {}", one_line(&of.file), amount(*bytes))).collect();
    names.extend((held.len() > MOST_NAMED).then(|| format!("{} more", held.len() - MOST_NAMED)));
    let (count, device, more) = (held.len(), processes[0].device.ordinal, amount(most - limit.signed()));
    let had = if processes.iter().any(|process| process.has_only_peak) { "may have had" } else { "had" };
    Ok(Some(Finding::new(format!(
        "device {device}: {count} processes {had} {} at one time, {more} above the limit of {limit}: {}",
        amount(most),
        names.join(", ")
    ))))
}

/// Adds the changes of the memory of one process.
fn steps_of(number: usize, process: &Process, steps: &mut Vec<Step>) -> Result<(), Failure> {
    let history = History::read(Path::new(&process.file))?;
    let began = u64::try_from(history.definitions().process().began.as_nanos()).unwrap_or(u64::MAX);
    let mut step = |time: u64, delta| {
        let time = began.saturating_add(time);
        steps.push(Step { time, delta, process: number });
    };
    let end = history.end_nanos();
    if process.has_only_peak {
        step(0, signed(process.highest));
        step(end, -signed(process.highest));
        return Ok(());
    }
    let Some(device) = history.devices.iter().position(|device| device.device == process.device) else { return Ok(()) };
    let mut live = 0;
    for change in history.lives.changes() {
        let block = history.lives.block(change.block);
        let is_in_memory = history.origins.get(block.origin as usize).is_none_or(|origin| origin.kind.is_on_device());
        if usize::from(block.device) == device && is_in_memory {
            live += change.delta;
            step(change.time, change.delta);
        }
    }
    // When a process ends, the device takes back what it has not freed.
    step(end, -live);
    Ok(())
}
