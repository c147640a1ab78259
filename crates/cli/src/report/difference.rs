//! The difference between the peaks of two recordings, by scope, place, library and kind of memory, for `gpumem diff`.

use std::{
    collections::{HashMap, HashSet},
    io::{self, Write},
};

use gpumem_core::{
    export::{Paint, Role},
    model::{ByteDelta, one_line},
    report::{ROUNDING, SharedNames, path_in_words},
};
use gpumem_recording::TensorClass;
use serde::Serialize;

use super::{
    annotations::Check,
    change::{
        Change, Limit, MARKDOWN_TITLE, Named, check, escaped, named, signed, sorted, verdict, write_markdown_rows,
        write_rows, write_verdict,
    },
    dry_run::DryRunOverview,
    modules::{ClassSum, ModuleSum},
    moved::moved,
    overview::{DeviceOverview, Missing, Overview},
    place_sums::{NO_LINE, PlaceSum},
    process,
    tensors::TensorsOverview,
};
use crate::history::{ProcessMemory, Sum};

/// The difference between two recordings. The field names are those in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Difference {
    pub(crate) before: Side,
    pub(crate) after: Side,
    pub(crate) devices: Vec<DeviceDifference>,
    /// Why PyTorch's tensors are not compared, or only in part. Empty if neither recording has tensors.
    pub(crate) tensors_missing: Vec<String>,
    pub(crate) limit: Option<Limit>,
    /// `None` without a limit, and if the peaks are not known.
    pub(crate) is_exceeded: Option<bool>,
    /// Why a comparison is meaningless.
    pub(crate) not_measured: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Side {
    pub(crate) file: String,
    pub(crate) missing: Missing,
    pub(crate) dry_run: Option<DryRunOverview>,
}

/// The peaks of one device.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceDifference {
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    #[serde(flatten)]
    pub(crate) peak: Change,
    /// The driver blocks, including the memory that pools keep unused. `None` if neither side has a registered pool,
    /// because they equal the peak then.
    pub(crate) driver: Option<Change>,
    pub(crate) by_scope: Vec<Named>,
    pub(crate) by_place: Vec<Named>,
    pub(crate) by_library: Vec<Named>,
    pub(crate) by_kind: Vec<Named>,
    /// The highest memory of the process, with what the driver took by itself; `None` if a side did not measure it.
    pub(crate) process: Option<ProcessDifference>,
    /// PyTorch's tensors, if both recordings have them.
    pub(crate) tensors: Option<TensorsDifference>,
}

/// The memory of the process on one device. It has no limit: other processes and the driver's version may change it.
#[derive(Debug, Serialize)]
pub(crate) struct ProcessDifference {
    #[serde(flatten)]
    pub(crate) peak: Change,
    /// The part of these peaks that is allocations.
    pub(crate) allocations: Change,
    pub(crate) taken_by_driver: Vec<Named>,
    /// True if a value is an upper bound.
    pub(crate) is_at_most: bool,
}

impl ProcessDifference {
    fn of(sides: [Option<&DeviceOverview>; 2]) -> Option<Self> {
        let [before, after] = sides.map(|side| side.and_then(|side| side.process_peak.as_ref()));
        let (before, after) = before.zip(after)?;
        let names = |process: &ProcessMemory| {
            let sums = process.taken_by_driver.iter().map(|sum| (sum.stable_name(), sum.bytes));
            sums.chain([(ROUNDING.to_owned(), process.rounding_bytes)]).collect::<Vec<_>>()
        };
        Some(Self {
            peak: Change::new(before.bytes, after.bytes),
            allocations: Change::new(before.allocated_bytes, after.allocated_bytes),
            taken_by_driver: named([names(before), names(after)]),
            is_at_most: before.is_at_most() || after.is_at_most(),
        })
    }

    /// Returns the sentence about the peak. A device is named before it.
    fn in_words(&self) -> String {
        let at_most = if self.is_at_most { "≤ " } else { "" };
        let [before, after] = [self.peak.before, self.peak.after].map(ByteDelta::new);
        let process =
            format!("the process took {at_most}{before} and takes {at_most}{after}: {}", self.peak.in_words());
        if self.allocations.before == self.allocations.after {
            return process;
        }
        format!("{process}; allocations: {}", self.allocations.in_words())
    }
}

