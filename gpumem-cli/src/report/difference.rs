//! The difference between the peaks of two recordings, by scope, place, library and kind of memory, for `gpumem diff`.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    io::{self, Write},
    str::FromStr,
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::{ByteDelta, Bytes, one_line},
    recording::TensorClass,
};
use serde::{Serialize, Serializer};

use super::{
    annotations::{Check, Finding},
    modules::{ClassSum, ModuleSum},
    overview::{DeviceOverview, Missing, Overview},
    sums::{NO_LINE, PlaceSum},
    tensors::TensorsOverview,
};
use gpumem_driver::settings::size;

/// At most this many rows of a table are printed; JSON has all.
const MOST_ROWS: usize = 20;

/// The allowed increase of a peak, such as `5%` or `100MiB`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    Percent(f64),
    Bytes(Bytes),
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || "write a share such as 5%, or an amount such as 100MiB".to_owned();
        if let Some(percent) = text.trim().strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|_| refused())?;
            return if percent.is_finite() && percent >= 0.0 { Ok(Self::Percent(percent)) } else { Err(refused()) };
        }
        // `5` is no size. It most likely means 5 %.
        size(text).map(Self::Bytes).map_err(|_| refused())
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent} %"),
            Self::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Limit {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "a share is no exact figure, and it is not negative"
    )]
    pub(super) fn of(self, whole: u64) -> u64 {
        match self {
            Self::Percent(percent) => (whole as f64 * percent / 100.0) as u64,
            Self::Bytes(bytes) => bytes.get(),
        }
    }
}

/// The difference of two recordings. The names of the fields are those in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Difference {
    pub(crate) before: Side,
    pub(crate) after: Side,
    pub(crate) devices: Vec<DeviceDifference>,
    /// The reasons why tensors of PyTorch are not compared or are incomplete. Empty if neither recording has tensors.
    pub(crate) tensors_missing: Vec<String>,
    pub(crate) limit: Option<Limit>,
    /// `None` without a limit, and if the peaks are not known.
    pub(crate) is_exceeded: Option<bool>,
    /// The reason why a comparison says nothing.
    pub(crate) not_measured: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Side {
    pub(crate) file: String,
    pub(crate) missing: Missing,
}

/// The peaks of one device.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceDifference {
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    #[serde(flatten)]
    pub(crate) peak: Change,
    pub(crate) by_scope: Vec<Named>,
    pub(crate) by_place: Vec<Named>,
    pub(crate) by_library: Vec<Named>,
    pub(crate) by_kind: Vec<Named>,
    /// The tensors of PyTorch, if both recordings have them.
    pub(crate) tensors: Option<TensorsDifference>,
}

/// The peak of tensors on one device. They are a part of the device's memory. An estimate counts only tensors.
#[derive(Debug, Serialize)]
pub(crate) struct TensorsDifference {
    #[serde(flatten)]
    pub(crate) peak: Change,
    /// If one side is an estimate, these are the classes of estimates. The list is empty if a recording has no classes.
    pub(crate) by_class: Vec<Named>,
    /// The list is empty if a recording has no modules.
    pub(crate) by_module: Vec<Named>,
    /// The list is empty if one side is an estimate, which has no lines.
    pub(crate) by_place: Vec<Named>,
}

/// The bytes of a row at the peak before, and at the peak after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Change {
    #[serde(rename = "before_bytes")]
    pub(crate) before: i64,
    #[serde(rename = "after_bytes")]
    pub(crate) after: i64,
    #[serde(rename = "change_bytes")]
    pub(crate) bytes: i64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Named {
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) change: Change,
}

impl Change {
    pub(super) fn new(before: i64, after: i64) -> Self {
        Self { before, after, bytes: after.saturating_sub(before) }
    }

    /// Returns whether the increase is above the limit.
    pub(super) fn exceeds(self, limit: Limit) -> bool {
        let [before, after] = [self.before, self.after].map(i64::unsigned_abs);
        after.saturating_sub(before) > limit.of(before)
    }

    /// Returns a text such as `+66 MiB (+5.3 %)`.
    #[expect(clippy::cast_precision_loss, reason = "a share is no exact figure")]
    pub(super) fn in_words(self) -> String {
        let Self { before, bytes, .. } = self;
        let sign = if bytes > 0 { "+" } else { "" };
        let amount = ByteDelta::new(bytes);
        if bytes == 0 {
            return "no change".to_owned();
        }
        if before == 0 {
            return format!("{sign}{amount}");
        }
        format!("{sign}{amount} ({:+.1} %)", bytes as f64 * 100.0 / before as f64)
    }
}

