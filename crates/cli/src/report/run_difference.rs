//! The difference between the peaks of two runs of several processes, for `gpumem diff before/ after/`.

use std::{
    cmp::Reverse,
    io::{self, Write},
    path::{Path, PathBuf},
};

use gpumem_core::{
    export::{Paint, Role, shortened_command},
    model::Bytes,
    report::counted,
};
use serde::Serialize;

use super::{
    annotations::Check,
    change::{
        Change, Limit, MARKDOWN_TITLE, Named, check, escaped, signed, verdict, write_markdown_rows, write_rows,
        write_verdict,
    },
    difference::{Difference, peaks_of},
    json,
    overview::{DeviceOverview, Overview},
    together::{SharedPeak, Together},
};
use crate::{failure::Failure, history::History};

/// The difference between two runs. The field names are those in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct RunDifference {
    pub(crate) before: String,
    pub(crate) after: String,
    /// The sum of all peaks that have a partner.
    pub(crate) sum: Change,
    /// The peaks that have a partner, the one that grew most first.
    pub(crate) peaks: Vec<RankDifference>,
    /// The peaks of devices that several processes have used, of all these processes together.
    pub(crate) together: Vec<Named>,
    pub(crate) only_before: Vec<RankPeak>,
    pub(crate) only_after: Vec<RankPeak>,
    pub(crate) limit: Option<Limit>,
    /// `None` without a limit, and if a peak is not known or has no partner.
    pub(crate) is_exceeded: Option<bool>,
    /// Why a comparison is meaningless.
    pub(crate) not_measured: Vec<String>,
    /// The recordings that contain no events.
    pub(crate) empty: Vec<String>,
    /// The two recordings of the peak that grew most, or shrank most if none grew.
    pub(crate) worst: Option<Difference>,
}

#[derive(Debug, Serialize)]
pub(crate) struct RankDifference {
    #[serde(serialize_with = "json::path")]
    pub(crate) before_file: PathBuf,
    #[serde(serialize_with = "json::path")]
    pub(crate) after_file: PathBuf,
    rank: Option<u64>,
    device: u32,
    #[serde(flatten)]
    named: Named,
    /// The driver blocks, including the memory that pools keep unused. `None` if neither side has a registered pool.
    driver: Option<Change>,
}

/// The peak of a device in one recording.
#[derive(Debug, Serialize)]
pub(crate) struct RankPeak {
    #[serde(serialize_with = "json::path")]
    file: PathBuf,
    rank: Option<u64>,
    device: u32,
    simulated: bool,
    command: Vec<String>,
    peak_bytes: u64,
    #[serde(skip)]
    of_device: DeviceOverview,
}

/// The peaks of one run, why some of them are not known, and the recordings that contain no events.
#[derive(Debug, Default)]
pub(crate) struct Run {
    peaks: Vec<RankPeak>,
    together: Together,
    not_measured: Vec<String>,
    /// Why the peaks may be higher.
    may_be_higher: Vec<String>,
    empty: Vec<String>,
}

impl Run {
    pub(crate) fn add_empty(&mut self, file: &Path, why: &str) {
        self.empty.push(format!("{}: Nothing is recorded: {why}.", file.display()));
    }

    pub(crate) fn add(&mut self, file: &Path, history: &History, overview: &Overview) {
        if let Some(why) = overview.why_empty() {
            return self.add_empty(file, why);
        }
        let Overview { command, rank, devices, missing, .. } = overview;
        if missing.leaves_peak_unknown() {
            self.not_measured.extend(overview.missing_with_file());
        } else if missing.peak_may_be_higher() {
            self.may_be_higher.extend(overview.missing_with_file());
        }
        self.together.add(history, overview, &[]);
        for device in devices {
            if device.highest_bytes().is_none() {
                continue;
            }
            // Only its peaks are kept.
            let (peak_bytes, driver_peak_bytes) = (device.peak_bytes, device.driver_peak_bytes);
            let of_device = DeviceOverview { peak_bytes, driver_peak_bytes, ..DeviceOverview::default() };
            let (file, rank, command) = (file.to_owned(), *rank, command.clone());
            let (device, simulated, peak_bytes) = (device.device, device.simulated, peak_bytes.unwrap_or(0));
            self.peaks.push(RankPeak { file, rank, device, simulated, command, peak_bytes, of_device });
        }
    }
}

