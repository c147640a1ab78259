//! The data of a page.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use flate2::{Compression, write::ZlibEncoder};
use gpumem_core::{
    derive,
    export::Amounts,
    model::{Bytes, Device, Family},
};
use gpumem_recording::TensorClass;
use serde::Serialize;
use serde_json::Serializer;

use super::script::InScript;
use crate::{
    formats::{Indices, stack},
    history::{History, Lives, Origin, ProcessSeries, step_of, step_peaks},
    report::{
        dry_run::DryRunOverview,
        modules::NOT_CLASSIFIED,
        overview::{DeviceOverview, Overview},
        place_sums::NO_LINE,
        process::process_in_words,
        tensors::TensorsOverview,
    },
};

/// The page contains at most this many names of blocks.
const MOST_LABELS: usize = 20_000;
/// The page contains at most this many marks.
const MOST_MARKS: usize = 20_000;
/// The page contains at most about this many values of each kind of the driver's memory.
const MOST_VALUES: usize = 2_000;
/// The small curve of a recording has this many steps.
const STEPS: usize = 300;

/// The origin of blocks, as `page.js` reads it.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct PageOrigin<'a> {
    scope: &'a [String],
    place: String,
    caller: Option<&'a str>,
    library: String,
    kind: &'static str,
    is_on_device: bool,
    frames: Vec<usize>,
    /// The frames of the folded stack.
    calls: Vec<usize>,
}

/// Everything that is not in the columns, as `page.js` reads it. There may be many origins and frames. Fields are
/// `None` if the page does not show the recording in detail.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct About<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    origins: Option<Vec<PageOrigin<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frames: Option<Vec<String>>,
    tensors: Option<AboutTensors<'a>>,
    blocks: usize,
    changes: usize,
    /// The lengths of the columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    columns: Option<[usize; 6]>,
    command: &'a [String],
    curve: Vec<Option<u64>>,
    devices: Vec<AboutDevice<'a>>,
    end: u64,
    file: &'a str,
    has_only_peaks: bool,
    /// The memory that was live before this time is not known.
    known_from: Option<u64>,
    labels: BTreeMap<u32, &'a str>,
    /// The times of the moments that the program marked, and the indexes of their names in `frames`.
    marks: Vec<(u64, usize)>,
    missing: Vec<String>,
    not_freed: Option<AboutNotFreed>,
    pid: Option<u32>,
    #[serde(rename = "refused")]
    rejected: Option<AboutRejected>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AboutDevice<'a> {
    model: Option<&'a str>,
    most: Option<String>,
    name: String,
    peak: u64,
    peak_at: Option<u32>,
    peak_time: Option<u64>,
    /// The memory that each registered pool kept unused at the peak.
    pools: Vec<String>,
    /// The device's total memory, in bytes.
    total: Option<u64>,
    /// The memory that the driver took by itself; `None` if it was not measured.
    driver: Option<AboutDriver>,
}

#[derive(Serialize)]
struct AboutDriver {
    /// The highest memory of the process, with its largest parts.
    words: Option<String>,
    /// Each kind over time. Empty if the page does not show the recording in detail.
    kinds: Vec<AboutDriverKind>,
}

#[derive(Serialize)]
struct AboutDriverKind {
    name: &'static str,
    /// Times, and the bytes from then on.
    values: Vec<(u64, u64)>,
}

#[derive(Serialize)]
struct AboutNotFreed {
    blocks: u64,
    bytes: u64,
}

/// The times at which the driver rejected allocations, and the text about them in the summary.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AboutRejected {
    /// `None` if nothing was live before, or if the recording does not contain it.
    after: Option<u32>,
    after_time: Option<u64>,
    times: Vec<u64>,
    words: Vec<String>,
}

/// PyTorch's history, which is separate from the driver's. `page.js` reads the fields of both in the same way.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AboutTensors<'a> {
    origins: Vec<PageOrigin<'a>>,
    allocator: &'a str,
    blocks: usize,
    changes: usize,
    columns: [usize; 6],
    devices: Vec<AboutTensorDevice<'a>>,
    has_only_peaks: bool,
    known_from: Option<u64>,
    labels: BTreeMap<u32, &'a str>,
    peaks: Option<Vec<String>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AboutTensorDevice<'a> {
    /// True if adjacent parts form one segment.
    is_expandable: bool,
    /// The memory that was live before this time is not known.
    known_from: Option<u64>,
    model: Option<&'a str>,
    name: String,
    peak: u64,
    total: Option<u64>,
}

