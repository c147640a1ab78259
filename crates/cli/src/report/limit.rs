//! Compares recordings with limits, for `--max-peak` and `--fail-if`.

use std::{cmp::Reverse, collections::BTreeSet, fmt, path::Path, str::FromStr};

use clap::{ArgGroup, Args, ValueEnum};
use gpumem_core::{export::shortened, model::Bytes};
use gpumem_driver::settings::size;

use super::{
    annotations::{Annotations, Check, Finding},
    overview::Overview,
    place_peaks::{PlacePeak, place_peaks},
    together::Together,
};
use crate::{exit::Exit, failure::Failure, history::History};

/// The limits that a command is given.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("limits").args(["max_peak", "fail_if"]).multiple(true)))]
#[group(skip)]
pub(crate) struct Limits {
    /// Exit with 1 if the peak of a device was above SIZE, such as 20GiB, or may have been: the peak of one process, or of several together.
    /// Memory that an allocator keeps unused counts, and the driver's own memory does not. A limit such as 'train.py:31=2GiB' is for the
    /// place with this name in reports: its peak on a device, in one process or in several together. The option may be given several times.
    #[arg(long, value_name = "[PLACE=]SIZE")]
    max_peak: Vec<PeakLimit>,
    /// Exit with 1 if numbers may be wrong. `lost`: events, the end of a recording, or events before its start were lost. `unknown`: the program
    /// of a dry run read a value that was not computed.
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    fail_if: Vec<FailIf>,
    /// Report exceeded limits to CI: `github` marks the lines in a pull request, and `junit=FILE` writes a JUnit test report.
    #[arg(long, value_name = "FORMAT", requires = "limits")]
    annotations: Option<Annotations>,
}

/// At most this many misspelt places get suggestions, because searching for similar names takes a while.
const MOST_ADVISED: usize = 8;
const LISTS_PLACES: &str = "`gpumem report --table` lists the places";

/// Longer names are cut in messages.
const LONGEST: usize = 200;

/// A limit such as `20GiB` or `train.py:31=2GiB`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PeakLimit {
    place: Option<String>,
    most: Bytes,
}

impl FromStr for PeakLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (place, most) = text.rsplit_once('=').map_or((None, text), |(place, most)| (Some(place.trim()), most));
        if place == Some("") {
            return Err("write the name of a place before `=`, as reports have it".to_owned());
        }
        Ok(Self { place: place.map(str::to_owned), most: size(most)? })
    }
}

impl fmt::Display for PeakLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "the peak of `{place}` is at most {}", self.most),
            None => write!(f, "the peak is at most {}", self.most),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FailIf {
    Lost,
    Unknown,
}

