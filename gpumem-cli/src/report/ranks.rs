//! Several recordings side by side, such as those of the ranks of one run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    io::{self, Write},
    path::Path,
    time::Duration,
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table, shortened},
    model::one_line,
};

use unicode_width::UnicodeWidthStr;

use super::{
    overview::{DeviceOverview, Overview},
    refused::Refused,
};
use crate::history::in_words;

/// At most this many places are compared.
const MOST_PLACES: usize = 15;

pub(crate) fn write(overviews: &[Overview], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    for (overview, name) in overviews.iter().zip(names(overviews)) {
        for line in overview.refused.iter().flat_map(Refused::in_words) {
            writeln!(out, "{}", paint.on(Role::Alarm, format!("{name}: {line}")))?;
        }
    }
    if overviews.iter().any(|overview| overview.refused.is_some()) {
        writeln!(out)?;
    }
    writeln!(out, "{}", paint.on(Role::Heading, format!("{} recordings, the peak of each", overviews.len())))?;
    if let Some(cards) = overviews.iter().find_map(|overview| overview.cards.as_ref()) {
        writeln!(out, "{}", one_line(cards))?;
    }
    writeln!(out, "{}", InPaint(&Peaks(overviews), paint))?;
    let places = places(overviews);
    if !places.is_empty() {
        writeln!(out, "\n{}", paint.on(Role::Heading, "at the peaks, by scope and place"))?;
        writeln!(out, "{}", InPaint(&RankPlaces { places: &places, names: &names(overviews) }, paint))?;
    }
    let missing: Vec<_> = overviews
        .iter()
        .zip(names(overviews))
        .flat_map(|(overview, name)| overview.missing_in_words().into_iter().map(move |line| format!("{name}: {line}")))
        .collect();
    if !missing.is_empty() {
        writeln!(out)?;
    }
    missing.iter().try_for_each(|line| writeln!(out, "{}", paint.on(Role::Alarm, line)))
}

/// The names of the files, as short as they can be told apart.
fn names(overviews: &[Overview]) -> Vec<String> {
    let files: Vec<_> = overviews.iter().map(|overview| Path::new(&overview.file)).collect();
    let short = |file: &Path| file.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let all: std::collections::BTreeSet<_> = files.iter().map(|file| short(file)).collect();
    let is_clear = all.len() == files.len();
    files.iter().map(|file| if is_clear { short(file) } else { file.display().to_string() }).collect()
}

/// Names for headings, in so many columns. If one of them is longer, they have what tells them apart: `rank0`, `rank1` of
/// `train.rank0.gpu0.pid4711` and `train.rank1.gpu1.pid4712`.
fn headings(names: &[String], room: usize) -> Vec<String> {
    let cut = |name: &String| shortened(name, room);
    if names.iter().all(|name| name.width() <= room) {
        return names.iter().map(cut).collect();
    }
    let parts: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    // The first part that tells all of them apart: the rank comes first.
    let part = |at: usize| parts.iter().map(move |parts| parts.get(at).or(parts.last()).copied().unwrap_or_default());
    let is_clear = |at: &usize| part(*at).collect::<BTreeSet<_>>().len() == names.len();
    match (0..parts.iter().map(Vec::len).max().unwrap_or(0)).find(is_clear) {
        Some(at) => part(at).map(|part| cut(&part.to_owned())).collect(),
        None => names.iter().map(cut).collect(),
    }
}

fn signed(bytes: u64) -> i64 {
    bytes.try_into().unwrap_or(i64::MAX)
}

struct Peaks<'a>(&'a [Overview]);

