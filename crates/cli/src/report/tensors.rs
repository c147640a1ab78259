//! PyTorch's tensors, within the memory that its allocator holds from the driver.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::Duration,
};

use gpumem_core::{
    export::{InPaint, Leaf, Paint, Role, Tree, part_table},
    model::Bytes,
    report::counted,
};
use serde::Serialize;

use super::{
    modules::{self, ClassSum, ModuleSum},
    place_sums::{NO_LINE, PlaceSum, place_sums},
    reserved::AllocatorSums,
    text::unit_of,
};
use crate::history::{
    History, Moment, RejectedRequest, in_words,
    tensors::{AllocatorState, TensorHistory, Tensors},
};

/// At most this many lines are printed; JSON contains all.
const MOST_ROWS: usize = 12;
/// The limit if there are also tables of classes and modules. The whole report then takes 40 lines, and up to 4 more if
/// much is unused.
const ROWS_BESIDE_MODULES: usize = 2;

/// The data of a caching allocator. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TensorsOverview {
    pub(crate) allocator: String,
    /// Why the recording does not contain the history.
    pub(crate) missing: Option<String>,
    /// Why the recording does not contain modules, although they were requested.
    pub(crate) missing_modules: Option<String>,
    pub(crate) devices: Vec<DeviceTensors>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceTensors {
    pub(crate) device: u32,
    pub(crate) events: u64,
    /// When the history starts, if the allocator did something before.
    pub(crate) known_from_seconds: Option<f64>,
    /// The moment of the tensors' peak.
    pub(crate) peak: Option<TensorMoment>,
    /// The moment of the tensors' highest value during the peak of the device.
    pub(crate) at_device_peak: Option<TensorMoment>,
    pub(crate) at_end: Option<TensorMoment>,
    /// The moment of the main failed allocation.
    #[serde(rename = "at_refusal")]
    pub(crate) at_rejection: Option<TensorMoment>,
    /// The statistics of the allocator at the end.
    #[serde(rename = "said")]
    pub(crate) reported: Option<ReportedMemory>,
    /// The sentence about tensors that are in no segment, unless other contradictions are known.
    #[serde(skip)]
    outside: Option<String>,
}

/// The values of `torch.cuda.memory_allocated()` and similar functions, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ReportedMemory {
    pub(crate) memory_allocated: u64,
    pub(crate) max_memory_allocated: u64,
    pub(crate) memory_reserved: u64,
    pub(crate) max_memory_reserved: u64,
}

/// The allocator's memory at one moment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TensorMoment {
    pub(crate) device: u32,
    pub(crate) seconds: f64,
    pub(crate) tensors: u64,
    /// The bytes of the tensors, rounded up as in PyTorch.
    pub(crate) allocated_bytes: u64,
    pub(crate) requested_bytes: u64,
    #[serde(flatten)]
    pub(crate) sums: AllocatorSums,
    pub(crate) by_place: Vec<PlaceSum>,
    /// `None` if the program was recorded without modules.
    pub(crate) by_module: Option<Vec<ModuleSum>>,
    /// `None` as for `by_module`.
    pub(crate) by_class: Option<Vec<ClassSum>>,
    /// The objects that refer to the largest tensors at the end.
    pub(crate) held: Vec<HeldTensor>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct HeldTensor {
    pub(crate) bytes: u64,
    /// The referring object, such as `list losses in __main__`.
    pub(crate) by: String,
}

impl TensorMoment {
    /// Returns the memory after this many steps, at a time. With `has_segments`, each segment is listed.
    fn of(
        history: &History,
        all: &Tensors,
        tensors: &TensorHistory,
        steps: usize,
        nanos: u64,
        has_segments: bool,
    ) -> Self {
        let state = tensors.state(steps);
        let (by_module, by_class) = modules::sums(all, &state).unzip();
        let in_use = || state.tensors.values().filter(|tensor| !tensor.is_awaiting);
        Self {
            device: tensors.about.device.ordinal,
            seconds: Duration::from_nanos(nanos).as_secs_f64(),
            tensors: in_use().count() as u64,
            allocated_bytes: in_use().map(|tensor| tensor.bytes).sum(),
            requested_bytes: in_use().map(|tensor| tensor.requested).sum(),
            sums: AllocatorSums::of(all, tensors, steps, &state, has_segments),
            by_place: place_sums(&state.held(&all.origins)),
            by_module,
            by_class,
            held: if steps == tensors.steps.len() { held(history, tensors, &state) } else { Vec::new() },
        }
    }