/// Compares recordings with limits, one after another.
#[derive(Debug)]
pub(crate) struct Judge<'a> {
    limits: &'a Limits,
    checks: Vec<Check>,
    /// The places of all recordings, if a limit names one.
    places: BTreeSet<String>,
    /// The devices of all recordings, if there are limits.
    together: Together,
    is_measured: bool,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(limits: &'a Limits) -> Self {
        let (places, together) = (BTreeSet::new(), Together::default());
        Self { limits, checks: Vec::new(), places, together, is_measured: false }
    }

    /// Returns whether the user asked about losses. A loss is then the result of the command, and does not make this
    /// result doubtful.
    pub(crate) fn asks_for_losses(&self) -> bool {
        self.limits.fail_if.contains(&FailIf::Lost)
    }

    pub(crate) fn has_limits(&self) -> bool {
        !self.limits.max_peak.is_empty() || !self.limits.fail_if.is_empty()
    }

    pub(crate) fn add(&mut self, history: &History, overview: &Overview) {
        self.is_measured |= overview.devices.iter().any(|device| device.highest_bytes().is_some());
        let has_places = self.limits.max_peak.iter().any(|limit| limit.place.is_some());
        let peaks = if has_places { place_peaks(history, None) } else { Vec::new() };
        if !self.limits.max_peak.is_empty() {
            let has_limit =
                |peak: &&PlacePeak| self.limits.max_peak.iter().any(|limit| limit.place.as_ref() == Some(&peak.place));
            self.together.add(history, overview, &peaks.iter().filter(has_limit).cloned().collect::<Vec<_>>());
        }
        for limit in &self.limits.max_peak {
            let found = match &limit.place {
                None => of_devices(overview, limit.most),
                Some(place) => of_place(overview, &peaks, place, limit.most),
            };
            self.push(&overview.file, limit.to_string(), found);
        }
        self.places.extend(peaks.into_iter().map(|peak| peak.place));
        if self.asks_for_losses() {
            let mut lines = overview.missing.lost_in_words();
            lines.extend(overview.tensors_missing_in_words());
            let found = lines.into_iter().map(|line| Finding::new(format!("{}: {line}", overview.file))).collect();
            self.push(&overview.file, "nothing was lost".to_owned(), found);
        }
        if self.limits.fail_if.contains(&FailIf::Unknown) {
            let finding = |what: &str| Finding::new(format!("{}: {what}", overview.file));
            let found = match &overview.dry_run {
                Some(dry) if dry.unknown_values > 0 => vec![finding(&dry.in_words())],
                Some(_) => overview.missing.lost_in_words().iter().map(|line| finding(line)).collect(),
                None => vec![finding("it is not the recording of a dry run")],
            };
            self.push(&overview.file, "all values are known".to_owned(), found);
        }
    }

    /// Notes a recording that is empty or cannot be read. It is not known whether it keeps the limits.
    pub(crate) fn unknown(&mut self, file: &Path, why: &dyn fmt::Display) {
        if self.has_limits() {
            let file = file.display().to_string();
            let found = Finding::new(format!("{file}: its limits cannot be checked: {why}"));
            self.push(&file, "it is known".to_owned(), vec![found]);
        }
    }

    fn push(&mut self, of: &str, name: String, found: Vec<Finding>) {
        self.checks.push(Check { of: of.to_owned(), name, found });
    }

    /// Reports which limits were exceeded, or could not be checked.
    pub(crate) fn finish(mut self) -> Result<Exit, Failure> {
        if !self.has_limits() {
            return Ok(Exit::Done);
        }
        if !self.is_measured {
            let limits: Vec<_> = self.limits.max_peak.iter().map(|limit| limit.most.to_string()).collect();
            let of = if limits.is_empty() { String::new() } else { format!(" of the limit of {}", limits.join(", ")) };
            let found = Finding::new(format!("nothing was measured, so nothing is known{of}"));
            self.push("", "something was measured".to_owned(), vec![found]);
        }
        for limit in &self.limits.max_peak {
            let found = self.together.above(limit.place.as_deref(), limit.most)?;
            if !found.is_empty() {
                self.push("", format!("{limit}, of all processes together"), found);
            }
        }
        let named = self.limits.max_peak.iter().filter_map(|limit| limit.place.clone());
        // A misspelt limit would never be exceeded.
        let misspelt: BTreeSet<_> = named.filter(|place| self.is_measured && !self.places.contains(place)).collect();
        for (at, place) in misspelt.iter().enumerate() {
            let next = if at < MOST_ADVISED { nearest(&self.places, place) } else { LISTS_PLACES.to_owned() };
            let what = format!("--max-peak cannot be checked for `{}`", shortened(place, LONGEST));
            let failure = Failure::new(what, "no recording has such a place", next);
            self.push("", format!("`{place}` is a place"), vec![Finding::new(failure.to_string())]);
        }
        let is_exceeded = Annotations::publish(self.limits.annotations.as_ref(), &self.checks)?;
        Ok(match is_exceeded {
            _ if !misspelt.is_empty() => Exit::Failed,
            true => Exit::LimitExceeded,
            false => Exit::Done,
        })
    }
}

fn of_devices(overview: &Overview, limit: Bytes) -> Vec<Finding> {
    let Overview { file, devices, missing, .. } = overview;
    let above = devices.iter().filter_map(|device| {
        let peak = Bytes::new(device.highest_bytes().filter(|peak| *peak > limit.get())?);
        let more = Bytes::new(peak.get() - limit.get());
        let of = if device.driver_peak_bytes.is_some() { "the driver's blocks on device" } else { "device" };
        let text = format!("{file}: the peak of {of} {} was {peak}, {more} above the limit of {limit}", device.device);
        Some(Finding { text, place: device.most_at() })
    });
    let above: Vec<_> = above.collect();
    if !above.is_empty() || !missing.peak_may_be_higher() {
        return above;
    }
    let reasons = missing.in_words().join(" ");
    vec![Finding::new(format!("{file}: the peak may have been above the limit of {limit}. {reasons}"))]
}