impl RankPeak {
    /// Returns a name such as `rank 3, device 0`.
    fn words(&self) -> String {
        const MOST: usize = 40;
        let simulated = if self.simulated { "simulated " } else { "" };
        let process = match self.rank {
            Some(rank) => format!("rank {rank}"),
            None => shortened_command(&self.command.join(" "), MOST),
        };
        format!("{process}, {simulated}device {}", self.device)
    }

    /// Returns whether this is the same peak in another run, where the process has another id.
    fn is_partner_of(&self, other: &Self, has_other_command: bool) -> bool {
        let of_device = |peak: &Self| (peak.rank, peak.simulated, peak.device);
        let has_its_command = if has_other_command { self.rank.is_some() } else { self.command == other.command };
        of_device(self) == of_device(other) && has_its_command
    }

    fn compared_with(self, after: Self) -> RankDifference {
        let (change, driver) = peaks_of([Some(&self.of_device), Some(&after.of_device)]);
        let named = Named::new(after.words(), change);
        let (rank, device) = (after.rank, after.device);
        RankDifference { before_file: self.file, after_file: after.file, rank, device, named, driver }
    }

    fn alone_in(&self, side: &str) -> String {
        let (file, peak) = (self.file.display(), Bytes::new(self.peak_bytes));
        format!("Only in {side}: {} ({file}), with a peak of {peak}.", self.words())
    }
}

impl RankDifference {
    /// Returns the peaks that have a limit.
    fn rows(&self) -> impl Iterator<Item = Named> {
        let driver = self.driver.map(|driver| Named::new(format!("{}, driver's blocks", self.named.name), driver));
        [self.named.clone()].into_iter().chain(driver)
    }
}

/// Compares the peaks of the devices that several processes have used, in a run before and after. Also returns the
/// devices whose peaks are not known.
fn together([mut before, after]: [Vec<SharedPeak>; 2]) -> (Vec<Named>, Vec<String>) {
    let (mut compared, mut unknown) = (Vec::new(), Vec::new());
    for after in after {
        let Some(at) = before.iter().position(|before| before.device == after.device) else { continue };
        let before = before.remove(at);
        let name = format!("device {}, all processes together", after.device);
        if !before.is_certain || !after.is_certain {
            unknown.push(format!("{name}: the recordings do not show how much memory they held at the same time."));
        } else if before.processes.max(after.processes) > 1 {
            compared.push(Named::new(name, Change::new(signed(before.bytes), signed(after.bytes))));
        }
    }
    (compared, unknown)
}

impl RunDifference {
    /// Compares two runs with these names.
    ///
    /// # Errors
    /// Returns an error if a recording cannot be read again.
    pub(crate) fn of(names: [String; 2], [before, after]: [Run; 2], limit: Option<Limit>) -> Result<Self, Failure> {
        let (together, together_unknown) = together([before.together.peaks()?, after.together.peaks()?]);
        let (mut only_before, mut only_after, mut peaks) = (before.peaks, after.peaks, Vec::new());
        // Processes without a rank may have the same command. They are then paired by their peaks, the highest first.
        for peaks in [&mut only_before, &mut only_after] {
            peaks.sort_by_key(|peak| peak.rank.is_none().then_some(Reverse(peak.peak_bytes)));
        }
        // The command of a rank may differ between the runs, for example in the learning rate.
        for has_other_command in [false, true] {
            for after in std::mem::take(&mut only_after) {
                match only_before.iter().position(|before| before.is_partner_of(&after, has_other_command)) {
                    Some(at) => peaks.push(only_before.remove(at).compared_with(after)),
                    None => only_after.push(after),
                }
            }
        }
        peaks.sort_by_key(|peak| Reverse(peak.named.change.bytes));
        let mut not_measured = [before.not_measured, after.not_measured].concat();
        let empty = [before.empty, after.empty].concat();
        if peaks.is_empty() {
            let [before, after] = &names;
            not_measured.push(format!("{before} and {after} have no peak of the same rank, device and command."));
        }
        let grows = |limit| {
            let mut rows = peaks.iter().flat_map(RankDifference::rows).chain(together.iter().cloned());
            rows.any(|named| named.change.exceeds(limit))
        };
        let is_exceeded = |limit| match grows(limit) {
            false if !only_before.is_empty() || !only_after.is_empty() || !empty.is_empty() => None,
            is_exceeded => Some(is_exceeded),
        };
        let mut is_exceeded = limit.filter(|_| not_measured.is_empty()).and_then(is_exceeded);
        // As for two recordings, snapshots whose histories start late are compared with each other.
        if is_exceeded == Some(false) && before.may_be_higher.is_empty() && !after.may_be_higher.is_empty() {
            not_measured = after.may_be_higher;
            is_exceeded = None;
        }
        if is_exceeded == Some(false) && !together_unknown.is_empty() {
            not_measured = together_unknown;
            is_exceeded = None;
        }
        let [before, after] = names;
        let sum = |of: fn(&Change) -> i64| peaks.iter().map(|peak| of(&peak.named.change)).sum();
        Ok(Self {
            sum: Change::new(sum(|change| change.before), sum(|change| change.after)),
            is_exceeded,
            before,
            after,
            peaks,
            together,
            only_before,
            only_after,
            limit,
            not_measured,
            empty,
            worst: None,
        })
    }

