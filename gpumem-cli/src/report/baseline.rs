//! The peaks of recordings as lines of a file, and the changes since it was written, for `gpumem baseline`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    path::Path,
};

use gpumem_core::{
    export::{Paint, Role},
    model::{ByteDelta, Bytes, one_line},
    report::counted,
};
use gpumem_driver::baseline_file::Peak;
use serde::Serialize;

use super::{
    annotations::{Check, Finding, position},
    difference::{Change, Limit, MARKDOWN_TITLE, Named, escaped, signed, write_markdown_rows, write_rows},
    overview::Overview,
    place_peaks::{PlacePeak, place_peaks},
};
use crate::{failure::Failure, history::History};

/// Places with less than this share of the peak of their device have no line, in percent.
const LEAST_SHARE: u64 = 1;
const MIB: u64 = 1 << 20;

/// The peaks of some recordings, by the names of their lines.
#[derive(Debug, Default)]
pub(crate) struct Lines(BTreeMap<String, Line>);

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    bytes: u64,
    /// A place with less than this is not written.
    least: u64,
}

impl Lines {
    /// Adds the peaks of a recording. If processes have the same name without their number, each line has their highest peak. Places are
    /// named from the root of the repository.
    pub(crate) fn add(&mut self, history: &History, overview: &Overview, root: Option<&str>) -> Result<(), Failure> {
        let failed = |why: &str, next| {
            let what = format!("the peaks of `{}` cannot be compared with a baseline", overview.file);
            Failure::new(what, why, next)
        };
        if overview.missing.leaves_peak_unknown() {
            let next = match overview.missing.begins_after_event {
                Some(_) => "record the program without --max-size",
                None => "record the program again",
            };
            return Err(failed(overview.missing.in_words().join(" ").trim_end_matches('.'), next));
        }
        if overview.missing.has_only_peaks {
            return Err(failed("it has only the peaks of devices", "record the program without --only-peak"));
        }
        let name = name_of(overview);
        let places = place_peaks(history, root);
        for device in &overview.devices {
            let Some(peak) = device.peak_bytes else { continue };
            let simulated = if device.simulated { "simulated " } else { "" };
            let device_name = format!("{name}, {simulated}device {}", device.device);
            let least = MIB.max(peak / 100 * LEAST_SHARE);
            for PlacePeak { is_of_tensors, place, bytes, .. } in
                places.iter().filter(|place| place.device == device.device)
            {
                let tensors = if *is_of_tensors { ", tensors" } else { "" };
                self.higher(format!("{device_name}{tensors}: {}", one_line(place)), Line { bytes: *bytes, least });
            }
            self.higher(device_name, Line { bytes: peak, least: 0 });
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn higher(&mut self, name: String, line: Line) {
        let known = self.0.entry(name).or_insert(line);
        if known.bytes < line.bytes {
            *known = line;
        }
    }

    /// Returns the lines of the file.
    pub(crate) fn written(&self) -> BTreeMap<String, Peak> {
        let lines = self.0.iter().filter(|(_, line)| line.bytes >= line.least);
        lines.map(|(name, line)| (name.clone(), Peak(rounded(line.bytes)))).collect()
    }
}

/// Rounds up by less than 1 %, so that most small changes change no line.
fn rounded(bytes: u64) -> Bytes {
    let step = (bytes.checked_ilog2().map_or(0, |bits| 1 << bits) / 128).max(MIB);
    Bytes::new(bytes.div_ceil(step).saturating_mul(step))
}

/// Returns the folder of a repository that a file is in, else the folder of the file. `None` if it is not there, or not text.
pub(crate) fn repository_of(file: &Path) -> Option<String> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().ok()?;
    let root = folder.ancestors().find(|above| above.join(".git").exists()).unwrap_or(&folder);
    root.to_str().map(str::to_owned)
}

/// Returns the name of a recording with the rank, and without the numbers of its devices and its process: `train.rank3` for
/// `train.rank3.gpu0.pid17.capture`, and for `train-17.capture` if rank 3 had the number 17.
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
    // The sign that separates it goes as well.
    let signs = ['-', '_', '.'];
    match before.strip_suffix(signs).unwrap_or(before) {
        "" => after.strip_prefix(signs).unwrap_or(after).to_owned(),
        before => format!("{before}{after}"),
    }
}