    /// Returns the sentence about the segments, in the unit of the table of tensors.
    fn segments_in_words(&self) -> String {
        self.sums.in_words(self.requested_bytes, unit_of(self.allocated_bytes))
    }

    /// Returns why a part of the memory is unused, each reason as a line with its name.
    fn reasons(&self) -> Vec<(&'static str, String)> {
        self.sums.reasons(self.by_module.is_some(), unit_of(self.allocated_bytes))
    }

    fn write_reasons(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        self.reasons().iter().try_for_each(|(name, text)| line(out, paint, name, text))
    }
}

/// Writes a line, with its name in front.
pub(super) fn line(out: &mut dyn Write, paint: Paint, name: &str, text: &str) -> io::Result<()> {
    writeln!(out, "{}{}", paint.on(Role::Faint, format!("{name:<9}")), paint.on(Role::Text, text))
}

impl TensorsOverview {
    pub(crate) fn of(history: &History) -> Option<Self> {
        let tensors = history.tensors.as_ref()?;
        let devices = tensors.devices.iter().map(|device| DeviceTensors::of(history, tensors, device)).collect();
        let Tensors { name, missing, missing_modules, .. } = tensors;
        let (allocator, missing, missing_modules) = (name.clone(), missing.clone(), missing_modules.clone());
        Some(Self { allocator, missing, missing_modules, devices })
    }

    /// Returns one line for each thing that is missing.
    pub(crate) fn missing_in_words(&self) -> Vec<String> {
        let Self { allocator, missing, missing_modules, devices } = self;
        let not_recorded = |what: &str, why: &Option<String>| {
            Some(format!("The {what} of {allocator} are not in the recording: {}.", why.as_ref()?))
        };
        let missing = [not_recorded("tensors", missing), not_recorded("modules", missing_modules)];
        let mut lines: Vec<_> = missing.into_iter().flatten().collect();
        for DeviceTensors { device, known_from_seconds, peak, at_end, reported, outside, .. } in devices {
            lines.extend(outside.clone());
            let Some(reported) = reported else { continue };
            let [most, end] = [peak, at_end].map(|moment| moment.as_ref().map_or(0, |moment| moment.allocated_bytes));
            if let Some(from) = known_from_seconds {
                let from = in_words(Duration::from_secs_f64(*from));
                let before = if reported.max_memory_allocated > most {
                    format!(" Before, they had {}.", Bytes::new(reported.max_memory_allocated))
                } else {
                    String::new()
                };
                lines.push(format!(
                    "Tensors on device {device} are known from {from} on: PyTorch keeps the latest events (--torch-events).{before}"
                ));
            }
            // The program may have reset PyTorch's own maximum, but it cannot reset this one.
            if end != reported.memory_allocated || known_from_seconds.is_none() && most < reported.max_memory_allocated
            {
                lines.push(format!(
                    "PyTorch contradicts its history on device {device}: tensors {} at the end and {} at most, by the history {} and {}. Numbers may be wrong.",
                    Bytes::new(reported.memory_allocated),
                    Bytes::new(reported.max_memory_allocated),
                    Bytes::new(end),
                    Bytes::new(most)
                ));
            }
        }
        lines
    }

    /// Describes PyTorch's memory at the moment when the driver rejected an allocation, and why a part of it was
    /// unused. Each line has a name.
    pub(crate) fn rejection_in_words(&self) -> Vec<(&'static str, String)> {
        let moments = self.devices.iter().filter_map(|device| device.at_rejection.as_ref());
        let lines = moments.flat_map(|moment| {
            let sum = format!("{} had {}", self.allocator, moment.segments_in_words());
            [("reserved", sum)].into_iter().chain(moment.reasons())
        });
        lines.collect()
    }

    fn peak_in_words(&self, peak: &TensorMoment) -> String {
        let after = in_words(Duration::from_secs_f64(peak.seconds));
        let bytes = Bytes::new(peak.allocated_bytes);
        format!("{}, device {}: tensors had {bytes} at most, after {after}", self.allocator, peak.device)
    }

