//! Allocations that the driver rejected because memory ran out. An allocator with a cache empties the cache and tries
//! again, so a failed allocation does not by itself mean that the program failed.

use std::time::Duration;

use gpumem_core::{
    derive::Names,
    model::{Bytes, Family},
    report::{InUse, counted},
};
use serde::Serialize;

use super::process;
use crate::history::{History, Moment, ProcessMemory, RejectedRequest, in_words};

/// At most this many are listed in JSON and on the page: the latest ones.
const MOST: usize = 1_000;

/// The allocations that the driver rejected. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rejections {
    pub(crate) count: u64,
    /// The number of these allocations after which the same thread got as much memory within a second.
    pub(crate) obtained_soon: u64,
    pub(crate) largest_bytes: u64,
    /// The main failed allocation: the last one after which the thread did not get the memory, else the last one.
    pub(crate) main: RejectedAllocation,
    /// The latest failed allocations.
    #[serde(rename = "newest")]
    pub(crate) latest: Vec<RejectedAllocation>,
    /// Who had the memory of the device at the main failed allocation. `None` if the recording does not contain it.
    pub(crate) in_use: Option<InUse>,
    /// The part that rejected them: gpumem if the GPU is not the real one, else the driver.
    #[serde(skip)]
    by: &'static str,
    /// True if the recording contains the memory that was live at the main failed allocation.
    #[serde(skip)]
    pub(crate) is_live_known: bool,
}

/// One failed allocation.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RejectedAllocation {
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
    pub(crate) kind: &'static str,
    /// `None` if it is not known, or if the memory is on the host.
    pub(crate) device: Option<u32>,
    pub(crate) simulated: bool,
    /// The line that requested it; else the library.
    pub(crate) place: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) library: Option<String>,
    /// The live driver blocks that were seen on the device. `None` if the recording does not contain them.
    pub(crate) live_bytes: Option<u64>,
    /// The size of the device's memory.
    pub(crate) total_bytes: Option<u64>,
    /// The free memory at the next reading of the device, shortly after. `None` if it was not read.
    pub(crate) free_bytes: Option<u64>,
    /// The memory in use at that reading that is not in `live_bytes`: the CUDA context and kernels, other processes,
    /// and unseen memory.
    pub(crate) rest_bytes: Option<u64>,
    pub(crate) obtained_soon: bool,
}

impl RejectedAllocation {
    fn of(history: &History, rejected: &RejectedRequest) -> Self {
        let stack = history.definitions().stack(rejected.stack);
        let device = rejected.device_in(history);
        let has_library_as_place = stack.library_as_place().is_some();
        let live_bytes = rejected.live.filter(|_| history.is_whole_at(rejected.number));
        let defined = device.and_then(|device| history.definitions().device(device)?.total);
        let used = rejected.memory.map(|memory| memory.used.get());
        Self {
            seconds: Duration::from_nanos(rejected.time).as_secs_f64(),
            bytes: rejected.bytes,
            kind: rejected.kind.name(),
            device: device.map(|device| device.ordinal),
            simulated: device.is_some_and(|device| device.family == Family::Simulated),
            place: stack.line.filter(|_| !has_library_as_place).or_else(|| stack.library.clone()),
            caller: stack.caller.filter(|_| !has_library_as_place),
            library: stack.library,
            live_bytes,
            total_bytes: rejected.memory.map(|memory| memory.total).or(defined).map(Bytes::get),
            free_bytes: rejected.memory.map(|memory| memory.free.get()),
            rest_bytes: used.zip(live_bytes).map(|(used, live)| used.saturating_sub(live)),
            obtained_soon: rejected.was_obtained,
        }
    }

    /// Returns text such as `2 GiB (device) after 3.2 s, at train.py:5, while 14 GiB of device 0 were in use`.
    fn in_words(&self) -> String {
        let after = in_words(Duration::try_from_secs_f64(self.seconds).unwrap_or_default());
        let place = self.place.as_ref().map(|place| format!("at {place}"));
        let caller = self.caller.as_ref().map(|caller| format!("called from {caller}"));
        let live = self.live_bytes.zip(self.device).map(|(live, device)| {
            let simulated = if self.simulated { "simulated " } else { "" };
            format!("while the process had {} of {simulated}device {device} in use", Bytes::new(live))
        });
        let request = format!("{} ({}) after {after}", Bytes::new(self.bytes), self.kind);
        let words: Vec<_> = [Some(request), place, caller, live].into_iter().flatten().collect();
        words.join(", ")
    }

