//! The overview of a recording: the peak of each device and its parts, the memory that was not freed, and the data that
//! is missing.

use std::time::Duration;

use gpumem_core::{
    derive::registered_pool,
    export::{Amounts, pool_in_words},
    ledger::KnownPool,
    model::{Bytes, Device, Family},
    report::{Leaks, PeakHolders, RegisteredPool, SharedNames, counted},
};
use gpumem_driver::settings::{CONTEXT, OF_NO_PROCESS};
use serde::Serialize;

use super::{
    communicators::{Communicator, communicators},
    dry_run::DryRunOverview,
    place_sums::{PlaceSum, place_sums, shared_sums},
    process::{Kept, kept},
    rejected::Rejections,
    tensors::{TensorMoment, TensorsOverview},
    text::percent,
};
use crate::{
    formats::frames::called_from_line,
    history::{
        ChangeKind, DeviceHistory, History, Moment, Origin, OriginSum, ProcessMemory, Sum, in_words, sums_by,
        tensors::Tensors,
    },
};

/// The overview of a recording. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Overview {
    pub(crate) file: String,
    pub(crate) command: Vec<String>,
    /// `None` if the process id is not known, as for an estimate and for a PyTorch snapshot.
    pub(crate) pid: Option<u32>,
    /// The name of the machine or the container. `None` if it is not known.
    pub(crate) host: Option<String>,
    /// The rank of the process in its job. `None` if it has none, or if it is not known.
    pub(crate) rank: Option<u64>,
    pub(crate) seconds: f64,
    /// How the GPUs that the process saw differ from the real ones. `None` if they are the real ones.
    pub(crate) cards: Option<String>,
    /// How far the figures of a dry run hold. `None` if it was none.
    pub(crate) dry_run: Option<DryRunOverview>,
    /// The number of allocations. `None` if the recording contains only some of them.
    pub(crate) allocations: Option<u64>,
    pub(crate) frees: Option<u64>,
    pub(crate) sources: Vec<SourceOverview>,
    /// `None` if the driver rejected no allocation.
    #[serde(rename = "refused")]
    pub(crate) rejected: Option<Rejections>,
    pub(crate) devices: Vec<DeviceOverview>,
    /// PyTorch's tensors, if `--torch` was given.
    pub(crate) torch: Option<TensorsOverview>,
    /// `None` if nothing is known about the program's memory.
    pub(crate) not_freed: Option<NotFreed>,
    /// Executable graphs and unused memory of pools at the end, by device.
    pub(crate) kept_by_driver: Vec<Kept>,
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
    /// The highest value of the live memory that was seen. `None` if nothing was allocated.
    pub(crate) peak_bytes: Option<u64>,
    pub(crate) peak_seconds: Option<f64>,
    pub(crate) peak_by_kind: Vec<Sum>,
    pub(crate) peak_by_library: Vec<Sum>,
    pub(crate) peak_by_scope: Vec<Sum>,
    pub(crate) peak_by_place: Vec<PlaceSum>,
    /// The memory of the package functions called from the place with most of the peak.
    pub(crate) inside_most: Vec<Sum>,
    /// The peaks of managed and pinned host memory, each at its own moment. They are not part of the device's peak.
    /// `None` if the recording does not contain them.
    pub(crate) besides: Option<Vec<Sum>>,
    /// The pinned host memory of PyTorch's allocator at its own peak, by place. The allocator rounds each request up to
    /// a power of two, so more than half of the bytes were requested. `None` if the recording does not contain it.
    pub(crate) pinned_by_pytorch: Option<Vec<Sum>>,
    /// The highest value of driver blocks. `None` without a registered pool, because it equals the peak then, or if the
    /// recording does not contain it.
    pub(crate) driver_peak_bytes: Option<u64>,
    /// The registered pools at the peak, or at the end. Their unused memory is not part of the peak.
    pub(crate) pools: Vec<PoolOverview>,
    pub(crate) live_at_end_bytes: u64,
    /// The memory of the process at its highest value, with what the driver took by itself. `None` if that was not measured.
    /// A recording of the peaks only has the moment of `peak_bytes`.
    pub(crate) process_peak: Option<ProcessMemory>,
    /// The communicators of NCCL that have memory at these peaks, the largest first.
    pub(crate) communicators: Vec<Communicator>,
    /// The number of readings of the whole device, which include the context and other processes.
    pub(crate) samples: u64,
    pub(crate) highest_sample_bytes: Option<u64>,
    pub(crate) highest_sample_seconds: Option<f64>,
    /// The peak as the library prints it. Only filled in for reports that show it.
    #[serde(skip)]
    pub(crate) holders: Option<PeakHolders>,
}