type Name = fn(&PlaceSum) -> String;

const BY: [(&str, Name); 4] = [
    ("scope", |sum| if sum.scope.is_empty() { "outside of all scopes".to_owned() } else { sum.scope.join(" > ") }),
    ("place", |sum| sum.place.clone()),
    ("library", PlaceSum::library_or_program),
    ("kind", |sum| sum.kind.to_owned()),
];

/// Compares the places at the peak before with those at the peak after.
fn by_name(sides: [&[PlaceSum]; 2], name: Name) -> Vec<Named> {
    named(sides.map(|side| side.iter().map(move |sum| (name(sum), sum.bytes))))
}

fn named<S: Into<String>>(sides: [impl IntoIterator<Item = (S, i64)>; 2]) -> Vec<Named> {
    let mut sums: BTreeMap<String, [i64; 2]> = BTreeMap::new();
    for (at, side) in sides.into_iter().enumerate() {
        for (name, bytes) in side {
            sums.entry(name.into()).or_default()[at] += bytes;
        }
    }
    let named = |(name, [before, after]): (String, [i64; 2])| Named { name, change: Change::new(before, after) };
    let mut all: Vec<_> = sums.into_iter().map(named).collect();
    all.sort_by_key(|named| {
        (std::cmp::Reverse(named.change.bytes.unsigned_abs()), std::cmp::Reverse(named.change.after))
    });
    all
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
            // All its blocks are tensors, and their libraries are classes.
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
    /// `None` if a recording has no tensors. A device without tensors has 0 bytes.
    fn of(sides: [&Overview; 2], device: u32) -> Option<Self> {
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
        let line = |sum: &PlaceSum| sum.line.clone().unwrap_or_else(|| NO_LINE.to_owned());
        Some(Self {
            peak: Change::new(before.bytes, after.bytes),
            by_class: if_both(before.classes, after.classes),
            by_module: if_both(before.modules, after.modules),
            by_place: if has_estimate { Vec::new() } else { by_name([before.places, after.places], line) },
        })
    }

    /// Returns the tables, each with the name of its rows.
    fn all(&self) -> [(&'static str, &[Named]); 3] {
        [("used for", &self.by_class), ("module", &self.by_module), ("tensors at", &self.by_place)]
    }

    /// The reasons why tensors are not compared or are incomplete.
    fn missing(sides: [&Overview; 2]) -> Vec<String> {
        let mut lines = Vec::new();
        let [has, has_not] = [true, false].map(|has| sides.iter().find(|side| side.has_tensors() == has));
        if let (Some(has), Some(has_not)) = (has, has_not.filter(|side| !side.is_estimate())) {
            lines.push(format!(
                "Tensors of PyTorch are not compared: {} has them, {} does not (gpumem run --torch).",
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

/// An estimate counts temporary tensors as activations, and what the allocator adds for itself.
fn classes_of_estimates(sums: &[ClassSum]) -> Sums {
    let temporary = [TensorClass::ForwardTemporary, TensorClass::BackwardTemporary, TensorClass::Temporary];
    let temporary = temporary.map(TensorClass::name);
    let class = |sum: &ClassSum| {
        let name = if temporary.contains(&sum.class) { TensorClass::Activations.name() } else { sum.class };
        [(name, sum.requested_bytes), ("rounding", sum.bytes - sum.requested_bytes)]
    };
    sums.iter().flat_map(class).map(|(name, bytes)| (name.to_owned(), signed(bytes))).collect()
}

pub(super) fn signed(bytes: u64) -> i64 {
    Bytes::new(bytes).signed()
}

/// Returns the sentence about a limit at the end.
pub(super) fn verdict(limit: Option<Limit>, is_exceeded: Option<bool>) -> Option<String> {
    let limit = limit?;
    Some(match is_exceeded {
        Some(true) => format!("The peak increased by more than {limit}."),
        Some(false) => format!("The peak did not increase by more than {limit}."),
        None => format!("Whether the peak increased by more than {limit} is not known."),
    })
}

/// A peak that was compared with that of `of`. `place` is the place that grew.
pub(super) fn check(of: &str, words: &str, peak: Change, limit: Option<Limit>, place: Option<String>) -> Check {
    let limit = limit.unwrap_or(Limit::Percent(0.0));
    let [before, after] = [peak.before, peak.after].map(ByteDelta::new);
    let text = format!("{of}: the peak of {words} was {before} and is {after}: {}, more than {limit}", peak.in_words());
    let found = peak.exceeds(limit).then_some(Finding { text, place });
    let name = format!("the peak of {words} increases by at most {limit}");
    Check { of: of.to_owned(), name, found: found.into_iter().collect() }
}

impl Difference {
    pub(crate) fn of(before: Overview, after: Overview, limit: Option<Limit>) -> Self {
        let mut not_measured = Vec::new();
        for side in [&before, &after] {
            let is_unknown = side.missing.leaves_peak_unknown();
            if is_unknown {
                not_measured.extend(side.missing.in_words().into_iter().map(|line| format!("{}: {line}", side.file)));
            } else if side.busiest().is_none() {
                not_measured.push(format!("{}: Nothing was allocated.", side.file));
            }
        }
        // An estimate has simulated devices: they stand for those of the other side.
        let are_simulated = |overview: &Overview| overview.devices.iter().all(|device| device.simulated);
        let has_estimate = are_simulated(&before) != are_simulated(&after);
        let used = |overview: &Overview| -> Vec<(bool, u32)> {
            let used = overview.devices.iter().filter(|device| device.peak_bytes.is_some());
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
                let tensors = TensorsDifference::of([&before, &after], device).filter(|_| !simulated);
                let mut tables = BY.map(|(_, name)| by_name(places, name));
                // The blocks of an estimate are compared with tensors, and not with what the driver gave.
                if tensors.is_some() && has_estimate {
                    tables.iter_mut().for_each(Vec::clear);
                }
                let [by_scope, mut by_place, by_library, by_kind] = tables;
                // The same place would have another name on the other side.
                if before.missing.symbols != after.missing.symbols {
                    by_place.clear();
                }
                let peaks = sides.map(|side| side.and_then(|side| side.peak_bytes).map_or(0, signed));
                let peak = Change::new(peaks[0], peaks[1]);
                DeviceDifference { device, simulated, peak, by_scope, by_place, by_library, by_kind, tensors }
            })
            .collect();
        let is_exceeded = |limit| devices.iter().any(|device| device.peak.exceeds(limit));
        Self {
            is_exceeded: limit.filter(|_| not_measured.is_empty()).map(is_exceeded),
            limit,
            tensors_missing: TensorsDifference::missing([&before, &after]),
            before: Side { file: before.file, missing: before.missing },
            after: Side { file: after.file, missing: after.missing },
            devices,
            not_measured,
        }
    }

    /// Snapshots of PyTorch lack these data. The peak is compared all the same.
    fn notes(&self) -> Vec<String> {
        let snapshots = [&self.before, &self.after].into_iter().filter(|side| side.missing.has_only_pytorch);
        let in_words = |side: &Side| (side.file.clone(), side.missing.in_words());
        let mut notes: Vec<_> = snapshots.filter(|_| self.not_measured.is_empty()).map(in_words).collect();
        notes.dedup();
        notes.iter().flat_map(|(file, lines)| lines.iter().map(move |line| format!("{file}: {line}"))).collect()
    }

    /// Returns a checked limit for each device.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let check = |device: &DeviceDifference| {
            let place = device.by_place.first().filter(|place| place.change.bytes > 0).map(|place| place.name.clone());
            check(&self.after.file, &device.words(), device.peak, self.limit, place)
        };
        self.devices.iter().map(check).collect()
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        writeln!(out, "{}", paint.on(Role::Heading, format!("{} → {}", self.before.file, self.after.file)))?;
        for device in &self.devices {
            let words = device.words();
            let [before, after] = [device.peak.before, device.peak.after].map(ByteDelta::new);
            writeln!(out, "{words}: the peak was {before} and is {after}: {}", device.peak.in_words())?;
            for ((by, _), all) in BY.iter().zip(device.all()) {
                write_rows(by, all, out, paint)?;
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

    /// Writes tables in Markdown, for a comment on a pull request.
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
            let [before, after] = [device.peak.before, device.peak.after].map(ByteDelta::new);
            writeln!(out, "Peak of {}: {before} → **{after}**, {}\n", device.words(), device.peak.in_words())?;
            for ((by, _), all) in BY.iter().zip(device.all()) {
                write_markdown_rows(by, all, out)?;
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

/// The heading of the text for a pull request.
pub(super) const MARKDOWN_TITLE: &str = "### GPU memory";

pub(super) fn write_verdict(
    limit: Option<Limit>,
    is_exceeded: Option<bool>,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let Some(verdict) = verdict(limit, is_exceeded) else { return Ok(()) };
    let role = if is_exceeded == Some(false) { Role::Text } else { Role::Alarm };
    writeln!(out, "\n{}", paint.on(role, verdict))
}

fn changed(all: &[Named]) -> Vec<&Named> {
    all.iter().filter(|named| named.change.bytes != 0).collect()
}

/// Writes a table of the changes, if there are any.
pub(super) fn write_rows(by: &str, all: &[Named], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let changed = changed(all);
    if changed.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", InPaint(&Rows { by, rows: &changed[..changed.len().min(MOST_ROWS)] }, paint))?;
    if changed.len() > MOST_ROWS {
        writeln!(out, "({} more; --json has all)", changed.len() - MOST_ROWS)?;
    }
    Ok(())
}

pub(super) fn write_markdown_rows(by: &str, all: &[Named], out: &mut dyn Write) -> io::Result<()> {
    let changed = changed(all);
    if changed.is_empty() {
        return Ok(());
    }
    writeln!(out, "| {by} | before | after | change |\n|---|---:|---:|---:|")?;
    for Named { name, change } in changed.iter().take(MOST_ROWS) {
        let [before, after] = [change.before, change.after].map(ByteDelta::new);
        writeln!(out, "| {} | {before} | {after} | {} |", escaped(name), change.in_words())?;
    }
    if changed.len() > MOST_ROWS {
        writeln!(out, "| {} more | | | |", changed.len() - MOST_ROWS)?;
    }
    writeln!(out)
}

/// Returns a text for a cell of a table in Markdown. It is code, so that no character has a meaning.
pub(super) fn escaped(text: &str) -> String {
    let text = one_line(text);
    if !text.is_empty() && !text.contains(['|', '`']) {
        return format!("`{text}`");
    }
    // Readers of Markdown disagree about the end of a cell that has these characters between backticks.
    let mut cell = "<code>".to_owned();
    for c in text.chars() {
        if c.is_ascii_punctuation() {
            let _ = write!(cell, "&#{};", u32::from(c));
        } else {
            cell.push(c);
        }
    }
    cell + "</code>"
}

impl DeviceDifference {
    fn all(&self) -> [&[Named]; 4] {
        [&self.by_scope, &self.by_place, &self.by_library, &self.by_kind]
    }

    fn words(&self) -> String {
        format!("{}device {}", if self.simulated { "simulated " } else { "" }, self.device)
    }
}

struct Rows<'a> {
    by: &'a str,
    rows: &'a [&'a Named],
}

impl Show for Rows<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let figures = |named: &&Named| [named.change.before, named.change.after, named.change.bytes];
        let amounts = Amounts::of(self.rows.iter().flat_map(figures));
        let mut table = Table::new()
            .column(self.by, Fit::LeftCutFront)
            .amounts("before", amounts)
            .amounts("after", amounts)
            .amounts("change", amounts);
        for named in self.rows {
            let [before, after, change] = figures(named);
            let (sign, role) = if change > 0 { ("+", Role::Less) } else { ("", Role::More) };
            let change = Cell::from(format!("{sign}{}", amounts.show(change))).role(role);
            table.row([Cell::from(&named.name), amounts.show(before).into(), amounts.show(after).into(), change]);
        }
        table.show(f, paint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_shares_and_amounts() {
        assert_eq!("5%".parse(), Ok(Limit::Percent(5.0)));
        assert_eq!(" 0.5 % ".parse(), Ok(Limit::Percent(0.5)));
        assert_eq!("100MiB".parse(), Ok(Limit::Bytes(Bytes::mib(100))));
        assert_eq!("0".parse(), Ok(Limit::Bytes(Bytes::ZERO)));
        for text in ["", "%", "-1%", "five", "inf%", "nan%", "-1MiB", "5", "0.5"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_limit_itself_is_not_exceeded() {
        for (limit, before, after, is_exceeded) in [
            ("5%", 100, 105_u64, false),
            ("5%", 100, 106, true),
            ("0%", 100, 100, false),
            ("0%", 100, 101, true),
            ("5%", 100, 50, false),
            ("5%", 0, 0, false),
            ("5%", 0, 1, true),
            ("1KiB", 0, 1024, false),
            ("1KiB", 0, 1025, true),
        ] {
            let limit: Limit = limit.parse().unwrap();
            let change = Change::new(before, signed(after));
            assert_eq!(change.exceeds(limit), is_exceeded, "{limit} {before} {after}");
        }
    }
}