/// Returns whether a line belongs to a device, and not to a place.
fn is_of_device(name: &str) -> bool {
    name.rsplit_once("device ").is_some_and(|(_, number)| number.parse::<u32>().is_ok())
}

/// Returns whether a line belongs to a recording. The file may also have the peaks of tests.
pub(crate) fn is_of_recording(name: &str) -> bool {
    name.match_indices([':', ',']).map(|(end, _)| &name[..end]).chain([name]).any(is_of_device)
}

/// Returns the device and the file of a place. `None` if the place has no line.
fn source(name: &str) -> Option<&str> {
    position(name).map(|(source, ..)| source)
}

/// The changes since a baseline was written. The names of the fields are those in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    file: String,
    limit: Limit,
    /// The number of lines that were compared.
    compared: usize,
    /// The lines that changed by more than the limit. They are rounded as in the file.
    changed: Vec<Named>,
    /// The names of the lines that increased.
    higher: BTreeSet<String>,
    /// Peaks without a line: their earlier values are not known.
    new: Vec<New>,
    /// Devices that no recording has.
    gone: Vec<String>,
    /// Places that moved to another line of the same file, before and now.
    moved: Vec<[String; 2]>,
}

#[derive(Debug, Serialize)]
struct New {
    name: String,
    #[serde(rename = "after_bytes")]
    bytes: u64,
}

impl Comparison {
    pub(crate) fn of(file: &Path, before: &BTreeMap<String, Peak>, now: &Lines, limit: Limit) -> Self {
        let before: BTreeMap<_, _> = before.iter().filter(|(name, _)| is_of_recording(name)).collect();
        let names: BTreeSet<_> = before.keys().copied().chain(now.0.keys()).collect();
        let bytes = |name: &String| before.get(name).map(|peak| peak.0.get());
        let change = |name: &String| {
            let line = now.0.get(name).copied().unwrap_or_default();
            // A place without a line may have had nearly the smallest amount that is written.
            Change::new(signed(bytes(name).unwrap_or(line.least)), signed(line.bytes))
        };
        let rounded_after = |change: Change| signed(rounded(change.after.unsigned_abs()).get());
        let is_new = |name: &String| !before.contains_key(name) && change(name).exceeds(limit);
        let mut left: BTreeSet<_> = before.keys().copied().filter(|name| !now.0.contains_key(*name)).collect();
        let mut moved = Vec::new();
        for name in names.iter().copied().filter(|name| is_new(name)) {
            let had = |old: &String| Change::new(signed(bytes(old).unwrap_or(0)), rounded_after(change(name)));
            let is_same = |old: &&String| {
                let Change { before, after, .. } = had(old);
                let is_near =
                    [Change::new(before, after), Change::new(after, before)].map(|change| !change.exceeds(limit));
                source(old).is_some() && source(old) == source(name) && is_near == [true; 2]
            };
            let same = left.iter().copied().filter(is_same).min_by_key(|old| had(old).bytes.unsigned_abs());
            if let Some(old) = same {
                left.remove(old);
                moved.push([old.clone(), name.clone()]);
            }
        }
        let is_moved = |name: &String| moved.iter().flatten().any(|moved| moved == name);
        let gone: Vec<_> = left.into_iter().filter(|name| is_of_device(name)).cloned().collect();
        // Nothing is known of the places of a device that is gone.
        let is_gone = |name: &String| {
            let of_device =
                |device| name.strip_prefix(device).is_some_and(|rest| rest.is_empty() || rest.starts_with([':', ',']));
            gone.iter().map(String::as_str).any(of_device)
        };
        let (mut changed, mut higher, mut new) = (Vec::new(), BTreeSet::new(), Vec::new());
        for name in names.iter().copied().filter(|name| !is_moved(name) && !is_gone(name)) {
            let exact = change(name);
            if !before.contains_key(name) {
                if exact.exceeds(limit) {
                    new.push(New { name: name.clone(), bytes: rounded(exact.after.unsigned_abs()).get() });
                }
                continue;
            }
            let shown = Change::new(signed(bytes(name).unwrap_or(0)), rounded_after(exact));
            let is_lower = Change::new(exact.after, shown.before).exceeds(limit) && shown.bytes < 0;
            let is_higher = exact.exceeds(limit);
            if is_higher {
                higher.insert(name.clone());
            }
            if is_higher || is_lower {
                changed.push(Named { name: name.clone(), change: shown });
            }
        }
        changed.sort_by_key(|named| std::cmp::Reverse(named.change.bytes));
        new.sort_by_key(|new| std::cmp::Reverse(new.bytes));
        Self { file: file.display().to_string(), limit, compared: before.len(), changed, higher, new, gone, moved }
    }