pub(super) struct Recording {
    /// Everything that is not in the columns, as JSON.
    pub(super) about: String,
    /// The columns, compressed, in base 64. `None` if the recording is not shown in detail.
    pub(super) data: Option<String>,
    /// The columns of the tensors, if the recording has any.
    pub(super) tensors: Option<String>,
}

/// Columns of numbers in LEB128.
#[derive(Default)]
struct Columns {
    /// For each change, the nanoseconds since the previous one.
    times: Vec<u8>,
    /// For each change, the number of blocks that were allocated since the block of the change, times 2. This is 0 if
    /// the block is new. 1 is added if the block is freed, and 2 if only a part of it is freed.
    blocks: Vec<u8>,
    /// The origin of each new block.
    origins: Vec<u8>,
    /// The size of each new block, and the remaining bytes after each change that frees a part.
    sizes: Vec<u8>,
    /// The device of each new block.
    devices: Vec<u8>,
    /// The id of the address of each new PyTorch block, numbered in the order in which addresses first appear. A new id
    /// is followed by the address. Empty for driver blocks.
    addresses: Vec<u8>,
}

fn put(column: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        column.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    column.push(number.to_le_bytes()[0]);
}

impl Columns {
    fn of(lives: &Lives, has_addresses: bool) -> Self {
        let mut columns = Self::default();
        let (mut last, mut known, mut addresses) = (0, 0_u64, HashMap::new());
        for (at, change) in (0_u32..).zip(lives.changes()) {
            put(&mut columns.times, change.time - last);
            last = change.time;
            let block = lives.block(change.block);
            let since = || (known - 1 - u64::from(change.block)) * 2;
            match change.kind.blocks() {
                1.. => {
                    put(&mut columns.blocks, 0);
                    put(&mut columns.origins, block.origin.into());
                    put(&mut columns.sizes, block.bytes);
                    put(&mut columns.devices, block.device.into());
                    if has_addresses {
                        let next = addresses.len() as u64;
                        let number = *addresses.entry(block.key).or_insert(next);
                        put(&mut columns.addresses, number);
                        if number == next {
                            put(&mut columns.addresses, block.key);
                        }
                    }
                    known += 1;
                }
                0 => {
                    put(&mut columns.blocks, since() + 2);
                    put(&mut columns.sizes, lives.bytes_after(change.block, at));
                }
                _ => put(&mut columns.blocks, since() + 1),
            }
        }
        columns
    }

    fn all(&self) -> [&[u8]; 6] {
        [&self.times, &self.blocks, &self.origins, &self.sizes, &self.devices, &self.addresses]
    }

    fn compressed(&self) -> io::Result<String> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
        self.all().iter().try_for_each(|column| encoder.write_all(column))?;
        Ok(STANDARD.encode(encoder.finish()?))
    }
}

fn rejected(history: &History, overview: &Overview) -> Option<AboutRejected> {
    let rejected = overview.rejected.as_ref()?;
    let latest = &history.rejections[history.rejections.len().saturating_sub(rejected.latest.len())..];
    let reserved = overview.torch.iter().flat_map(TensorsOverview::rejection_in_words);
    let reserved = reserved.map(|(name, text)| format!("{name}: {text}"));
    let after = history.oom().and_then(|main| main.after).filter(|_| rejected.is_live_known);
    Some(AboutRejected {
        after,
        after_time: after.map(|after| history.time_of(after)),
        times: latest.iter().map(|rejected| rejected.time).collect(),
        words: rejected.in_words().into_iter().chain(reserved).collect(),
    })
}