    /// Returns text such as `Device 0 has 15.40 GiB. Shortly after: free 1.2 GiB; in use by allocations 9 GiB, by …`.
    fn device_in_words(&self, in_use: Option<&InUse>) -> Option<String> {
        let simulated = if self.simulated { "The simulated device" } else { "Device" };
        let size = format!("{simulated} {} has {}", self.device?, Bytes::new(self.total_bytes?));
        let words = in_use.and_then(in_use_in_words);
        let free = self.free_bytes.map(|free| format!("Shortly after: free {}.", Bytes::new(free)));
        let words = words.or(free).map(|words| format!(" {words}")).unwrap_or_default();
        Some(format!("{size}.{words}"))
    }
}

/// Returns who had the memory of the device when the main allocation failed. The reading of the device follows it shortly after.
fn in_use(history: &History, main: &RejectedRequest) -> Option<InUse> {
    if !history.is_whole_at(main.number) {
        return None;
    }
    let process: Option<ProcessMemory> = history.process_at(Moment::Oom).into_iter().nth(usize::from(main.device?))?;
    let read = [main.memory.map(|memory| memory.free), main.memory.map(|memory| memory.used)];
    let Some(process) = process else {
        return Some(InUse::of_process(read, Bytes::new(main.live?), (None, false), None));
    };
    let bytes = |bytes: i64| Bytes::new(bytes.unsigned_abs());
    let driver = (Some(bytes(process.besides_allocations())), process.is_at_most());
    Some(InUse::of_process(read, bytes(process.allocated_bytes), driver, process::largest(&process)))
}

/// Returns who had the memory, as a sentence. `None` if only the allocations are known, because another line names them.
fn in_use_in_words(in_use: &InUse) -> Option<String> {
    match (in_use.free, in_use.driver) {
        (Some(_), _) => Some(format!("Shortly after: {in_use}.")),
        (None, Some(_)) => Some(format!("At that time: {in_use}.")),
        (None, None) => None,
    }
}

/// Returns who had the memory of this device when the main allocation failed on it, as a sentence.
pub(super) fn in_use_at_oom(history: &History, device: usize) -> Option<String> {
    let main = history.oom().filter(|main| main.device.map(usize::from) == Some(device))?;
    in_use_in_words(&in_use(history, main)?)
}

impl Rejections {
    pub(crate) fn of(history: &History) -> Option<Self> {
        let main = history.oom()?;
        let all = &history.rejections;
        Some(Self {
            count: all.len() as u64,
            obtained_soon: all.iter().filter(|rejected| rejected.was_obtained).count() as u64,
            largest_bytes: all.iter().map(|rejected| rejected.bytes).max().unwrap_or(0),
            main: RejectedAllocation::of(history, main),
            latest: all[all.len().saturating_sub(MOST)..]
                .iter()
                .map(|rejected| RejectedAllocation::of(history, rejected))
                .collect(),
            in_use: in_use(history, main),
            by: if history.definitions().process().cards.is_some() { "gpumem" } else { "the driver" },
            is_live_known: history.is_whole_at(main.number),
        })
    }

    /// Describes the failed allocations in at most three lines.
    pub(crate) fn in_words(&self) -> Vec<String> {
        let Self { count, obtained_soon, largest_bytes, main, by, .. } = self;
        let (largest, soon) = (Bytes::new(*largest_bytes), "as allocators with a cache do that empty it and try again");
        if count == obtained_soon {
            let many = counted(*count, "allocation", "allocations");
            let most = if *count > 1 { format!(", {largest} at most") } else { String::new() };
            return vec![
                format!("Memory was short: {by} rejected {many}{most}; the last: {}.", main.in_words()),
                format!("Each time the same thread obtained as much within a second, {soon}."),
            ];
        }
        let mut lines = vec![format!(
            "Out of memory: {by} rejected {}. The thread did not obtain as much within a second.",
            main.in_words()
        )];
        lines.extend(main.device_in_words(self.in_use.as_ref()));
        if *count > 1 {
            let soon = match obtained_soon {
                0 => String::new(),
                some => format!("; after {some} of them the same thread obtained as much within a second, {soon}"),
            };
            lines.push(format!("In total, {count} allocations were rejected, the largest of {largest}{soon}."));
        }
        lines
    }
}