/// The peak of tensors on one device. Tensors are part of the device's memory. An estimate counts only tensors.
#[derive(Debug, Serialize)]
pub(crate) struct TensorsDifference {
    #[serde(flatten)]
    pub(crate) peak: Change,
    /// If one side is an estimate, both sides have the classes of estimates. Empty if a recording has no classes.
    pub(crate) by_class: Vec<Named>,
    /// Empty if a recording has no modules.
    pub(crate) by_module: Vec<Named>,
    /// Empty if one side is an estimate, which has no lines.
    pub(crate) by_place: Vec<Named>,
}

/// The names of the tables.
const BY: [&str; 4] = ["scope", "place", "library", "kind"];

/// Compares parts of the peak before with those of the peak after.
fn by_name<T>(sides: [&[T]; 2], row: impl Fn(&T) -> (String, i64)) -> Vec<Named> {
    named(sides.map(|side| side.iter().map(&row).collect::<Vec<_>>()))
}

/// Joins the rows of places that are now at another line of their file.
fn with_moved(all: Vec<Named>, limit: Option<Limit>) -> Vec<Named> {
    let side = |of: fn(&Change) -> i64| {
        let amount = move |named: &'_ Named| of(&named.change).max(0).unsigned_abs();
        all.iter().map(move |named| (&*named.name, amount(named))).filter(|(_, bytes)| *bytes > 0)
    };
    let sides = [side(|change| change.before).collect(), side(|change| change.after).collect::<Vec<_>>()];
    let pairs: Vec<_> = moved(sides, limit).into_iter().map(|pair| pair.map(str::to_owned)).collect();
    let before: HashMap<String, i64> = all.iter().map(|named| (named.name.clone(), named.change.before)).collect();
    let from: HashMap<_, _> = pairs.iter().map(|[old, new]| (new, old)).collect();
    let away: HashSet<_> = pairs.iter().map(|[old, _]| old).collect();
    let paired = |Named { name, change, .. }: Named| {
        let moved_from = from.get(&name).map(|old| (*old).clone());
        let same = if away.contains(&name) { 0 } else { change.before };
        let before = moved_from.as_ref().and_then(|old| before.get(old).copied()).unwrap_or(same);
        // Another place may now be at its earlier line.
        let lost = (moved_from.is_some() && !away.contains(&name) && change.before != 0)
            .then(|| Named::new(name.clone(), Change::new(change.before, 0)));
        let now = Named { name, moved_from, change: Change::new(before, change.after) };
        let is_there = (now.change.before, now.change.after) != (0, 0);
        is_there.then_some(now).into_iter().chain(lost)
    };
    sorted(all.into_iter().flat_map(paired).collect())
}

type Sums = Vec<(String, i64)>;

/// The tensors on one device, on one side.
#[derive(Default)]
struct TensorSide<'a> {
    bytes: i64,
    /// `None` if the recording has no classes.
    classes: Option<Sums>,
    modules: Option<Sums>,
    places: &'a [PlaceSum],
}

impl<'a> TensorSide<'a> {
    fn of(side: &'a Overview, device: u32, has_estimate: bool) -> Self {
        if let Some(estimate) = side.devices.iter().find(|of| of.device == device).filter(|_| side.is_estimate()) {
            // All blocks of an estimate are tensors, and their libraries are classes.
            let classes = estimate.peak_by_place.iter().map(|sum| (sum.library_or_program(), sum.bytes)).collect();
            let bytes = signed(estimate.peak_bytes.unwrap_or(0));
            return Self { bytes, classes: Some(classes), ..Self::default() };
        }
        let Some(moment) = side.tensors_at_peak(device) else { return Self::default() };
        let own_class = |sum: &ClassSum| (sum.class.to_owned(), signed(sum.bytes));
        let of_class = |sums: &Vec<ClassSum>| {
            if has_estimate { classes_of_estimates(sums) } else { sums.iter().map(own_class).collect() }
        };
        let classes = moment.by_class.as_ref().map(of_class);
        let module = |sum: &ModuleSum| (sum.name(None), signed(sum.bytes));
        let modules = moment.by_module.as_ref().map(|sums| sums.iter().map(module).collect());
        Self { bytes: signed(moment.allocated_bytes), classes, modules, places: &moment.by_place }
    }
}

