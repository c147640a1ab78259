//! The changes of peaks since a baseline was written, for `gpumem baseline`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
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
    annotations::{Check, Finding},
    baseline_lines::{DRIVER, Line, LinePeaks, TOGETHER, rounded},
    change::{Change, Limit, MARKDOWN_TITLE, MOST_ROWS, Named, escaped, signed, write_markdown_rows, write_rows},
    moved::moved,
};

/// Returns the folder of the repository that contains a file, else the folder of the file. `None` if it does not exist
/// or its path is not UTF-8.
pub(crate) fn repository_of(file: &Path) -> Option<String> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().ok()?;
    let root = folder.ancestors().find(|above| above.join(".git").exists()).unwrap_or(&folder);
    root.to_str().map(str::to_owned)
}

/// Returns the device of a line: `train, device 0` for `train, device 0: src/model.rs:12`. The file may also contain
/// the peaks of tests.
fn device_of(name: &str) -> Option<&str> {
    let end = |(at, word): (usize, &str)| {
        let (before, rest) = (&name[..at], &name[at + word.len()..]);
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let is_whole = rest[digits..].is_empty() || rest[digits..].starts_with([':', ',']);
        let is_device = before.ends_with(", ") || before.ends_with(", simulated ");
        (is_whole && is_device && rest[..digits].parse::<u32>().is_ok()).then(|| at + word.len() + digits)
    };
    name.match_indices("device ").find_map(end).map(|end| &name[..end])
}

/// Returns whether a line belongs to a recording, and not to a test.
pub(crate) fn is_of_recording(name: &str) -> bool {
    device_of(name).is_some()
}

/// The changes since a baseline was written. The field names are those in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    file: String,
    limit: Limit,
    /// The number of lines that were compared.
    compared: usize,
    /// The lines that changed by more than the limit. Amounts are rounded as in the file.
    changed: Vec<Named>,
    /// The names of the lines that increased.
    higher: BTreeSet<String>,
    /// Peaks without a line. Their earlier values are not known.
    new: Vec<New>,
    /// Devices that are in no recording.
    gone: Vec<String>,
    /// Places that moved to another line of the same file: the name before, and the name now.
    moved: Vec<[String; 2]>,
}

#[derive(Debug, Serialize)]
struct New {
    name: String,
    #[serde(rename = "after_bytes")]
    bytes: u64,
}

impl Comparison {
    pub(crate) fn of(file: &Path, before: &BTreeMap<String, Peak>, now: &LinePeaks, limit: Limit) -> Self {
        let before: BTreeMap<&str, u64> = before
            .iter()
            .filter(|(name, _)| is_of_recording(name))
            .map(|(name, peak)| (&**name, peak.0.get()))
            .collect();
        let rounded_now = now.all.iter().map(|(name, line)| (&**name, rounded(line.bytes).get()));
        let moved = moved([before.clone().into_iter().collect(), rounded_now.collect::<Vec<_>>()], Some(limit));
        let moved_from: HashMap<_, _> = moved.iter().map(|[old, new]| (*new, *old)).collect();
        let moved_away: HashSet<_> = moved.iter().map(|[old, _]| *old).collect();
        // The amount in the file with which a line of the recordings is compared.
        let partner = |name: &str, line: &Line| -> Option<u64> {
            let same = || before.get(name).filter(|_| !moved_away.contains(name));
            let old = moved_from.get(name).and_then(|old| before.get(old)).or_else(same);
            // Before the device had a pool, it had only the blocks of its line.
            let of_device = || before.get(name.strip_suffix(DRIVER).filter(|_| line.least == 0)?);
            old.or_else(of_device).copied()
        };
        // Fewer processes need no line for all of them.
        let is_device = |name: &str| device_of(name) == Some(name) && !name.starts_with(TOGETHER);
        let gone: BTreeSet<_> =
            before.keys().copied().filter(|name| is_device(name) && !now.all.contains_key(*name)).collect();
        let (mut changed, mut higher, mut new) = (Vec::new(), BTreeSet::new(), Vec::new());
        let mut compare = |name: &str, before: u64, line: Line| {
            let exact = Change::new(signed(before), signed(line.bytes));
            let shown = Change::new(exact.before, signed(rounded(line.bytes).get()));
            let is_lower = Change::new(exact.after, exact.before).exceeds(limit) && shown.bytes < 0;
            let is_higher = exact.exceeds(limit);
            if is_higher {
                higher.insert(name.to_owned());
            }
            if is_higher || is_lower {
                changed.push(Named::new(name, shown));
            }
        };
        for (name, line) in &now.all {
            match partner(name, line) {
                Some(before) => compare(name, before, *line),
                // A place without a line may have been just below the smallest amount that is written.
                None if Change::new(signed(line.least), signed(line.bytes)).exceeds(limit) => {
                    new.push(New { name: name.clone(), bytes: rounded(line.bytes).get() });
                }
                None => {}
            }
        }
        for (name, bytes) in &before {
            let is_known = moved_away.contains(name) || now.all.contains_key(*name) && !moved_from.contains_key(name);
            // Nothing is known about the places of a device that is gone.
            let is_gone = device_of(name).is_some_and(|device| gone.contains(device));
            if !is_known && !is_gone {
                compare(name, *bytes, Line::default());
            }
        }
        changed.sort_by_key(|named| std::cmp::Reverse(named.change.bytes));
        new.sort_by_key(|new| std::cmp::Reverse(new.bytes));
        let gone = gone.into_iter().map(str::to_owned).collect();
        let moved = moved.iter().map(|pair| pair.map(str::to_owned)).collect();
        Self { file: file.display().to_string(), limit, compared: before.len(), changed, higher, new, gone, moved }
    }

