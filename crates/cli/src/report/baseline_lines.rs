//! The peaks of recordings as the lines of a baseline.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use gpumem_core::model::{Bytes, alike, one_line};
use gpumem_driver::baseline_file::Peak;

use super::{
    overview::Overview,
    place_peaks::{PlacePeak, place_peaks},
    together::{SharedPeak, Together},
};
use crate::{failure::Failure, history::History};

/// Places with less than this percentage of their device's peak get no line.
const LEAST_SHARE: u64 = 1;
const MIB: u64 = 1 << 20;

/// The end of the name of the line for driver blocks. Only devices with a registered pool have this line, because pools
/// keep memory unused.
pub(super) const DRIVER: &str = ", driver's blocks";

/// The name of the processes that have used a device.
pub(super) const TOGETHER: &str = "all processes together";

/// The peaks of some recordings, by line name.
#[derive(Debug, Default)]
pub(crate) struct LinePeaks {
    pub(super) all: BTreeMap<String, Line>,
    /// The lines for all processes of a device whose recordings do not show how much memory they held at the same time.
    pub(super) not_known: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line {
    pub(super) bytes: u64,
    /// The line is only written if it has at least this many bytes.
    pub(super) least: u64,
}

/// The processes whose peaks become the lines of a baseline.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    all: Vec<Process>,
    together: Together,
}

#[derive(Debug)]
struct Process {
    name: String,
    /// Its command without numbers, because the numbers of ports, folders and processes differ in each run.
    command: String,
    /// The peaks of its devices.
    peaks: Vec<u64>,
    /// Its lines, without its name.
    lines: Vec<(String, Line)>,
}

impl Processes {
    /// Adds the peaks of a recording. Places are named relative to the root of the repository.
    pub(crate) fn add(&mut self, history: &History, overview: &Overview, root: Option<&str>) -> Result<(), Failure> {
        let failed = |why: &str, next| {
            let what = format!("the peaks of `{}` cannot be compared with a baseline", overview.file);
            Failure::new(what, why, next)
        };
        if overview.missing.leaves_peak_unknown() || overview.missing.peak_may_be_higher() {
            let next = match overview.missing.begins_after_event {
                Some(_) if overview.missing.has_only_pytorch => {
                    "start PyTorch's history with the program, with more max_entries"
                }
                Some(_) => "record the program without --max-size",
                None => "record the program again",
            };
            return Err(failed(overview.missing.in_words().join(" ").trim_end_matches('.'), next));
        }
        if overview.missing.has_only_peaks {
            return Err(failed("it has only the peaks of devices", "record the program without --only-peak"));
        }
        let places = place_peaks(history, root);
        let (mut peaks, mut lines) = (Vec::new(), Vec::new());
        for device in &overview.devices {
            let Some(peak) = device.peak_bytes else { continue };
            let simulated = if device.simulated { "simulated " } else { "" };
            let device_name = format!(", {simulated}device {}", device.device);
            let least = MIB.max(peak / 100 * LEAST_SHARE);
            for PlacePeak { is_of_tensors, place, bytes, .. } in
                places.iter().filter(|place| place.device == device.device)
            {
                let tensors = if *is_of_tensors { ", tensors" } else { "" };
                let name = format!("{device_name}{tensors}: {}", one_line(place));
                lines.push((name, Line { bytes: *bytes, least }));
            }
            // Without a pool, the device's own line has the same value.
            let least = if device.driver_peak_bytes.is_some() { 0 } else { u64::MAX };
            let bytes = device.highest_bytes().unwrap_or(peak);
            lines.push((format!("{device_name}{DRIVER}"), Line { bytes, least }));
            lines.push((device_name, Line { bytes: peak, least: 0 }));
            peaks.push(peak);
        }
        if !peaks.is_empty() {
            let command = alike(&overview.command.join(" ")).into_owned();
            self.all.push(Process { name: name_of(overview), command, peaks, lines });
            self.together.add(history, overview, &[]);
        }
        Ok(())
    }

    /// Returns the lines. If processes have the same name, the second one becomes `train #2`. They are ordered by their commands, and those
    /// with the same command by their peaks, the highest first. A device that several processes have used has a separate line.
    pub(crate) fn lines(self) -> Result<LinePeaks, Failure> {
        let Self { all: mut processes, together } = self;
        let order = |a: &Process, b: &Process| {
            (&a.name, &a.command).cmp(&(&b.name, &b.command)).then_with(|| b.peaks.cmp(&a.peaks))
        };
        processes.sort_by(order);
        let mut taken: BTreeSet<String> = processes.iter().map(|process| process.name.clone()).collect();
        let (mut lines, mut before) = (LinePeaks::default(), None);
        for Process { name, lines: of_process, .. } in processes {
            let own = if before.as_ref() == Some(&name) {
                let numbered = (2..).map(|number: u64| format!("{name} #{number}"));
                numbered.into_iter().find(|name| taken.insert(name.clone())).unwrap_or_default()
            } else {
                name.clone()
            };
            before = Some(name);
            for (rest, line) in of_process {
                lines.higher(format!("{own}{rest}"), line);
            }
        }
        for SharedPeak { device, bytes, is_certain, .. } in
            together.peaks()?.into_iter().filter(|peak| peak.processes > 1)
        {
            let names = (1..).map(|number: u64| match number {
                1 => format!("{TOGETHER}, device {device}"),
                number => format!("{TOGETHER} #{number}, device {device}"),
            });
            let is_new = |name: &String| !lines.all.contains_key(name) && !lines.not_known.contains(name);
            let name = names.into_iter().find(is_new).unwrap_or_default();
            if is_certain {
                lines.all.insert(name, Line { bytes, least: 0 });
            } else {
                lines.not_known.insert(name);
            }
        }
        Ok(lines)
    }
}