impl TensorsDifference {
    /// Compares the tensors of a device. `None` if a recording has no tensors. A device without tensors has 0 bytes.
    fn of(sides: [&Overview; 2], device: u32, limit: Option<Limit>) -> Option<Self> {
        let is_known = |side: &&Overview| side.has_tensors() || side.is_estimate();
        let has_any = |side: &&Overview| side.tensors_at_peak(device).is_some();
        if !sides.iter().all(is_known) || !sides.iter().any(has_any) {
            return None;
        }
        let has_estimate = sides.iter().any(|side| side.is_estimate());
        let [before, after] = sides.map(|side| TensorSide::of(side, device, has_estimate));
        let if_both = |before: Option<Sums>, after: Option<Sums>| {
            before.zip(after).map(|(before, after)| named([before, after])).unwrap_or_default()
        };
        let line = |sum: &PlaceSum| (sum.line.clone().unwrap_or_else(|| NO_LINE.to_owned()), sum.bytes);
        Some(Self {
            peak: Change::new(before.bytes, after.bytes),
            by_class: if_both(before.classes, after.classes),
            by_module: if_both(before.modules, after.modules),
            by_place: if has_estimate {
                Vec::new()
            } else {
                with_moved(by_name([before.places, after.places], line), limit)
            },
        })
    }