    pub(crate) fn is_exceeded(&self) -> bool {
        !self.higher.is_empty() || !self.new.is_empty() || !self.gone.is_empty()
    }

    /// Returns a checked limit for each peak that increased or has no line, and for each line whose device is gone.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let Self { file, limit, .. } = self;
        let of = |name: &str, text: String, place: Option<&str>| {
            let place = place.map(str::to_owned);
            Check {
                of: file.clone(),
                name: format!("{name} has at most {limit} more"),
                found: vec![Finding { text, place }],
            }
        };
        let higher =
            self.changed.iter().filter(|named| self.higher.contains(&named.name)).map(|Named { name, change }| {
                let [before, after] = [change.before, change.after].map(ByteDelta::new);
                let (words, place) = (change.in_words(), name.split_once(": ").map(|(_, place)| place));
                let text = format!("{name}: the peak was {before} and is {after}: {words}, more than {limit} ({file})");
                of(name, text, place)
            });
        let new = self.new.iter().map(|New { name, bytes }| {
            let place = name.split_once(": ").map(|(_, place)| place);
            of(name, format!("{name} has {}, and no line in {file}", Bytes::new(*bytes)), place)
        });
        let gone =
            self.gone.iter().map(|name| of(name, format!("{name}: no recording has this device of {file}"), None));
        let mut checks: Vec<_> = higher.chain(new).chain(gone).collect();
        if checks.is_empty() {
            let name = format!("the peaks have at most {limit} more");
            checks.push(Check { of: file.clone(), name, found: Vec::new() });
        }
        checks
    }

    fn lines(&self) -> Vec<String> {
        let moved = |[old, new]: &[String; 2]| {
            let place = new.split_once(": ").map_or(new.as_str(), |(_, place)| place);
            format!("Moved: {old} is at {place} now.")
        };
        let new = |New { name, bytes }: &New| format!("New: {name} has {}.", Bytes::new(*bytes));
        let gone = |name: &String| format!("No recording has {name}.");
        let lines = self.new.iter().map(new).chain(self.moved.iter().map(moved));
        lines.chain(self.gone.iter().map(gone)).collect()
    }

    fn verdict(&self, file: &str) -> String {
        let Self { limit, compared, changed, higher, new, gone, moved, .. } = self;
        if !self.is_exceeded() {
            return if changed.is_empty() && moved.is_empty() {
                let peaks = counted(*compared as u64, "peak", "peaks");
                format!("The {peaks} of {file} changed by {limit} at most.")
            } else {
                format!("No peak of {file} grew by more than {limit}. `gpumem baseline write` takes over what changed.")
            };
        }
        let mut sentences = Vec::new();
        if !higher.is_empty() {
            let grew = counted(higher.len() as u64, "peak grew", "peaks grew");
            sentences.push(format!("{grew} by more than {limit} since {file} was written."));
        }
        if !new.is_empty() {
            let new = counted(new.len() as u64, "peak has", "peaks have");
            sentences.push(format!("{new} no line in {file}."));
        }
        if !gone.is_empty() {
            let gone = counted(gone.len() as u64, "device has", "devices have");
            sentences.push(format!("{gone} no recording, but a line in {file}."));
        }
        sentences.push("If that is wanted, `gpumem baseline write` takes it over.".to_owned());
        sentences.join(" ")
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        let role = if self.is_exceeded() { Role::Alarm } else { Role::Heading };
        writeln!(out, "{}", paint.on(role, self.verdict(&self.file)))?;
        write_rows("peak of", &self.changed, out, paint)?;
        let lines = self.lines();
        if !lines.is_empty() {
            writeln!(out)?;
        }
        lines.iter().try_for_each(|line| writeln!(out, "{}", one_line(line)))
    }

    /// Writes a table in Markdown, for a comment on a pull request.
    pub(crate) fn write_markdown(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{MARKDOWN_TITLE}\n")?;
        write_markdown_rows("peak of", &self.changed, out)?;
        for line in self.lines() {
            writeln!(out, "> {}\n", escaped(&line))?;
        }
        writeln!(out, "{}", self.verdict(&escaped(&self.file)))
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

    #[test]
    fn the_peaks_of_tests_are_of_no_recording() {
        for name in ["a, device 0", "a, device 12: x.py:1", "b: c, simulated device 1, tensors: x.py:1"] {
            assert!(is_of_recording(name), "{name}");
        }
        for name in ["tests::forward", "a, device x: y", ""] {
            assert!(!is_of_recording(name), "{name}");
        }
    }

    fn compared(before: &[(&str, u64)], now: &[(&str, u64, u64)]) -> Comparison {
        let before = before.iter().map(|(name, mib)| ((*name).to_owned(), Peak(Bytes::mib(*mib)))).collect();
        let line =
            |(name, mib, least): &(&str, u64, u64)| ((*name).to_owned(), Line { bytes: mib * MIB, least: least * MIB });
        let now = Lines(now.iter().map(line).collect());
        Comparison::of(Path::new("b.json"), &before, &now, Limit::Percent(2.0))
    }

    #[test]
    fn what_grew_fails_and_what_moved_does_not() {
        let before = [("a, device 0", 400), ("a, device 0: x.py:1", 100), ("a, device 0: x.py:9", 50)];
        let same = compared(
            &before,
            &[("a, device 0", 408, 0), ("a, device 0: x.py:1", 99, 4), ("a, device 0: x.py:9", 50, 4)],
        );
        assert!(!same.is_exceeded() && same.changed.is_empty(), "{same:?}");
        let moved = compared(
            &before,
            &[("a, device 0", 400, 0), ("a, device 0: x.py:3", 101, 4), ("a, device 0: x.py:11", 50, 4)],
        );
        assert!(!moved.is_exceeded() && moved.changed.is_empty(), "{moved:?}");
        assert_eq!(moved.moved.len(), 2, "{moved:?}");
        // The place is in another file and has more than before.
        let new = compared(
            &before,
            &[("a, device 0", 400, 0), ("a, device 0: y.py:1", 100, 4), ("a, device 0: x.py:11", 60, 4)],
        );
        assert_eq!(new.new.len(), 2, "{new:?}");
        assert_eq!(new.changed.len(), 2, "{new:?}");
        // A place with hardly enough for a line is not new.
        let small =
            compared(&before[..1], &[("a, device 0", 200, 0), ("a, device 0: y.py:1", 4, 4), ("b, device 0", 1, 0)]);
        assert_eq!(small.new.iter().map(|new| new.name.as_str()).collect::<Vec<_>>(), ["b, device 0"], "{small:?}");
        assert_eq!(small.changed.len(), 1, "the device has less: {small:?}");
        let gone = compared(&before, &[("b, device 0", 0, 0)]);
        assert!(gone.is_exceeded() && gone.gone == ["a, device 0"], "{gone:?}");
        assert!(gone.changed.is_empty(), "its places are not known: {gone:?}");
    }
}