impl Recording {
    /// Collects the data of a recording. Without details, its events are left out.
    pub(super) fn of(history: &History, overview: &Overview, is_in_detail: bool) -> io::Result<Self> {
        let columns = is_in_detail.then(|| Columns::of(&history.lives, false));
        let data = columns.as_ref().map(Columns::compressed).transpose()?;
        let folder = &history.definitions().process().folder;
        let mut frames = Indices::<String>::default();
        let origins = is_in_detail.then(|| origins(history, folder, &mut frames));
        let mut series = if is_in_detail { history.process_series() } else { Vec::new() };
        // The curve above has the allocations.
        series.retain(|series| !series.is_sum());
        let devices: Vec<_> = (0..)
            .zip(&history.devices)
            .map(|(number, device): (u16, _)| {
                let is_same = |known: &&DeviceOverview| {
                    (known.device, known.simulated)
                        == (device.device.ordinal, device.device.family == Family::Simulated)
                };
                let of_device = overview.devices.iter().find(is_same);
                let process = of_device.and_then(|device| device.process_peak.as_ref());
                let driver = history.driver_measured_by(device.device).map(|_| AboutDriver {
                    words: process.map(process_in_words),
                    kinds: series
                        .extract_if(.., |series| series.device == number)
                        .map(|series| driver_kind(&series))
                        .collect(),
                });
                let pools = of_device.map_or(&[][..], |device| &device.pools);
                AboutDevice {
                    model: model(history, device.device),
                    most: of_device.and_then(DeviceOverview::most),
                    pools: pools
                        .iter()
                        .map(|pool| pool.in_words(Amounts::of([Bytes::new(device.peak).signed()])))
                        .collect(),
                    name: device.device.to_string(),
                    peak: device.peak,
                    peak_at: device.peak_at,
                    peak_time: device.peak_at.map(|at| history.time_of(at)),
                    total: total(history, device.device),
                    driver,
                }
            })
            .collect();
        let [most_labels, most_marks] = if is_in_detail { [MOST_LABELS, MOST_MARKS] } else { [0, 0] };
        let labels: BTreeMap<u32, &str> =
            history.labels.iter().take(most_labels).map(|(block, label)| (*block, &**label)).collect();
        let shown = &history.marks[..history.marks.len().min(most_marks)];
        let callsites: Vec<_> = shown.iter().map(|mark| mark.callsite).collect();
        let names = derive::short_names(history.ledger(), history.definitions(), &callsites);
        let marks = shown.iter().zip(&names).map(|(mark, name)| (mark.time, frames.get_or_insert(name))).collect();
        let tensors = is_in_detail.then(|| tensors(history, overview, folder, &mut frames)).flatten();
        let (about_tensors, tensors) = match tensors {
            Some((about, columns)) => (Some(about), Some(columns.compressed()?)),
            None => (None, None),
        };
        let unknown = overview.dry_run.as_ref().filter(|dry| dry.unknown_values > 0).map(DryRunOverview::in_words);
        let about = About {
            origins,
            frames: is_in_detail.then_some(frames.all),
            tensors: about_tensors,
            blocks: history.lives.block_count(),
            changes: history.lives.change_count(),
            columns: columns.map(|columns| columns.all().map(<[u8]>::len)),
            command: &overview.command,
            curve: curve(history),
            devices,
            end: history.end_nanos(),
            file: &overview.file,
            has_only_peaks: history.has_only_peaks(),
            known_from: history.known_from(),
            labels,
            marks,
            missing: overview.missing_in_words().into_iter().chain(unknown).collect(),
            not_freed: overview.not_freed.as_ref().map(|of| AboutNotFreed { blocks: of.blocks, bytes: of.bytes }),
            pid: overview.pid,
            rejected: rejected(history, overview),
        };
        let mut json = Vec::new();
        about.serialize(&mut Serializer::with_formatter(&mut json, InScript))?;
        Ok(Self { about: String::from_utf8(json).map_err(io::Error::other)?, data, tensors })
    }
}

fn origins<'a>(history: &'a History, folder: &str, frames: &mut Indices<String>) -> Vec<PageOrigin<'a>> {
    let mut origin = |origin: &'a Origin| {
        let [all, calls] = [false, true].map(|is_folded| {
            let stack = stack(history, origin, is_folded);
            stack.iter().map(|frame| frames.get_or_insert(&frame.in_words(folder))).collect()
        });
        PageOrigin {
            scope: &origin.path,
            place: origin.place(),
            caller: origin.caller.as_deref(),
            library: origin.library_or_program(),
            kind: origin.kind.name(),
            is_on_device: origin.kind.is_on_device(),
            frames: all,
            calls,
        }
    };
    history.origins.iter().map(&mut origin).collect()
}