    /// Returns the tables, each with a name for its rows.
    fn all(&self) -> [(&'static str, &[Named]); 3] {
        [("used for", &self.by_class), ("module", &self.by_module), ("tensors at", &self.by_place)]
    }

    /// Returns why tensors are not compared, or only in part.
    fn missing(sides: [&Overview; 2]) -> Vec<String> {
        let mut lines = Vec::new();
        let [has, has_not] = [true, false].map(|has| sides.iter().find(|side| side.has_tensors() == has));
        if let (Some(has), Some(has_not)) = (has, has_not.filter(|side| !side.is_estimate())) {
            lines.push(format!(
                "PyTorch's tensors are not compared: {} has them, {} does not (gpumem run --torch).",
                has.file, has_not.file
            ));
        }
        for side in sides {
            let missing = side.torch.iter().flat_map(TensorsOverview::missing_in_words);
            lines.extend(missing.map(|line| format!("{}: {line}", side.file)));
        }
        lines
    }
}

/// Converts classes to an estimate's classes, which count temporary tensors as activations, and also contain the overhead
/// of the allocator.
fn classes_of_estimates(sums: &[ClassSum]) -> Sums {
    let temporary = [TensorClass::ForwardTemporary, TensorClass::BackwardTemporary, TensorClass::Temporary];
    let temporary = temporary.map(TensorClass::name);
    let class = |sum: &ClassSum| {
        let name = if temporary.contains(&sum.class) { TensorClass::Activations.name() } else { sum.class };
        [(name, sum.requested_bytes), ("rounding", sum.bytes - sum.requested_bytes)]
    };
    sums.iter().flat_map(class).map(|(name, bytes)| (name.to_owned(), signed(bytes))).collect()
}

/// Returns the change of a device's peak, and that of its driver blocks if a side has a registered pool.
pub(super) fn peaks_of(sides: [Option<&DeviceOverview>; 2]) -> (Change, Option<Change>) {
    let change = |of: fn(&DeviceOverview) -> Option<u64>| {
        let [before, after] = sides.map(|side| side.and_then(of).map_or(0, signed));
        Change::new(before, after)
    };
    let has_pool = sides.iter().flatten().any(|side| side.driver_peak_bytes.is_some());
    (change(|device| device.peak_bytes), has_pool.then(|| change(DeviceOverview::highest_bytes)))
}

impl Difference {
    pub(crate) fn of(before: Overview, after: Overview, limit: Option<Limit>) -> Self {
        let mut not_measured = Vec::new();
        for side in [&before, &after] {
            let is_unknown = side.missing.leaves_peak_unknown();
            if is_unknown {
                not_measured.extend(side.missing_with_file());
            } else if side.devices.iter().all(|device| device.highest_bytes().is_none()) {
                not_measured.push(format!("{}: Nothing was allocated.", side.file));
            }
        }
        // An estimate has simulated devices, which represent the other side's devices.
        let are_simulated = |overview: &Overview| overview.devices.iter().all(|device| device.simulated);
        let has_estimate = are_simulated(&before) != are_simulated(&after);
        let used = |overview: &Overview| -> Vec<(bool, u32)> {
            let used = overview.devices.iter().filter(|device| device.highest_bytes().is_some());
            used.map(|device| (device.simulated && !has_estimate, device.device)).collect()
        };
        let mut devices = [used(&before), used(&after)].concat();
        devices.sort_unstable();
        devices.dedup();
        let devices: Vec<_> = devices
            .into_iter()
            .map(|(simulated, device)| {
                let of = |overview: &'_ Overview| {
                    let is_it = |of: &DeviceOverview| (of.simulated && !has_estimate, of.device) == (simulated, device);
                    overview.devices.iter().position(is_it)
                };
                let sides = [&before, &after].map(|side| of(side).map(|at| &side.devices[at]));
                let places = sides.map(|side| side.map_or(&[][..], |side| &side.peak_by_place));
                let [libraries, kinds] = [
                    sides.map(|side| side.map_or(&[][..], |side| &side.peak_by_library)),
                    sides.map(|side| side.map_or(&[][..], |side| &side.peak_by_kind)),
                ];
                let tensors = TensorsDifference::of([&before, &after], device, limit).filter(|_| !simulated);
                let names = SharedNames::of(places.into_iter().flatten().map(|sum| &*sum.scope));
                let of_sum = |sum: &Sum| (sum.name.clone(), sum.bytes);
                let mut tables = [
                    by_name(places, |sum| (path_in_words(&names.path(&sum.scope)), sum.bytes)),
                    by_name(places, |sum| (sum.place.clone(), sum.bytes)),
                    by_name(libraries, of_sum),
                    by_name(kinds, of_sum),
                ];
                // The blocks of an estimate are compared with tensors, and not with driver blocks.
                if tensors.is_some() && has_estimate {
                    tables.iter_mut().for_each(Vec::clear);
                }
                let [by_scope, mut by_place, by_library, by_kind] = tables;
                // The same place would have different names on the two sides.
                if before.missing.symbols != after.missing.symbols {
                    by_place.clear();
                }
                let by_place = with_moved(by_place, limit);
                let (peak, driver) = peaks_of(sides);
                DeviceDifference {
                    device,
                    simulated,
                    peak,
                    driver,
                    by_scope,
                    by_place,
                    by_library,
                    by_kind,
                    process: ProcessDifference::of(sides),
                    tensors,
                }
            })
            .collect();
        let exceeds = |limit| devices.iter().flat_map(DeviceDifference::peaks).any(|(_, peak)| peak.exceeds(limit));
        let mut is_exceeded = limit.filter(|_| not_measured.is_empty()).map(exceeds);
        // Two snapshots whose histories start late are compared as far as they go.
        if is_exceeded == Some(false) && after.missing.peak_may_be_higher() && !before.missing.peak_may_be_higher() {
            not_measured.extend(after.missing_with_file());
            is_exceeded = None;
        }
        Self {
            is_exceeded,
            limit,
            tensors_missing: TensorsDifference::missing([&before, &after]),
            before: Side { file: before.file, missing: before.missing, dry_run: before.dry_run },
            after: Side { file: after.file, missing: after.missing, dry_run: after.dry_run },
            devices,
            not_measured,
        }
    }

    /// Returns notes about data that PyTorch's snapshots lack, and about values that dry runs did not compute. The peak is compared anyway.
    fn notes(&self) -> Vec<String> {
        let lines = |side: &Side| {
            let is_snapshot = side.missing.has_only_pytorch && self.not_measured.is_empty();
            let missing = if is_snapshot { side.missing.in_words() } else { Vec::new() };
            let dry_run = side.dry_run.as_ref().filter(|dry_run| dry_run.unknown_values > 0);
            let lines = missing.into_iter().chain(dry_run.map(DryRunOverview::in_words));
            lines.map(|line| format!("{}: {line}", side.file)).collect::<Vec<_>>()
        };
        let mut notes = [&self.before, &self.after].map(lines).to_vec();
        notes.dedup();
        notes.concat()
    }