impl Show for Peaks<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let rows: Vec<(String, &Overview, Option<&DeviceOverview>)> = names(self.0)
            .into_iter()
            .zip(self.0)
            .flat_map(|(name, overview)| {
                let used: Vec<_> = overview.devices.iter().filter(|device| device.peak_bytes.is_some()).collect();
                let used = if used.is_empty() { vec![None] } else { used.into_iter().map(Some).collect() };
                used.into_iter().map(move |device| (name.clone(), overview, device))
            })
            .collect();
        let figures =
            |device: &&DeviceOverview| [signed(device.peak_bytes.unwrap_or(0)), signed(device.live_at_end_bytes)];
        let tensors = |overview: &Overview, device: &DeviceOverview| overview.tensors_peak(device.device);
        let has_tensors =
            rows.iter().any(|(_, overview, device)| device.is_some_and(|device| tensors(overview, device).is_some()));
        let amounts = Amounts::of(rows.iter().filter_map(|(_, _, device)| device.as_ref()).flat_map(figures));
        let highest = rows.iter().filter_map(|(_, _, device)| device.as_ref()).map(|device| figures(device)[0]).max();
        let mut table = Table::new()
            .column("recording", Fit::LeftCutFront)
            .column("device", Fit::Right)
            .amounts("peak", amounts)
            .column("after", Fit::Right)
            .amounts("at the end", amounts);
        if has_tensors {
            table = table.amounts("tensors", amounts);
        }
        table = table.column("", Fit::Left);
        for (name, overview, device) in &rows {
            let Some(device) = device else {
                table.row([Cell::from(name)]);
                table.note(1, "nothing was allocated");
                continue;
            };
            let [peak, end] = figures(device);
            let at = in_words(Duration::from_secs_f64(device.peak_seconds.unwrap_or(0.0)));
            let ordinal = device.device.to_string();
            let cells = [name.clone(), ordinal, amounts.show(peak), at, amounts.show(end)].map(Cell::from);
            let most = tensors(overview, device).map_or_else(String::new, |bytes| amounts.show(signed(bytes)));
            let most = has_tensors.then(|| Cell::from(most));
            table.row(cells.into_iter().chain(most).chain([Cell::bar(peak, highest.unwrap_or(0))]));
        }
        table.show(f, paint)
    }
}

/// What one place has at the peak of each recording.
struct RankPlace {
    name: String,
    bytes: Vec<i64>,
}

fn places(overviews: &[Overview]) -> Vec<RankPlace> {
    let mut places: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for (at, overview) in overviews.iter().enumerate() {
        for sum in overview.busiest().into_iter().flat_map(|device| &device.peak_by_place) {
            let scope = if sum.scope.is_empty() { String::new() } else { format!("{}: ", sum.scope.join(" > ")) };
            let bytes = places.entry(format!("{scope}{}", sum.place)).or_insert_with(|| vec![0; overviews.len()]);
            bytes[at] += sum.bytes;
        }
    }
    let mut places: Vec<_> = places.into_iter().map(|(name, bytes)| RankPlace { name, bytes }).collect();
    places.sort_by_key(|place| std::cmp::Reverse(place.bytes.iter().copied().max()));
    places.truncate(MOST_PLACES);
    places
}

struct RankPlaces<'a> {
    places: &'a [RankPlace],
    names: &'a [String],
}

impl Show for RankPlaces<'_> {
    /// A few recordings have a column each. More recordings have columns for the least and the most.
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        const MOST_COLUMNS: usize = 4;
        let amounts = Amounts::of(self.places.iter().flat_map(|place| place.bytes.iter().copied()));
        let mut table = Table::new().column("scope: place", Fit::LeftCutFront);
        if self.names.len() <= MOST_COLUMNS {
            let room = paint.width() / 2 / self.names.len().max(1) - 2;
            for name in headings(self.names, room) {
                table = table.amounts(&name, amounts);
            }
            for place in self.places {
                let figures = place.bytes.iter().map(|bytes| Cell::from(amounts.show(*bytes)));
                table.row([Cell::from(&place.name)].into_iter().chain(figures));
            }
        } else {
            let names = headings(self.names, 20);
            table = table.amounts("least", amounts).amounts("most", amounts).column("most in", Fit::Left);
            for place in self.places {
                let most = place.bytes.iter().copied().max().unwrap_or(0);
                let at = place.bytes.iter().position(|bytes| *bytes == most).unwrap_or(0);
                let least = place.bytes.iter().copied().min().unwrap_or(0);
                let name = if least == most { "all".to_owned() } else { names[at].clone() };
                table.row([place.name.clone(), amounts.show(least), amounts.show(most), name].map(Cell::from));
            }
        }
        table.show(f, paint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heading_keeps_the_rank() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let ranks = names(&["train.rank0.gpu0.pid4711", "train.rank10.gpu0.pid4712"]);
        assert_eq!(headings(&ranks, 30), ranks);
        assert_eq!(headings(&ranks, 12), ["rank0", "rank10"]);
        // The first two recordings have no ranks, and the last two are of two runs.
        assert_eq!(headings(&names(&["train.gpu0.pid1", "train.gpu1.pid2"]), 8), ["gpu0", "gpu1"]);
        assert_eq!(headings(&names(&["a.rank0.pid1", "b.rank0.pid2"]), 8), ["a", "b"]);
        // The first process has the file that was asked for.
        assert_eq!(headings(&names(&["train", "train.pid1"]), 8), ["train", "pid1"]);
        // Nothing tells them apart in so few columns.
        assert_eq!(
            headings(&names(&["/runs/a/train", "/runs/b/train"]), 8),
            ["/train", "/train"].map(|name| format!("…{name}"))
        );
    }
}