/// A registered pool at the peak of its device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolOverview {
    pub(crate) name: String,
    /// True if the pool was empty at the peak. The values are those at the end then.
    pub(crate) is_at_end: bool,
    /// The bytes of its parts.
    pub(crate) used_bytes: u64,
    pub(crate) reserved_bytes: u64,
    /// `None` if its parts took more than it had reserved, so that one of the two is wrong.
    pub(crate) unused_bytes: Option<u64>,
    /// The number of calls in the whole recording that cannot be right.
    pub(crate) wrong_calls: u64,
    #[serde(skip)]
    pool: RegisteredPool,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct NotFreed {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    /// `None` if the recording does not contain it.
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

/// With more devices than this, only the peaks are shown, without tables of the memory at the peaks.
const IN_DETAIL: usize = 32;

/// The data that the recording lacks. If all fields are 0 or empty, nothing is known to be missing.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct Missing {
    /// Why the file ends too early.
    pub(crate) incomplete: Option<String>,
    /// Why the program's symbols are missing. `None` if they are present, or if the program has none.
    pub(crate) symbols: Option<&'static str>,
    /// The recording starts with the blocks that were live after the event with this number. An earlier peak is not
    /// known.
    pub(crate) begins_after_event: Option<u64>,
    /// True if the recording contains only the blocks that were live at the peaks and at the end.
    pub(crate) has_only_peaks: bool,
    /// How long the process had been running when the recording started. Earlier allocations are not known.
    pub(crate) begins_after_seconds: Option<f64>,
    /// True if the file is a snapshot of PyTorch's allocator, which contains nothing else about the process.
    pub(crate) has_only_pytorch: bool,
    /// True if the snapshot has no history. Only its live blocks are known.
    #[serde(skip)]
    has_no_history: bool,
    /// True if no allocations were intercepted.
    pub(crate) not_intercepted: bool,
    pub(crate) lost_events: u64,
    /// The number of frees of unknown blocks.
    pub(crate) untracked_frees: u64,
    /// The number of missed frees: the address was given to another block.
    pub(crate) missed_frees: u64,
    /// True if the command and the library's ledger disagree, or a snapshot contradicts itself. Values may be wrong
    /// then.
    pub(crate) contradictory: bool,
    /// The contradictions as text, including those in PyTorch's history.
    #[serde(skip)]
    pub(super) contradictions: Vec<String>,
    /// The number of items that the reader skipped.
    pub(crate) unreadable_items: u64,
}

/// Why a recording without an end has no lines.
const NO_SYMBOLS: &str = "symbols are written at the end of the recording, which is missing; a process that still records writes them when it ends";

/// Also a program without symbols calls functions of libraries that have some.
const NO_FUNCTIONS: &str = "No function of a stack is in the recording: it was cut after its last event, or no file of the program has symbols";