/// Returns a kind of the driver's memory with at most [`MOST_VALUES`] values: of several, the highest one.
fn driver_kind(series: &ProcessSeries) -> AboutDriverKind {
    let each = series.values.len().div_ceil(MOST_VALUES).max(1);
    let highest = |values: &[(u64, u64)]| values.iter().copied().max_by_key(|(_, bytes)| *bytes);
    let mut values: Vec<_> = series.values.chunks(each).filter_map(highest).collect();
    // The value at the end stays.
    values.extend(series.values.last().filter(|last| values.last() != Some(last)));
    AboutDriverKind { name: series.name, values }
}

fn model(history: &History, device: Device) -> Option<&str> {
    history.definitions().device(device)?.name.as_deref()
}

fn total(history: &History, device: Device) -> Option<u64> {
    Some(history.definitions().device(device)?.total?.get())
}

/// Returns PyTorch's tensors, as `page.js` reads them instead of the blocks. Segments are the blocks that are not on
/// the device.
fn tensors<'a>(
    history: &'a History,
    overview: &Overview,
    folder: &str,
    frames: &mut Indices<String>,
) -> Option<(AboutTensors<'a>, Columns)> {
    let tensors = history.tensors.as_ref()?;
    let lives = &tensors.blocks.lives;
    if lives.change_count() == 0 {
        return None;
    }
    let columns = Columns::of(lives, true);
    let kind = |at: usize| match &tensors.classes {
        Some(classes) => classes[at].map_or(NOT_CLASSIFIED, TensorClass::name),
        None => "tensor",
    };
    let mut origins: Vec<_> = (0..)
        .zip(&tensors.origins)
        .map(|(at, of)| {
            let place = of.line.as_deref().unwrap_or(NO_LINE);
            let has_frames = !history.definitions().frames(of.stack).is_empty();
            let numbers = [false, true].map(|is_folded| {
                if !has_frames {
                    let names = of.path.iter().map(String::as_str).chain([place]);
                    return names.map(|name| frames.get_or_insert(&name.to_owned())).collect();
                }
                let stack = stack(history, of, is_folded);
                stack.iter().map(|frame| frames.get_or_insert(&frame.in_words(folder))).collect()
            });
            let [frames, calls] = numbers;
            let (place, library, caller) = (place.to_owned(), String::new(), of.caller.as_deref());
            PageOrigin { scope: &of.path, place, caller, library, kind: kind(at), is_on_device: true, frames, calls }
        })
        .collect();
    origins.push(PageOrigin { place: "segment".to_owned(), kind: "segment", ..PageOrigin::default() });
    let devices = tensors.devices.iter().map(|of_device| {
        let device = of_device.about.device;
        AboutTensorDevice {
            is_expandable: of_device.is_expandable,
            known_from: of_device.known_from(),
            model: model(history, device),
            name: device.to_string(),
            peak: of_device.live.peak,
            total: total(history, device),
        }
    });
    let about = AboutTensors {
        origins,
        allocator: &tensors.name,
        blocks: lives.block_count(),
        changes: lives.change_count(),
        columns: columns.all().map(<[u8]>::len),
        devices: devices.collect(),
        has_only_peaks: false,
        known_from: None,
        labels: BTreeMap::new(),
        peaks: overview.torch.as_ref().map(TensorsOverview::peaks_in_words),
    };
    Some((about, columns))
}

/// Divides the time into equal parts, and returns the peak of all devices together in each; `None` if the recording
/// does not contain it.
fn curve(history: &History) -> Vec<Option<u64>> {
    let end = history.end_nanos();
    let step_of = |time: u64| step_of(time, end, STEPS);
    if history.has_only_peaks() {
        let mut curve = vec![None; STEPS];
        let used: Vec<_> = history.devices.iter().filter_map(|device| Some((device.peak_at?, device.peak))).collect();
        // With several devices, the memory of the others at the peak of one is not known.
        if let [(at, peak)] = *used {
            curve[step_of(history.time_of(at))] = Some(peak);
        }
        curve[STEPS - 1] = curve[STEPS - 1].max(Some(history.devices.iter().map(|device| device.live).sum()));
        return curve;
    }
    let changes = history.lives.changes().map(|change| {
        let is_on_device = history.origin(&history.lives.block(change.block)).kind.is_on_device();
        (change.time, if is_on_device { change.delta } else { 0 })
    });
    let first = history.known_from().map_or(0, step_of);
    let peaks = step_peaks(changes, end, STEPS).into_iter().enumerate();
    peaks.map(|(step, most)| (step >= first).then_some(most.bytes)).collect()
}