    /// Returns a check for each peak.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let of = |peak: &RankDifference| {
            let file = peak.after_file.display().to_string();
            peak.rows().map(|named| check(&file, &named.name, named.change, self.limit, None)).collect::<Vec<_>>()
        };
        let of_all = self.together.iter().map(|named| check(&self.after, &named.name, named.change, self.limit, None));
        self.peaks.iter().flat_map(of).chain(of_all).collect()
    }

    /// Returns why not all peaks can be compared.
    pub(crate) fn alone(&self) -> Vec<String> {
        let before = self.only_before.iter().map(|peak| peak.alone_in(&self.before));
        let after = self.only_after.iter().map(|peak| peak.alone_in(&self.after));
        before.chain(after).chain(self.empty.iter().cloned()).collect()
    }

    /// Returns the rows: the sum, the peaks of all processes together, and the peaks.
    fn rows(&self) -> Vec<Named> {
        let sum = Named::new(format!("sum of {}", self.peaks.len()), self.sum);
        let sum = (self.peaks.len() > 1).then_some(sum);
        let peaks = self.peaks.iter().flat_map(RankDifference::rows);
        sum.into_iter().chain(self.together.iter().cloned()).chain(peaks).collect()
    }

    fn heading(&self) -> String {
        let compared = counted(self.peaks.len() as u64, "peak", "peaks");
        let grown = self.peaks.iter().filter(|peak| peak.named.change.bytes > 0).count();
        format!("{compared} compared, of which {grown} grew; their sum: {}", self.sum.in_words())
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        writeln!(out, "{}", paint.on(Role::Heading, format!("{} → {}", self.before, self.after)))?;
        writeln!(out, "{}", self.heading())?;
        write_rows("peak of", &self.rows(), out, paint)?;
        let alone = self.alone();
        if !alone.is_empty() {
            writeln!(out)?;
        }
        for line in alone.iter().chain(&self.not_measured) {
            writeln!(out, "{}", paint.on(Role::Alarm, line))?;
        }
        if let Some(worst) = &self.worst {
            writeln!(out, "\n{}", paint.on(Role::Heading, format!("{}:", self.about_worst())))?;
            worst.write(out, paint)?;
        }
        write_verdict(self.limit, self.is_exceeded, out, paint)
    }

    /// Returns the peak that grew most, or shrank most if none grew. `None` if none changed.
    pub(crate) fn changed_most(&self) -> Option<&RankDifference> {
        let grew = self.peaks.first().filter(|peak| peak.named.change.bytes > 0);
        grew.or_else(|| self.peaks.last().filter(|peak| peak.named.change.bytes < 0))
    }

    fn about_worst(&self) -> String {
        let Some(RankDifference { named, .. }) = self.changed_most() else { return String::new() };
        let did = if named.change.bytes > 0 { "grew" } else { "shrank" };
        format!("the peak that {did} most: {}", named.name)
    }

    /// Writes Markdown tables for a comment on a pull request.
    pub(crate) fn write_markdown(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{MARKDOWN_TITLE}\n\n{}\n", self.heading())?;
        write_markdown_rows("peak of", &self.rows(), out)?;
        for line in self.alone().iter().chain(&self.not_measured) {
            writeln!(out, "> {}\n", escaped(line))?;
        }
        if let Some(worst) = &self.worst {
            writeln!(out, "#### {}\n", escaped(&self.about_worst()))?;
            worst.write_markdown_tables(out)?;
        }
        match verdict(self.limit, self.is_exceeded) {
            Some(verdict) => writeln!(out, "{verdict}"),
            None => Ok(()),
        }
    }
}