    /// Returns a check for each device that has a limit.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let checks = |device: &DeviceDifference| {
            let place = device.by_place.first().filter(|place| place.change.bytes > 0).map(|place| place.name.clone());
            let of = |(words, peak): (String, Change)| check(&self.after.file, &words, peak, self.limit, place.clone());
            device.peaks().into_iter().map(of).collect::<Vec<_>>()
        };
        self.devices.iter().flat_map(checks).collect()
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        writeln!(out, "{}", paint.on(Role::Heading, format!("{} → {}", self.before.file, self.after.file)))?;
        for device in &self.devices {
            let words = device.words();
            for (words, peak) in device.peaks() {
                let [before, after] = [peak.before, peak.after].map(ByteDelta::new);
                writeln!(out, "{words}: the peak was {before} and is {after}: {}", peak.in_words())?;
            }
            for (by, all) in BY.iter().zip(device.all()) {
                write_rows(by, all, out, paint)?;
            }
            if let Some(process) = &device.process {
                writeln!(out, "\n{words}: {}", process.in_words())?;
                write_rows("taken by the driver", &process.taken_by_driver, out, paint)?;
                if process.is_at_most {
                    writeln!(out, "{}", paint.on(Role::Faint, process::AT_MOST))?;
                }
            }
            if let Some(tensors) = &device.tensors {
                let (peak, [before, after]) =
                    (tensors.peak, [tensors.peak.before, tensors.peak.after].map(ByteDelta::new));
                writeln!(out, "\n{words}, tensors: the peak was {before} and is {after}: {}", peak.in_words())?;
                for (by, all) in tensors.all() {
                    write_rows(by, all, out, paint)?;
                }
            }
        }
        for line in &self.tensors_missing {
            writeln!(out, "\n{}", one_line(line))?;
        }
        for line in self.notes() {
            writeln!(out, "{}", paint.on(Role::Faint, line))?;
        }
        for line in &self.not_measured {
            writeln!(out, "{}", paint.on(Role::Alarm, line))?;
        }
        write_verdict(self.limit, self.is_exceeded, out, paint)
    }

    /// Writes Markdown tables for a comment on a pull request.
    pub(crate) fn write_markdown(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{MARKDOWN_TITLE}\n")?;
        self.write_markdown_tables(out)?;
        match verdict(self.limit, self.is_exceeded) {
            Some(verdict) => writeln!(out, "{verdict}"),
            None => Ok(()),
        }
    }

    pub(super) fn write_markdown_tables(&self, out: &mut dyn Write) -> io::Result<()> {
        for device in &self.devices {
            for (words, peak) in device.peaks() {
                let [before, after] = [peak.before, peak.after].map(ByteDelta::new);
                writeln!(out, "Peak of {words}: {before} → **{after}**, {}\n", peak.in_words())?;
            }
            for (by, all) in BY.iter().zip(device.all()) {
                write_markdown_rows(by, all, out)?;
            }
            if let Some(process) = &device.process {
                writeln!(out, "On {}, {}\n", device.words(), process.in_words())?;
                write_markdown_rows("taken by the driver", &process.taken_by_driver, out)?;
                if process.is_at_most {
                    writeln!(out, "> {}\n", process::AT_MOST)?;
                }
            }
            if let Some(tensors) = &device.tensors {
                let [before, after] = [tensors.peak.before, tensors.peak.after].map(ByteDelta::new);
                let (words, change) = (device.words(), tensors.peak.in_words());
                writeln!(out, "Peak of tensors on {words}: {before} → **{after}**, {change}\n")?;
                for (by, all) in tensors.all() {
                    write_markdown_rows(by, all, out)?;
                }
            }
        }
        for line in self.tensors_missing.iter().chain(&self.notes()) {
            writeln!(out, "> {}\n", escaped(line))?;
        }
        for line in &self.not_measured {
            writeln!(out, "> {}\n", escaped(line))?;
        }
        Ok(())
    }
}

impl DeviceDifference {
    fn all(&self) -> [&[Named]; 4] {
        [&self.by_scope, &self.by_place, &self.by_library, &self.by_kind]
    }

    /// Returns the peaks that have a limit, with their names.
    fn peaks(&self) -> Vec<(String, Change)> {
        let driver = self.driver.map(|driver| (format!("the driver's blocks on {}", self.words()), driver));
        [(self.words(), self.peak)].into_iter().chain(driver).collect()
    }

    fn words(&self) -> String {
        format!("{}device {}", if self.simulated { "simulated " } else { "" }, self.device)
    }
}