impl Missing {
    pub(crate) fn of(history: &History) -> Self {
        let counts = history.counts();
        let part = history.definitions().part();
        let skipped = history.skipped();
        let mut tensors = history.tensors.iter().flat_map(|tensors| &tensors.devices);
        let mut contradictions: Vec<_> = history.tensors.iter().flat_map(Tensors::contradictions_in_words).collect();
        // In other recordings, driver blocks are known without PyTorch's history.
        let contradictory = history.disagrees() || history.is_snapshot && !contradictions.is_empty();
        let disagrees =
            "The recording contradicts itself: an address was allocated again without a free. Numbers may be wrong.";
        contradictions.extend(history.disagrees().then(|| disagrees.to_owned()));
        Self {
            incomplete: history.incomplete(),
            symbols: history.definitions().lacks_symbols().then(|| match history.incomplete() {
                Some(_) => NO_SYMBOLS,
                None => NO_FUNCTIONS,
            }),
            begins_after_event: part.filter(|part| !part.is_peaks).map(|part| part.after),
            has_only_peaks: history.has_only_peaks(),
            begins_after_seconds: history.definitions().process().ran_before.map(|before| before.as_secs_f64()),
            has_only_pytorch: history.is_snapshot,
            has_no_history: history.is_snapshot && tensors.all(|of| of.older_count() == of.steps.len()),
            not_intercepted: history.incomplete().is_none()
                && !history.is_snapshot
                && history.sources().is_empty()
                && history.lives.block_count() == 0
                && history.devices.iter().all(|device| device.driver_peak == 0),
            lost_events: counts.lost + history.overlapping_parts.count,
            untracked_frees: counts.untracked,
            missed_frees: history.lives.count_of(ChangeKind::FreeMissed),
            contradictory,
            contradictions,
            unreadable_items: skipped.unknown_records
                + skipped.not_understood
                + skipped.contradictions
                + skipped.above_limits,
        }
    }

    /// Returns whether the real peak may differ from the recording's. A snapshot contains the events since its
    /// history started, and its peak is the highest value since then.
    pub(crate) fn leaves_peak_unknown(&self) -> bool {
        self.is_unreliable() || self.missed_frees > 0
    }

    /// Returns whether the recording contains nothing, although the program may have allocated.
    pub(crate) fn leaves_all_unknown(&self, history: &History) -> bool {
        history.devices.is_empty() && self.leaves_peak_unknown()
    }

    /// Returns whether the real peak may be higher than the recording's. A snapshot does not contain a peak before
    /// its history.
    pub(crate) fn peak_may_be_higher(&self) -> bool {
        self.is_unreliable() || self.begins_after_event.is_some() || self.has_no_history
    }

    /// Returns whether events are missing, other than those before the history of a snapshot.
    fn is_unreliable(&self) -> bool {
        self.incomplete.is_some()
            || self.begins_after_event.is_some() && !self.has_only_pytorch
            || self.begins_after_seconds.is_some()
            || self.not_intercepted
            || self.contradictory
            || self.lost_events + self.unreadable_items > 0
    }

    /// Returns one line for each thing that is missing.
    pub(crate) fn in_words(&self) -> Vec<String> {
        let mut lines = self.lost_in_words();
        if let Some(why) = self.symbols.filter(|_| self.incomplete.is_none()) {
            lines.push(format!("{why}."));
        }
        if self.has_only_peaks {
            lines.push(
                "The recording contains only the blocks that were live at the peak of each device and at the end (--only-peak)."
                    .to_owned(),
            );
        }
        if self.has_only_pytorch {
            let text = "A PyTorch snapshot contains only the memory of PyTorch's allocator: no other libraries, scopes or threads.";
            lines.push(text.to_owned());
        }
        lines
    }

