//! What a recording comes to: the peak of each device, what it consisted of, what was not freed, what was not seen.

use std::{path::Path, time::Duration};

use gpumem_core::{
    model::{Device, Family},
    report::{Leaks, PeakHolders, counted},
};
use serde::Serialize;

use super::{
    refused::Refused,
    tensors::{TensorMoment, TensorsOverview},
    text::percent,
};
use crate::history::{ChangeKind, DeviceHistory, Held, History, Moment, in_words, library_or_program, sums_by};

/// What a recording comes to. The names of the fields are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Overview {
    pub(crate) file: String,
    pub(crate) command: Vec<String>,
    pub(crate) pid: u32,
    pub(crate) seconds: f64,
    /// How many there were. `None` if only some of them are in the recording.
    pub(crate) allocations: Option<u64>,
    pub(crate) frees: Option<u64>,
    pub(crate) sources: Vec<SourceOverview>,
    /// `None` if the driver refused no allocation.
    pub(crate) refused: Option<Refused>,
    pub(crate) devices: Vec<DeviceOverview>,
    /// PyTorch's tensors, if `--torch` asked for them.
    pub(crate) torch: Option<TensorsOverview>,
    pub(crate) not_freed: NotFreed,
    pub(crate) missing: Missing,
    #[serde(skip)]
    pub(crate) leaks: Leaks,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct SourceOverview {
    pub(crate) source: &'static str,
    pub(crate) library: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DeviceOverview {
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    pub(crate) name: Option<String>,
    pub(crate) total_bytes: Option<u64>,
    /// The most that was live of what was seen. `None` if nothing was allocated.
    pub(crate) peak_bytes: Option<u64>,
    pub(crate) peak_seconds: Option<f64>,
    pub(crate) peak_by_kind: Vec<Sum>,
    pub(crate) peak_by_library: Vec<Sum>,
    pub(crate) peak_by_scope: Vec<Sum>,
    pub(crate) peak_by_place: Vec<PlaceSum>,
    /// Managed and pinned host memory, which is not in the peak: the most that was live of each, at its own moment. `None` if it is not
    /// in the recording.
    pub(crate) besides: Option<Vec<Sum>>,
    pub(crate) live_at_end_bytes: u64,
    pub(crate) pool_reserved_bytes: Option<u64>,
    /// Readings of the whole device, with the context and other processes.
    pub(crate) samples: u64,
    pub(crate) highest_sample_bytes: Option<u64>,
    pub(crate) highest_sample_seconds: Option<f64>,
    /// The same as the library prints it: only for a report that shows it.
    #[serde(skip)]
    pub(crate) holders: Option<PeakHolders>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Sum {
    pub(crate) name: String,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PlaceSum {
    pub(crate) scope: Vec<String>,
    /// The line; else the library, or where the scope was opened.
    pub(crate) place: String,
    pub(crate) line: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) library: Option<String>,
    pub(crate) kind: &'static str,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct NotFreed {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    /// `None` if it is not in the recording.
    pub(crate) gone_with_context: Option<u64>,
    pub(crate) places: Vec<NotFreedPlace>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct NotFreedPlace {
    pub(crate) place: String,
    pub(crate) caller: Option<String>,
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

/// Of more devices, only the peak is shown, without a table of what made it.
const IN_DETAIL: usize = 32;

/// What the recording does not have. All 0 and empty: nothing is known to be missing.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Missing {
    /// Why the file ends too early.
    pub(crate) incomplete: Option<String>,
    /// Of events up to this number, there are only those of blocks that were live then. A peak before that is not known.
    pub(crate) begins_after_event: Option<u64>,
    /// Only what was live at the peaks and at the end is there.
    pub(crate) has_only_peaks: bool,
    /// The process had run for so long when the recording began. What it had allocated before is not known.
    pub(crate) begins_after_seconds: Option<f64>,
    /// Allocations were not intercepted.
    pub(crate) not_intercepted: bool,
    pub(crate) lost_events: u64,
    /// Frees of unknown blocks.
    pub(crate) untracked_frees: u64,
    /// Frees that were missed: the address was given to another block.
    pub(crate) missed_frees: u64,
    /// The command and the ledger of the library disagree: figures may be wrong.
    pub(crate) contradictory: bool,
    /// What the reader left out.
    pub(crate) unreadable_items: u64,
}

impl Missing {
    pub(crate) fn of(history: &History) -> Self {
        let counts = history.counts();
        let part = history.definitions().part();
        let skipped = history.skipped();
        let missed = history.changes.iter().filter(|change| change.kind == ChangeKind::FreeMissed).count();
        Self {
            incomplete: history.incomplete(),
            begins_after_event: part.filter(|part| !part.is_peaks).map(|part| part.after),
            has_only_peaks: history.has_only_peaks(),
            begins_after_seconds: history.definitions().process().ran_before.map(|before| before.as_secs_f64()),
            not_intercepted: history.incomplete().is_none()
                && history.sources().is_empty()
                && history.blocks.is_empty(),
            lost_events: counts.lost,
            untracked_frees: counts.untracked,
            missed_frees: missed as u64,
            contradictory: history.disagrees(),
            unreadable_items: skipped.unknown_records
                + skipped.not_understood
                + skipped.contradictions
                + skipped.above_limits,
        }
    }

    /// The peak may be another one than the recording has.
    pub(crate) fn leaves_peak_unknown(&self) -> bool {
        self.incomplete.is_some()
            || self.begins_after_event.is_some()
            || self.begins_after_seconds.is_some()
            || self.not_intercepted
            || self.contradictory
            || self.lost_events + self.missed_frees + self.unreadable_items > 0
    }

    /// One line for each thing that is missing.
    pub(crate) fn in_words(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(why) = &self.incomplete {
            lines.push(format!("The file has no end: {why}. The report covers what comes before."));
        }
        if let Some(after) = self.begins_after_event {
            let first = if after == 1 { "event is".to_owned() } else { format!("{after} events are") };
            lines.push(format!(
                "The first {first} not in the recording (--max-size), only the blocks that were live after them: the true peak may be higher and earlier."
            ));
        }
        if let Some(seconds) = self.begins_after_seconds {
            let after = in_words(Duration::from_secs_f64(seconds.max(0.0)));
            lines.push(format!(
                "The recording began when the process had run for {after}: what was allocated before is not in it."
            ));
        }
        if self.has_only_peaks {
            lines.push(
                "Only what was live at the peak of each device and at the end is in the recording (--only-peak)."
                    .to_owned(),
            );
        }
        if self.not_intercepted {
            lines.push("Allocations were not intercepted: what was allocated is not known.".to_owned());
        }
        if self.contradictory {
            lines.push("The recording contradicts itself: an address was allocated again without a free. Figures may be wrong.".to_owned());
        }
        let counts = [
            (self.lost_events, "event was lost", "events were lost", "some figures may be wrong"),
            (
                self.untracked_frees,
                "free of an unknown block",
                "frees of unknown blocks",
                "some figures may be too high",
            ),
            (
                self.missed_frees,
                "free was missed",
                "frees were missed",
                "other blocks were allocated at the same addresses",
            ),
            (
                self.unreadable_items,
                "item of the file is left out",
                "items of the file are left out",
                "above limits, in contradiction to others, or of a newer version",
            ),
        ];
        let counts = counts.into_iter().filter(|(count, ..)| *count > 0);
        lines.extend(counts.map(|(count, one, many, why)| format!("{}: {why}.", counted(count, one, many))));
        lines
    }
}

impl PlaceSum {
    pub(crate) fn library_or_program(&self) -> String {
        library_or_program(self.library.as_deref(), self.line.as_deref())
    }
}

pub(crate) fn sums(sums: Vec<(String, i64, i64)>) -> Vec<Sum> {
    sums.into_iter().map(|(name, bytes, blocks)| Sum { name, bytes, blocks }).collect()
}

/// By scope, place and kind, the largest first.
pub(crate) fn place_sums(held: &[Held<'_>]) -> Vec<PlaceSum> {
    let mut all: Vec<PlaceSum> = Vec::new();
    let mut known = std::collections::HashMap::new();
    for Held { origin, bytes, blocks, .. } in held {
        let key = (&origin.path, origin.place(), &origin.caller, origin.kind);
        let at = *known.entry(key).or_insert(all.len());
        match all.get_mut(at) {
            Some(sum) => {
                sum.bytes += bytes;
                sum.blocks += blocks;
            }
            None => all.push(PlaceSum {
                scope: origin.path.clone(),
                place: origin.place(),
                line: origin.line.clone(),
                caller: origin.caller.clone(),
                library: origin.library.clone(),
                kind: origin.kind.name(),
                bytes: *bytes,
                blocks: *blocks,
            }),
        }
    }
    all.sort_by_key(|sum| std::cmp::Reverse(sum.bytes));
    all
}

impl Overview {
    pub(crate) fn of(history: &History) -> Self {
        let held = history.held_after(&history.changes_at(Moment::Peak));
        let mut devices: Vec<_> = history.devices.iter().zip(held.into_iter().zip(history.most_besides())).collect();
        devices.sort_by_key(|(of, _)| (of.device.family as u8, of.device.ordinal));
        let devices =
            devices.into_iter().map(|(of, (held, besides))| DeviceOverview::of(history, of, held, besides)).collect();
        let leaks = history.leaks();
        let changes = |kind: ChangeKind| {
            let count = || history.changes.iter().filter(|change| change.kind == kind).count() as u64;
            (!history.has_only_peaks()).then(count)
        };
        let process = history.definitions().process();
        Self {
            file: history.path.display().to_string(),
            command: process.arguments.clone(),
            pid: process.pid,
            seconds: history.end.as_secs_f64(),
            allocations: changes(ChangeKind::Alloc),
            frees: changes(ChangeKind::Free),
            sources: history
                .sources()
                .into_iter()
                .map(|(source, library)| SourceOverview { source: source.name(), library: library.to_owned() })
                .collect(),
            refused: Refused::of(history),
            devices,
            torch: TensorsOverview::of(history),
            not_freed: NotFreed::of(&leaks, history.has_only_peaks()),
            missing: Missing::of(history),
            leaks,
        }
    }

    pub(crate) fn read(path: &Path) -> Result<Self, crate::failure::Failure> {
        Ok(Self::of(&History::read(path)?))
    }

    /// The same for the summary of a single recording, which shows the peaks in detail.
    pub(crate) fn read_in_detail(path: &Path) -> Result<Self, crate::failure::Failure> {
        let mut history = History::read(path)?;
        let mut overview = Self::of(&history);
        for of in overview.devices.iter_mut().take(IN_DETAIL) {
            let family = if of.simulated { Family::Simulated } else { Family::Cuda };
            of.holders = history.reader().device_peak(Device { family, ordinal: of.device });
        }
        Ok(overview)
    }

    /// One line for each thing that is missing.
    pub(crate) fn missing_in_words(&self) -> Vec<String> {
        let tensors = self.torch.iter().flat_map(TensorsOverview::missing_in_words);
        self.missing.in_words().into_iter().chain(tensors).collect()
    }

    /// The most that tensors had on a device.
    pub(crate) fn tensors_peak(&self, device: u32) -> Option<u64> {
        self.tensors_at_peak(device).map(|peak| peak.allocated_bytes)
    }

    /// When tensors had most on a device.
    pub(super) fn tensors_at_peak(&self, device: u32) -> Option<&TensorMoment> {
        let devices = &self.torch.as_ref()?.devices;
        devices.iter().find(|tensors| tensors.device == device)?.peak.as_ref()
    }

    /// Whether the history of the tensors of PyTorch is there.
    pub(super) fn has_tensors(&self) -> bool {
        self.torch.as_ref().is_some_and(|torch| torch.missing.is_none())
    }

    /// The device whose peak was the highest.
    pub(crate) fn busiest(&self) -> Option<&DeviceOverview> {
        self.devices.iter().rev().filter(|device| device.peak_bytes.is_some()).max_by_key(|device| device.peak_bytes)
    }
}

impl NotFreed {
    pub(crate) fn of(leaks: &Leaks, has_only_peaks: bool) -> Self {
        let places = leaks.places.iter().map(|place| NotFreedPlace {
            place: place.name.clone(),
            caller: place.caller.clone(),
            blocks: place.blocks,
            bytes: place.bytes.get(),
        });
        let gone_with_context = (!has_only_peaks).then_some(leaks.gone);
        Self { blocks: leaks.blocks, bytes: leaks.bytes.get(), gone_with_context, places: places.collect() }
    }
}

impl DeviceOverview {
    /// `held` is what was live at its peak.
    fn of(history: &History, all: &DeviceHistory, held: Vec<Held<'_>>, besides: Vec<(String, i64, i64)>) -> Self {
        let device = all.device;
        let defined = history.definitions().device(device);
        let on_device: Vec<_> = held.into_iter().filter(|held| held.origin.kind.is_on_device()).collect();
        let seconds = |nanos: u64| std::time::Duration::from_nanos(nanos).as_secs_f64();
        Self {
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            name: defined.and_then(|defined| defined.name.clone()),
            total_bytes: defined.and_then(|defined| defined.total).map(gpumem_core::model::Bytes::get),
            peak_bytes: all.peak_at.map(|_| all.peak),
            peak_seconds: all.peak_at.map(|at| seconds(history.time_of(at))),
            peak_by_kind: sums(sums_by(&on_device, |origin| origin.kind.name().to_owned())),
            peak_by_library: sums(sums_by(&on_device, crate::history::Origin::library_or_program)),
            peak_by_scope: sums(sums_by(&on_device, crate::history::Origin::scope)),
            peak_by_place: place_sums(&on_device),
            besides: (!history.has_only_peaks()).then(|| sums(besides)),
            live_at_end_bytes: all.live,
            pool_reserved_bytes: all.pool_reserved,
            samples: all.samples,
            highest_sample_bytes: all.highest_sample.map(|(_, memory)| memory.used.get()),
            highest_sample_seconds: all.highest_sample.map(|(time, _)| seconds(time)),
            holders: None,
        }
    }

    /// The place that holds most of the peak: `src/adam.rs:30 in train > step, called from src/main.rs:9, holds 60 % of the peak`.
    pub(crate) fn most(&self) -> Option<String> {
        let peak = self.peak_bytes?;
        // One without a line, a library and a scope is no place that a reader could go to.
        let is_known = |sum: &&PlaceSum| sum.line.is_some() || sum.library.is_some() || !sum.scope.is_empty();
        let PlaceSum { scope, place, caller, bytes, .. } = self.peak_by_place.iter().find(is_known)?;
        let scope = if scope.is_empty() { String::new() } else { format!(" in {}", scope.join(" > ")) };
        let caller = caller.as_ref().map(|caller| format!(", called from {caller},")).unwrap_or_default();
        Some(format!("{place}{scope}{caller} holds {} of the peak", percent(*bytes, peak)))
    }

    pub(crate) fn words(&self) -> String {
        let simulated = if self.simulated { "simulated " } else { "" };
        let name = self.name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        format!("{simulated}device {}{name}", self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_not_several() {
        let missing = Missing { lost_events: 1, untracked_frees: 2, unreadable_items: 1, ..Missing::default() };
        let lines = missing.in_words();
        assert_eq!(lines[0], "1 event was lost: some figures may be wrong.");
        assert_eq!(lines[1], "2 frees of unknown blocks: some figures may be too high.");
        assert!(lines[2].starts_with("1 item of the file is left out: "), "{}", lines[2]);
        let part = Missing { begins_after_event: Some(1), ..Missing::default() };
        assert!(part.in_words()[0].starts_with("The first event is not in the recording (--max-size), "));
    }

    #[test]
    fn most_is_a_place_that_is_known() {
        let sum = |line: Option<&str>, bytes| PlaceSum {
            scope: Vec::new(),
            place: line.unwrap_or("line not known").to_owned(),
            line: line.map(str::to_owned),
            caller: None,
            library: None,
            kind: "pool",
            bytes,
            blocks: 1,
        };
        let peak_by_place = vec![sum(None, 90), sum(Some("src/a.rs:1"), 10)];
        let mut device = DeviceOverview { peak_bytes: Some(100), peak_by_place, ..DeviceOverview::default() };
        assert_eq!(device.most().as_deref(), Some("src/a.rs:1 holds 10 % of the peak"));
        device.peak_by_place.pop();
        assert_eq!(device.most(), None);
    }
}