    pub(crate) fn is_exceeded(&self) -> bool {
        !self.higher.is_empty() || !self.new.is_empty() || !self.gone.is_empty()
    }

    /// Returns a check for each peak that increased or has no line, and for each line whose device is gone.
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
        let [higher, _] = self.rows();
        let higher = higher.iter().map(|Named { name, change, .. }| {
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

    /// Returns the rows that grew, and those that shrank.
    fn rows(&self) -> [Vec<Named>; 2] {
        self.changed.iter().cloned().partition::<Vec<_>, _>(|named| named.change.bytes > 0).into()
    }

    fn lines(&self) -> Vec<String> {
        let moved = |[old, new]: &[String; 2]| {
            let place = new.split_once(": ").map_or(new.as_str(), |(_, place)| place);
            format!("Moved: {old} is at {place} now.")
        };
        let new = |New { name, bytes }: &New| format!("New: {name} has {}.", Bytes::new(*bytes));
        let gone = |name: &String| format!("No recording has {name}.");
        let all = [
            self.new.iter().map(new).collect::<Vec<_>>(),
            self.moved.iter().map(moved).collect(),
            self.gone.iter().map(gone).collect(),
        ];
        let shown = |mut lines: Vec<String>| {
            let more = lines.len().saturating_sub(MOST_ROWS);
            lines.truncate(MOST_ROWS);
            lines.extend((more > 0).then(|| format!("({more} more; --json lists all)")));
            lines
        };
        all.into_iter().flat_map(shown).collect()
    }

    fn verdict(&self, file: &str) -> String {
        let Self { limit, compared, changed, higher, new, gone, moved, .. } = self;
        if !self.is_exceeded() {
            return if changed.is_empty() && moved.is_empty() {
                let peaks = counted(*compared as u64, "peak", "peaks");
                format!("The {peaks} of {file} changed by {limit} at most.")
            } else {
                format!("No peak of {file} grew by more than {limit}. `gpumem baseline write` accepts the changes.")
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
        sentences.push("If this is intended, `gpumem baseline write` accepts it.".to_owned());
        sentences.join(" ")
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        let role = if self.is_exceeded() { Role::Alarm } else { Role::Heading };
        writeln!(out, "{}", paint.on(role, self.verdict(&self.file)))?;
        let [higher, lower] = self.rows();
        write_rows("higher peak of", &higher, out, paint)?;
        write_rows("lower peak of", &lower, out, paint)?;
        let lines = self.lines();
        if !lines.is_empty() {
            writeln!(out)?;
        }
        lines.iter().try_for_each(|line| writeln!(out, "{}", one_line(line)))
    }

    /// Writes a Markdown table for a comment on a pull request.
    pub(crate) fn write_markdown(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{MARKDOWN_TITLE}\n")?;
        let [higher, lower] = self.rows();
        write_markdown_rows("higher peak of", &higher, out)?;
        write_markdown_rows("lower peak of", &lower, out)?;
        for line in self.lines() {
            writeln!(out, "> {}\n", escaped(&line))?;
        }
        writeln!(out, "{}", self.verdict(&escaped(&self.file)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

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
        let now = LinePeaks { all: now.iter().map(line).collect(), ..LinePeaks::default() };
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
        // The amount fell below 1 % of the new peak, and would have no line in a new file.
        let leak = [("a, device 0", 3000), ("a, device 0: x.py:1", 33)];
        let now = [("a, device 0", 5000, 0), ("a, device 0: x.py:3", 33, 50), ("a, device 0: x.py:80", 2000, 50)];
        let small = compared(&leak, &now);
        assert_eq!(small.moved, [["a, device 0: x.py:1", "a, device 0: x.py:3"]], "{small:?}");
        assert_eq!(small.changed.iter().map(|named| named.name.as_str()).collect::<Vec<_>>(), ["a, device 0"]);
        // A pool keeps driver memory unused. Without a pool, the device has the same line twice.
        for (before, least, grew) in [
            (&[("a, device 0", 64), ("a, device 0, driver's blocks", 64)][..], 0, 1),
            (&[("a, device 0", 64)], 0, 1),
            (&[("a, device 0", 64)], u64::MAX / MIB, 0),
            (&[("a, device 0", 64), ("a, device 0, driver's blocks", 64)], u64::MAX / MIB, 1),
        ] {
            let now = [("a, device 0", 64, 0), ("a, device 0, driver's blocks", 39_936, least)];
            let pool = compared(before, &now);
            assert_eq!((pool.higher.len(), pool.new.len(), pool.gone.len()), (grew, 0, 0), "{before:?} {pool:?}");
        }
        // The place is in another file and has a larger amount than before.
        let new = compared(
            &before,
            &[("a, device 0", 400, 0), ("a, device 0: y.py:1", 100, 4), ("a, device 0: x.py:11", 60, 4)],
        );
        assert_eq!(new.new.len(), 2, "{new:?}");
        assert_eq!(new.changed.len(), 2, "{new:?}");
        // A place that is barely large enough for a line is not new.
        let small =
            compared(&before[..1], &[("a, device 0", 200, 0), ("a, device 0: y.py:1", 4, 4), ("b, device 0", 1, 0)]);
        assert_eq!(small.new.iter().map(|new| new.name.as_str()).collect::<Vec<_>>(), ["b, device 0"], "{small:?}");
        assert_eq!(small.changed.len(), 1, "the device has less: {small:?}");
        let gone = compared(&before, &[("b, device 0", 0, 0)]);
        assert!(gone.is_exceeded() && gone.gone == ["a, device 0"], "{gone:?}");
        assert!(gone.changed.is_empty(), "its places are not known: {gone:?}");
    }
}