impl LinePeaks {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn higher(&mut self, name: String, line: Line) {
        let known = self.all.entry(name).or_insert(line);
        if known.bytes < line.bytes {
            *known = line;
        }
    }

    /// Returns the first line of a baseline with which nothing can be compared.
    pub(crate) fn first_unmatched<'a>(&self, baseline: impl IntoIterator<Item = &'a String>) -> Option<&'a String> {
        baseline.into_iter().find(|name| self.not_known.contains(*name))
    }

    /// Returns the lines of the file.
    pub(crate) fn written(&self) -> BTreeMap<String, Peak> {
        let lines = self.all.iter().filter(|(_, line)| line.bytes >= line.least);
        lines.map(|(name, line)| (name.clone(), Peak(rounded(line.bytes)))).collect()
    }
}

/// Rounds up, so that most small changes leave the lines unchanged: below 128 MiB to whole MiB, above by less than 1 %.
pub(super) fn rounded(bytes: u64) -> Bytes {
    let step = (bytes.checked_ilog2().map_or(0, |bits| 1 << bits) / 128).max(MIB);
    Bytes::new(bytes.div_ceil(step).saturating_mul(step))
}

/// Returns the name of a recording with its rank, but without the device numbers and the process id: `train.rank3` for
/// `train.rank3.gpu0.pid17.capture`, and for `train-17.capture` if rank 3 had the process id 17.
fn name_of(overview: &Overview) -> String {
    let mut name = without_numbers(Path::new(&overview.file), overview.pid);
    if name.is_empty() {
        // `GPUMEM_CAPTURE=%p.capture`
        let program = overview.command.first().and_then(|program| Path::new(program).file_stem());
        name = program.unwrap_or_default().to_string_lossy().into_owned();
    }
    if let Some(rank) = overview.rank.map(|rank| format!("rank{rank}"))
        && name.split('.').all(|part| part != rank)
    {
        name = format!("{name}.{rank}");
    }
    one_line(&name).into_owned()
}

fn without_numbers(recording: &Path, pid: Option<u32>) -> String {
    let stem = recording.file_stem().unwrap_or_default().to_string_lossy();
    let is_number = |part: &str, of: &str| {
        let number = part.strip_prefix(of);
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| b"0123456789+".contains(&byte)))
    };
    let parts = stem.split('.').take_while(|part| !is_number(part, "gpu") && !is_number(part, "pid"));
    let name = parts.collect::<Vec<_>>().join(".");
    let name = if name.is_empty() { &*stem } else { &name };
    let Some(number) = pid.map(|pid| pid.to_string()) else { return name.to_owned() };
    let around = |(at, _)| (&name[..at], &name[at + number.len()..]);
    let is_digit = |sign: char| sign.is_ascii_digit();
    let is_whole = |(before, after): &(&str, &str)| !before.ends_with(is_digit) && !after.starts_with(is_digit);
    let Some((before, after)) = name.rmatch_indices(&number).map(around).find(is_whole) else { return name.to_owned() };
    // The separator goes as well.
    let signs = ['-', '_', '.'];
    match before.strip_suffix(signs).unwrap_or(before) {
        "" => after.strip_prefix(signs).unwrap_or(after).to_owned(),
        before => format!("{before}{after}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_no_number_of_a_process() {
        for (file, name) in [
            ("a/train.capture", "train"),
            ("train.rank3.gpu0+1.pid17.capture", "train.rank3"),
            ("train.pid17.2.capture", "train"),
            ("gpu0.capture", "gpu0"),
            ("v1.2.gpus.capture", "v1.2.gpus"),
            ("train-17.capture", "train"),
            ("17.capture", ""),
            ("17_train.capture", "train"),
            ("v17.train-17.capture", "v17.train"),
            ("train17.big.capture", "train.big"),
            ("train-117-170.capture", "train-117-170"),
        ] {
            assert_eq!(without_numbers(Path::new(file), Some(17)), name, "{file}");
        }
        assert_eq!(without_numbers(Path::new("train-17.capture"), None), "train-17");
    }

    #[test]
    fn less_than_a_hundredth_is_added() {
        for bytes in [1, MIB, MIB + 1, 437 * MIB, 38_120 * MIB, 5 << 40] {
            let rounded = rounded(bytes).get();
            assert!(rounded >= bytes && rounded.is_multiple_of(MIB), "{bytes} {rounded}");
            assert!(rounded - bytes < MIB || rounded - bytes < bytes / 100, "{bytes} {rounded}");
        }
        assert_eq!([rounded(0), rounded(437 * MIB)], [Bytes::ZERO, Bytes::mib(438)]);
    }
}