    /// Like [`in_words`](Self::in_words), but without the lines that apply to every such recording.
    pub(super) fn lost_in_words(&self) -> Vec<String> {
        let mut lines = self.contradictions.clone();
        if let Some(why) = &self.incomplete {
            let symbols =
                if self.symbols.is_some() { ", without lines and functions, which are written at the end" } else { "" };
            lines.push(format!("The file has no end: {why}. The report covers the data before that{symbols}."));
        }
        if self.has_no_history {
            let why = "PyTorch keeps one after torch.cuda.memory._record_memory_history()";
            lines.push(format!("The snapshot has no history, only the blocks that were live when it was made: {why}."));
        } else if let Some(after) = self.begins_after_event {
            let first = match after {
                _ if self.has_only_pytorch => {
                    "PyTorch events are not in the snapshot (_record_memory_history, max_entries)".to_owned()
                }
                1 => "event is not in the recording (--max-size)".to_owned(),
                after => format!("{after} events are not in the recording (--max-size)"),
            };
            lines.push(format!(
                "The first {first}, only the blocks that were live afterwards: the true peak may be higher and earlier."
            ));
        }
        if let Some(seconds) = self.begins_after_seconds {
            let after = in_words(Duration::from_secs_f64(seconds.max(0.0)));
            lines.push(format!(
                "The recording started when the process had run for {after}: earlier allocations are not in it."
            ));
        }
        if self.not_intercepted {
            lines.push("Allocations were not intercepted: the allocated memory is not known.".to_owned());
        }
        let counts = [
            (self.lost_events, "event was lost", "events were lost", "some numbers may be wrong"),
            (
                self.untracked_frees,
                "free of an unknown block",
                "frees of unknown blocks",
                "some numbers may be too high",
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

impl Overview {
    pub(crate) fn of(history: &History) -> Self {
        let held = history.held_after(&history.changes_at(Moment::Peak));
        let off_device = history.peaks_off_device().into_iter().zip(history.rounded_pinned());
        let held = held.into_iter().zip(off_device).zip(history.process_peaks());
        let mut devices: Vec<_> = history.devices.iter().zip(held).collect();
        devices.sort_by_key(|(of, _)| (of.device.family as u8, of.device.ordinal));
        let devices: Vec<_> = devices
            .into_iter()
            .map(|(of, ((held, off_device), process_peak))| DeviceOverview {
                communicators: communicators(history, &held, process_peak.as_ref()),
                process_peak,
                ..DeviceOverview::of(history, of, held, off_device)
            })
            .collect();
        let leaks = history.leaks();
        let missing = Missing::of(history);
        let is_known = !missing.leaves_all_unknown(history);
        let has_counts = is_known && !history.has_only_peaks();
        let changes = |kind: ChangeKind| has_counts.then(|| history.lives.count_of(kind));
        let process = history.definitions().process();
        Self {
            file: history.path.display().to_string(),
            command: process.arguments.clone(),
            pid: history.pid(),
            host: process.host.clone(),
            rank: process.rank,
            seconds: history.end.as_secs_f64(),
            cards: process.cards.clone(),
            dry_run: DryRunOverview::of(history, devices.iter().filter_map(DeviceOverview::needed_bytes).max()),
            allocations: changes(ChangeKind::Allocated),
            frees: changes(ChangeKind::Freed),
            sources: history
                .sources()
                .into_iter()
                .map(|(source, library)| SourceOverview { source: source.name(), library: library.to_owned() })
                .collect(),
            rejected: Rejections::of(history),
            devices,
            torch: TensorsOverview::of(history),
            not_freed: is_known.then(|| NotFreed::of(&leaks, history.has_only_peaks())),
            kept_by_driver: kept(history),
            missing,
            leaks,
        }
    }

    /// Creates the overview for the summary of a single recording, which shows the peaks in detail.
    pub(crate) fn in_detail(history: &mut History) -> Self {
        let mut overview = Self::of(history);
        for of in overview.devices.iter_mut().take(IN_DETAIL) {
            let family = if of.simulated { Family::Simulated } else { Family::Cuda };
            of.holders = history.reader().device_peak(Device { family, ordinal: of.device });
            // Pools get separate rows after the other lines of the device, which also show calls that cannot be right.
            of.holders.iter_mut().for_each(|holders| holders.pools.clear());
        }
        overview
    }

    /// Returns why the recording has no peaks. `None` if it has peaks, or if the program certainly allocated nothing.
    pub(crate) fn why_empty(&self) -> Option<&str> {
        let Missing { incomplete, not_intercepted, lost_events, .. } = &self.missing;
        let is_empty = self.devices.is_empty() && *lost_events == 0;
        let unused = "its program ended before it used a GPU, or its allocations were not intercepted";
        incomplete.as_deref().or(not_intercepted.then_some(unused)).filter(|_| is_empty)
    }

    /// Returns one line for each thing that is missing.
    pub(crate) fn missing_in_words(&self) -> Vec<String> {
        [self.missing.in_words(), self.tensors_missing_in_words()].concat()
    }

    /// Returns lines about the missing data of the recording, each with its file.
    pub(super) fn missing_with_file(&self) -> impl Iterator<Item = String> {
        self.missing.in_words().into_iter().map(|line| format!("{}: {line}", self.file))
    }

    /// Returns lines about data missing for PyTorch's tensors.
    pub(super) fn tensors_missing_in_words(&self) -> Vec<String> {
        self.torch.iter().flat_map(TensorsOverview::missing_in_words).collect()
    }

    /// Returns the peak of tensors on a device.
    pub(crate) fn tensors_peak(&self, device: u32) -> Option<u64> {
        self.tensors_at_peak(device).map(|peak| peak.allocated_bytes)
    }

    /// Returns the tensors of a device at their peak.
    pub(super) fn tensors_at_peak(&self, device: u32) -> Option<&TensorMoment> {
        let devices = &self.torch.as_ref()?.devices;
        devices.iter().find(|tensors| tensors.device == device)?.peak.as_ref()
    }

    /// Returns whether the history of PyTorch's tensors is available.
    pub(super) fn has_tensors(&self) -> bool {
        self.torch.as_ref().is_some_and(|torch| torch.missing.is_none())
    }

    /// Returns whether `gpumem estimate` made the recording.
    pub(super) fn is_estimate(&self) -> bool {
        self.sources.iter().any(|by| by.library == "gpumem-estimate")
    }

    /// Returns the device with the highest peak.
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

/// Returns the place that holds most, among those with a line, a library or a scope.
fn most(places: &[PlaceSum]) -> Option<PlaceSum> {
    shared_sums(places).into_iter().find(|sum| sum.line.is_some() || sum.library.is_some() || !sum.scope.is_empty())
}

/// Returns the memory of the package functions that are called from this place.
fn inside(history: &History, held: &[OriginSum<'_>], place: &PlaceSum) -> Vec<Sum> {
    let names = SharedNames::of(held.iter().map(|held| &*held.origin.path));
    let is_of_place = |origin: &Origin| {
        (&origin.line, &origin.caller) == (&place.line, &place.caller)
            && *names.path(&origin.path) == *place.scope
            && place.line.is_some()
    };
    let of_place: Vec<_> = held.iter().copied().filter(|held| is_of_place(held.origin)).collect();
    let mut sums = sums_by(&of_place, |origin| called_from_line(history, origin).unwrap_or_default());
    sums.retain(|sum| !sum.name.is_empty());
    sums
}

impl PoolOverview {
    /// Returns the pools of a device at its peak, followed by the pools that were empty then, with their values at the
    /// end.
    fn all(history: &History, of: &DeviceHistory) -> Vec<Self> {
        let at_end: Vec<_> = history.ledger().pools().into_iter().filter(|pool| pool.device == of.device).collect();
        // Mistakes after the peak also make values wrong, so the number of mistakes is the one at the end.
        let with_wrong = |pool: &KnownPool| {
            let end = at_end.iter().find(|end| end.pool == pool.pool);
            end.map_or(*pool, |end| KnownPool { wrong: end.wrong, read_early: end.read_early, ..*pool })
        };
        let at_peak = of.pools.iter().map(with_wrong);
        let overlaps = history.overlaps(&at_end);
        let (mut pools, names) = (Vec::new(), history.definitions());
        for (known, is_at_end) in at_peak.map(|pool| (pool, false)).chain(at_end.iter().map(|pool| (*pool, true))) {
            let pool = registered_pool(&known, &overlaps, names);
            if !pool.is_empty() && !pools.iter().any(|(id, _)| *id == known.pool) {
                pools.push((known.pool, Self::of(pool, is_at_end)));
            }
        }
        pools.into_iter().map(|(_, pool)| pool).collect()
    }

    pub(super) fn of(pool: RegisteredPool, is_at_end: bool) -> Self {
        Self {
            used_bytes: pool.used.get(),
            reserved_bytes: pool.reserved.get(),
            unused_bytes: pool.unused().map(Bytes::get),
            wrong_calls: pool.wrong_calls(),
            name: pool.name.clone(),
            is_at_end,
            pool,
        }
    }

    /// Returns the row for reports, in the unit of the table above it.
    pub(crate) fn in_words(&self, table: Amounts) -> String {
        let words = pool_in_words(&self.pool, table);
        if self.is_at_end { format!("at the end, {words}") } else { words }
    }
}

impl DeviceOverview {
    /// Returns the memory of a GPU that is as large as the process needs, with the part that belongs to no process. `None` if nothing was
    /// allocated.
    pub(crate) fn needed_bytes(&self) -> Option<u64> {
        let measured = self.process_peak.as_ref().map(|process| process.bytes.unsigned_abs() + OF_NO_PROCESS.get());
        self.peak_bytes.map(|peak| measured.unwrap_or(peak + CONTEXT.get()))
    }

    /// Creates the overview of a device. `held` is the memory at its peak. The last argument contains the values of
    /// `besides` and `pinned_by_pytorch`.
    fn of(
        history: &History,
        all: &DeviceHistory,
        held: Vec<OriginSum<'_>>,
        (besides, pinned_by_pytorch): (Vec<Sum>, Vec<Sum>),
    ) -> Self {
        let device = all.device;
        let defined = history.definitions().device(device);
        let on_device: Vec<_> = held.into_iter().filter(|held| held.origin.kind.is_on_device()).collect();
        let seconds = |nanos: u64| std::time::Duration::from_nanos(nanos).as_secs_f64();
        let peak_by_place = place_sums(&on_device);
        let is_whole = !history.has_only_peaks();
        let has_pool = history.ledger().pools().iter().any(|pool| pool.device == device);
        Self {
            inside_most: most(&peak_by_place).map(|most| inside(history, &on_device, &most)).unwrap_or_default(),
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            name: defined.and_then(|defined| defined.name.clone()),
            total_bytes: defined.and_then(|defined| defined.total).map(Bytes::get),
            peak_bytes: all.peak_at.map(|_| all.peak),
            peak_seconds: all.peak_at.map(|at| seconds(history.time_of(at))),
            peak_by_kind: sums_by(&on_device, |origin| origin.kind.name().to_owned()),
            peak_by_library: sums_by(&on_device, Origin::library_or_program),
            peak_by_scope: sums_by(&on_device, Origin::scope),
            peak_by_place,
            besides: is_whole.then_some(besides),
            pinned_by_pytorch: is_whole.then_some(pinned_by_pytorch),
            driver_peak_bytes: has_pool.then_some(all.driver_peak),
            pools: PoolOverview::all(history, all),
            live_at_end_bytes: all.live,
            process_peak: None,
            communicators: Vec::new(),
            samples: all.samples,
            highest_sample_bytes: all.highest_sample.map(|(_, memory)| memory.used.get()),
            highest_sample_seconds: all.highest_sample.map(|(time, _)| seconds(time)),
            holders: None,
        }
    }

    /// Returns whether most of the peak belongs to PyTorch: segments of its caching allocator, or blocks of the
    /// driver's stream-ordered pool. PyTorch's tensors then explain the peak better than the blocks.
    pub(crate) fn holds_cache(&self) -> bool {
        let sums = self.peak_by_library.iter().filter(|sum| sum.name == "PyTorch");
        let bytes: u64 = sums.map(|sum| sum.bytes.unsigned_abs()).sum();
        self.peak_bytes.is_some_and(|peak| bytes * 2 > peak)
    }

    /// Returns the peak that must fit on the device, including the memory that pools keep unused.
    pub(super) fn highest_bytes(&self) -> Option<u64> {
        self.driver_peak_bytes.filter(|peak| *peak > 0).or(self.peak_bytes)
    }

    /// Returns the line that holds most of the peak.
    pub(super) fn most_at(&self) -> Option<String> {
        most(&self.peak_by_place)?.line
    }

    /// Returns the sentence about the place that holds most of the peak: `src/adam.rs:30 in train > step, called from
    /// src/main.rs:9, holds 60 % of the peak`.
    pub(crate) fn most(&self) -> Option<String> {
        let peak = self.peak_bytes?;
        let PlaceSum { scope, place, caller, bytes, .. } = most(&self.peak_by_place)?;
        let scope = if scope.is_empty() { String::new() } else { format!(" in {}", scope.join(" > ")) };
        let caller = caller.as_ref().map(|caller| format!(", called from {caller},")).unwrap_or_default();
        Some(format!("{place}{scope}{caller} holds {} of the peak", percent(bytes, peak)))
    }

    pub(crate) fn words(&self) -> String {
        let name = self.name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        format!("{}{name}", self.number_in_words())
    }

    /// Returns `device 0`, without the name.
    pub(super) fn number_in_words(&self) -> String {
        let simulated = if self.simulated { "simulated " } else { "" };
        format!("{simulated}device {}", self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