    /// Returns the peak of tensors on each device.
    pub(crate) fn peaks_in_words(&self) -> Vec<String> {
        let peaks = self.devices.iter().filter_map(|of_device| of_device.peak.as_ref());
        peaks.map(|peak| self.peak_in_words(peak)).collect()
    }

    /// Writes the peak of the tensors. Returns whether the device has any.
    pub(super) fn write_device(&self, device: u32, out: &mut dyn Write, paint: Paint) -> io::Result<bool> {
        let Some(of_device) = self.devices.iter().find(|of_device| of_device.device == device) else {
            return Ok(false);
        };
        let Some(peak) = &of_device.peak else { return Ok(false) };
        writeln!(out, "\n{}", paint.on(Role::Heading, self.peak_in_words(peak)))?;
        write_places(peak, out, paint)?;
        line(out, paint, "then", &peak.segments_in_words())?;
        let most = of_device.at_device_peak.as_ref().unwrap_or(peak);
        if most.seconds.to_bits() != peak.seconds.to_bits() {
            let at = in_words(Duration::from_secs_f64(most.seconds));
            line(out, paint, "at peak", &format!("of the device, after {at}: {}", most.segments_in_words()))?;
        }
        // The report of the failed allocation comes first and has already shown this.
        if of_device.at_rejection.is_none() {
            most.write_reasons(out, paint)?;
        }
        Ok(true)
    }
}

impl DeviceTensors {
    fn of(history: &History, all: &Tensors, tensors: &TensorHistory) -> Self {
        let about = &tensors.about;
        let time_of =
            |steps: usize| steps.checked_sub(1).and_then(|at| tensors.steps.get(at)).map_or(0, |step| step.time);
        let moment = |steps: usize| TensorMoment::of(history, all, tensors, steps, time_of(steps), false);
        let is_empty = tensors.steps.is_empty();
        let window = (!is_empty).then(|| history.peak_of(about.device)).flatten();
        let is_known = all.contradictions.iter().any(|of| of.device == about.device);
        let [peak, at_end] =
            [tensors.peak_steps(), (!is_empty).then_some(tensors.steps.len())].map(|at| at.map(moment));
        let outside = [&peak, &at_end].into_iter().flatten().map(|moment| moment.sums.outside_segments_bytes).max();
        let outside = outside.filter(|bytes| *bytes > 0 && !is_known).map(|bytes| {
            let what = format!("{} of the tensors are in no segment, or overlap others", Bytes::new(bytes));
            all.contradiction_in_words(about.device.ordinal, &what)
        });
        Self {
            device: about.device.ordinal,
            events: tensors.steps.len() as u64,
            known_from_seconds: about.known_from.map(|time| time.as_secs_f64()),
            peak,
            at_device_peak: window.map(|(from, to)| moment(tensors.most_between(from, to))),
            at_end,
            at_rejection: rejection_on(history, tensors)
                .map(|rejection| moment(tensors.steps_at_rejection(rejection.time))),
            reported: about.reported.map(|reported| ReportedMemory {
                memory_allocated: reported.allocated.get(),
                max_memory_allocated: reported.allocated_high.get(),
                memory_reserved: reported.reserved.get(),
                max_memory_reserved: reported.reserved_high.get(),
            }),
            outside,
        }
    }
}

/// Returns the main failed allocation, if it was on this device and the allocator's memory at that moment is known.
fn rejection_on<'a>(history: &'a History, tensors: &TensorHistory) -> Option<&'a RejectedRequest> {
    let rejection = history.oom().filter(|rejection| !rejection.was_obtained)?;
    let device = rejection.device_in(history)?;
    let is_known = tensors.known_from().is_none_or(|from| from <= rejection.time);
    (device == tensors.about.device && is_known && !tensors.steps.is_empty()).then_some(rejection)
}