fn of_place(overview: &Overview, peaks: &[PlacePeak], place: &str, limit: Bytes) -> Vec<Finding> {
    let Overview { file, missing, .. } = overview;
    let here = |text: String| Finding { text, place: Some(place.to_owned()) };
    let above = peaks.iter().filter(|peak| peak.place == place && peak.bytes > limit.get()).map(|peak| {
        let (most, more) = (Bytes::new(peak.bytes), Bytes::new(peak.bytes - limit.get()));
        let what = if peak.is_of_tensors { "tensors of " } else { "" };
        let device = peak.device;
        here(format!(
            "{file}: {what}`{place}` had {most} at most on device {device}, {more} above the limit of {limit}"
        ))
    });
    let above: Vec<_> = above.collect();
    let is_unknown = missing.peak_may_be_higher()
        || missing.has_only_peaks
        || !missing.contradictions.is_empty()
        || !overview.tensors_missing_in_words().is_empty();
    if !above.is_empty() || !is_unknown {
        return above;
    }
    let reasons = overview.missing_in_words().join(" ");
    vec![here(format!("{file}: the peak of `{place}` may have been above the limit of {limit}. {reasons}"))]
}

/// Suggests the most similar names for a place that is in no recording.
fn nearest(places: &BTreeSet<String>, place: &str) -> String {
    const MOST: usize = 3;
    /// Only this many names are compared letter by letter, and only this many letters at their ends, where the names of
    /// places differ.
    const MOST_COMPARED: usize = 1_000;
    const LETTERS: usize = 100;
    let end = |name: &str| name.chars().rev().take(LETTERS).collect::<String>();
    let requested = end(place);
    let same = |a: &str, b: &str| a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    let mut near: Vec<_> = places.iter().map(|name| (name, end(name))).collect();
    near.sort_by_cached_key(|(name, end)| Reverse(same(end, &requested).max(same(name, place).min(LETTERS))));
    near.truncate(MOST_COMPARED);
    let similar = |(name, end): (&'_ String, String)| {
        (strsim::normalized_damerau_levenshtein(&end, &requested), shortened(name, LETTERS))
    };
    let mut near: Vec<_> = near.into_iter().map(similar).collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let near: Vec<_> = near.iter().take(MOST).map(|(_, name)| format!("`{name}`")).collect();
    match near.as_slice() {
        [] => LISTS_PLACES.to_owned(),
        _ => format!("{LISTS_PLACES}, such as {}", near.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_of_a_device_or_of_a_place() {
        let limit = |place: Option<&str>| PeakLimit { place: place.map(str::to_owned), most: Bytes::gib(2) };
        for (text, place) in
            [("2GiB", None), ("train.py:31=2GiB", Some("train.py:31")), ("f<T=u8> = 2 GiB", Some("f<T=u8>"))]
        {
            assert_eq!(text.parse(), Ok(limit(place)), "{text}");
        }
        for text in ["", "=2GiB", "train.py:31", "train.py:31=", "train.py:31=2"] {
            assert!(text.parse::<PeakLimit>().is_err(), "{text}");
        }
    }

    /// Comparing each letter with each other letter would take minutes and gigabytes.
    #[test]
    fn long_names_cost_little() {
        let name = |number: usize| format!("{}:{number}", "x".repeat(20_000));
        let places: BTreeSet<_> = (0..500).map(name).chain(["src/model.rs:42".to_owned()]).collect();
        let near = nearest(&places, &"y".repeat(100_000));
        assert!(near.len() < 1_000, "{near}");
        assert!(nearest(&places, "model.rs:42").contains("such as `src/model.rs:42`, "));
        // Long names are distinguished by their ends.
        assert!(nearest(&places, &format!("y{}:123", "x".repeat(20_000))).contains("x:123`, "));
    }
}