/// Returns the objects that refer to tensors at the end, the largest tensor first.
fn held(history: &History, tensors: &TensorHistory, state: &AllocatorState) -> Vec<HeldTensor> {
    let holders = history.definitions().tensor_holders().iter();
    let mut held: Vec<_> = holders
        .filter(|holder| holder.device == tensors.about.device)
        .filter_map(|holder| {
            let (start, tensor) = state.tensors.range(..=holder.address).next_back()?;
            let is_inside = holder.address - start < tensor.bytes;
            is_inside.then(|| HeldTensor { bytes: tensor.bytes, by: holder.holder.clone() })
        })
        .collect();
    held.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.by.cmp(&b.by)));
    held
}

fn write_places(moment: &TensorMoment, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    // Each line gets one row, whatever modules it allocates in.
    let mut sums: BTreeMap<(&str, &Option<String>), (i64, u64)> = BTreeMap::new();
    for PlaceSum { place, line, caller, bytes, blocks, .. } in &moment.by_place {
        let name = if line.is_some() { place } else { NO_LINE };
        let sum = sums.entry((name, caller)).or_default();
        *sum = (sum.0.saturating_add(*bytes), sum.1 + blocks.unsigned_abs());
    }
    let mut tree = Tree::new();
    for ((name, caller), (bytes, blocks)) in sums {
        tree.leaf(&[], Leaf { name: name.to_owned(), bytes, blocks, note: caller.clone() });
    }
    let unit = unit_of(moment.allocated_bytes);
    let rows = tree.rows(if moment.by_module.is_some() { ROWS_BESIDE_MODULES } else { MOST_ROWS });
    if rows.is_empty() {
        return Ok(());
    }
    if let (Some(by_module), Some(by_class)) = (&moment.by_module, &moment.by_class) {
        modules::write(by_module, by_class, unit, out, paint)?;
    }
    writeln!(out, "{}", InPaint(&part_table("allocated at", &rows, unit), paint))
}

/// Returns the tensors of each device at a moment, for JSON. With `has_segments`, each segment is listed.
pub(crate) fn at(history: &History, moment: Moment, has_segments: bool) -> Option<Vec<TensorMoment>> {
    let all = history.tensors.as_ref()?;
    let of_device = |tensors: &TensorHistory| {
        let window = match moment {
            Moment::Start => (0, 0),
            // The step after which tensors had their highest value during the peak of the device.
            Moment::Peak => history.peak_of(tensors.about.device)?,
            Moment::End => (u64::MAX, u64::MAX),
            Moment::Oom => [history.oom()?.time; 2].into(),
            Moment::Time(time) => [time.as_nanos().try_into().unwrap_or(u64::MAX); 2].into(),
        };
        let steps = match moment {
            Moment::Oom => rejection_on(history, tensors).map(|rejection| tensors.steps_at_rejection(rejection.time)),
            _ => None,
        };
        let steps = steps.unwrap_or_else(|| tensors.most_between(window.0, window.1));
        let nanos = match moment {
            Moment::Peak => tensors.steps.get(steps.checked_sub(1)?)?.time,
            _ => window.0.min(history.end_nanos()),
        };
        (!tensors.steps.is_empty()).then(|| TensorMoment::of(history, all, tensors, steps, nanos, has_segments))
    };
    Some(all.devices.iter().filter_map(of_device).collect())
}

/// Writes the tensors of each device at a moment as text. With `has_segments`, also explains why memory is unused, and
/// draws segments.
pub(crate) fn write_at(
    history: &History,
    moment: Moment,
    has_segments: bool,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let name = history.tensors.as_ref().map(|tensors| tensors.name.as_str()).unwrap_or_default();
    for moment in at(history, moment, has_segments).into_iter().flatten() {
        let count = counted(moment.tensors, "tensor", "tensors");
        let (device, bytes) = (moment.device, Bytes::new(moment.allocated_bytes));
        let after = in_words(Duration::from_secs_f64(moment.seconds));
        let title = format!("{name}, device {device}: {count} ({bytes}) after {after}");
        writeln!(out, "\n{}", paint.on(Role::Heading, title))?;
        write_places(&moment, out, paint)?;
        let held = moment.held.iter().map(|held| (held.by.clone(), held.bytes, 1));
        modules::table("referred to by", held, unit_of(moment.allocated_bytes), out, paint)?;
        line(out, paint, "then", &moment.segments_in_words())?;
        if has_segments {
            moment.write_reasons(out, paint)?;
            moment.sums.write_segments(out, paint)?;
        }
    }
    Ok(())
}
