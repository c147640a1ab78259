//! Several recordings side by side, such as those of the ranks of one run.

use std::{
    fmt,
    io::{self, Write},
    time::Duration,
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::one_line,
};

use super::{
    change::signed,
    compared::{ComparedPlace, Comparison, headings, most},
    overview::{DeviceOverview, Overview},
    rejected::Rejections,
};
use crate::history::in_words;

/// At most this many places are compared.
const MOST_PLACES: usize = 15;
/// At most this many recordings have a column each in the table of places.
const MOST_COLUMNS: usize = 4;

pub(crate) fn write(overviews: &[Overview], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let comparison = Comparison::of(overviews);
    let names = comparison.names();
    for (overview, name) in overviews.iter().zip(&names) {
        for line in overview.rejected.iter().flat_map(Rejections::in_words) {
            writeln!(out, "{}", paint.on(Role::Alarm, format!("{name}: {line}")))?;
        }
    }
    if overviews.iter().any(|overview| overview.rejected.is_some()) {
        writeln!(out)?;
    }
    writeln!(out, "{}", paint.on(Role::Heading, format!("{} recordings, the peak of each", overviews.len())))?;
    if let Some(cards) = overviews.iter().find_map(|overview| overview.cards.as_ref()) {
        writeln!(out, "{}", one_line(cards))?;
    }
    writeln!(out, "{}", InPaint(&Peaks { overviews, names: &names }, paint))?;
    // A recording in which no allocation is left has nothing to compare.
    let (mut comparison, mut compared) = (Comparison::default(), Vec::new());
    for (overview, name) in overviews.iter().zip(&names).filter(|(overview, _)| !is_unknown(overview)) {
        comparison.add(overview);
        compared.push(name.clone());
    }
    if compared.len() > MOST_COLUMNS {
        writeln!(out)?;
        comparison.in_words().iter().try_for_each(|line| writeln!(out, "{}", paint.on(Role::Heading, line)))?;
    }
    let places = comparison.places(MOST_PLACES, most);
    if !places.is_empty() {
        writeln!(out, "\n{}", paint.on(Role::Heading, "at the peaks, by scope and place"))?;
        writeln!(out, "{}", InPaint(&RankPlaces { places: &places, names: &compared }, paint))?;
    }
    let missing: Vec<_> = overviews
        .iter()
        .zip(&names)
        .flat_map(|(overview, name)| overview.missing_in_words().into_iter().map(move |line| format!("{name}: {line}")))
        .collect();
    if !missing.is_empty() {
        writeln!(out)?;
    }
    missing.iter().try_for_each(|line| writeln!(out, "{}", paint.on(Role::Alarm, line)))
}

/// Returns whether a recording contains no allocation because something is missing in it.
fn is_unknown(overview: &Overview) -> bool {
    overview.busiest().is_none() && overview.missing.leaves_peak_unknown()
}

struct Peaks<'a> {
    overviews: &'a [Overview],
    names: &'a [String],
}

impl Show for Peaks<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let rows: Vec<(&String, &Overview, Option<&DeviceOverview>)> = self
            .names
            .iter()
            .zip(self.overviews)
            .flat_map(|(name, overview)| {
                let used: Vec<_> = overview.devices.iter().filter(|device| device.peak_bytes.is_some()).collect();
                let used = if used.is_empty() { vec![None] } else { used.into_iter().map(Some).collect() };
                used.into_iter().map(move |device| (name, overview, device))
            })
            .collect();
        let values =
            |device: &&DeviceOverview| [signed(device.peak_bytes.unwrap_or(0)), signed(device.live_at_end_bytes)];
        let tensors = |overview: &Overview, device: &DeviceOverview| overview.tensors_peak(device.device);
        let has_tensors =
            rows.iter().any(|(_, overview, device)| device.is_some_and(|device| tensors(overview, device).is_some()));
        let process = |device: &DeviceOverview| device.process_peak.as_ref().map(|process| process.bytes);
        let has_process = rows.iter().any(|(_, _, device)| device.and_then(process).is_some());
        let amounts = Amounts::of(rows.iter().filter_map(|(_, _, device)| device.as_ref()).flat_map(values));
        // The bars stand behind the last column.
        let bar = |device: &DeviceOverview| match process(device) {
            Some(bytes) => bytes,
            None if has_process => 0,
            None => signed(device.peak_bytes.unwrap_or(0)),
        };
        let highest = rows.iter().filter_map(|(_, _, device)| *device).map(bar).max();
        let mut table = Table::new()
            .column("recording", Fit::LeftCutFront)
            .column("device", Fit::Right)
            .amounts("peak", amounts)
            .column("after", Fit::Right)
            .amounts("at the end", amounts);
        if has_tensors {
            table = table.amounts("tensors", amounts);
        }
        if has_process {
            table = table.amounts("process", amounts);
        }
        table = table.column("", Fit::Left);
        for (name, overview, device) in &rows {
            let Some(device) = device else {
                table.row([Cell::from(*name)]);
                table.note(1, if is_unknown(overview) { "the peak is not known" } else { "nothing was allocated" });
                continue;
            };
            let [peak, end] = values(device);
            let at = in_words(Duration::from_secs_f64(device.peak_seconds.unwrap_or(0.0)));
            let ordinal = device.device.to_string();
            let cells = [(*name).clone(), ordinal, amounts.show(peak), at, amounts.show(end)].map(Cell::from);
            let tensors = tensors(overview, device).map(signed);
            let more = [(has_tensors, tensors), (has_process, process(device))].into_iter().filter(|(has, _)| *has);
            let more = more.map(|(_, bytes)| Cell::from(bytes.map_or_else(String::new, |bytes| amounts.show(bytes))));
            table.row(cells.into_iter().chain(more).chain([Cell::bar(bar(device), highest.unwrap_or(0))]));
        }
        table.show(f, paint)
    }
}

struct RankPlaces<'a> {
    places: &'a [ComparedPlace],
    names: &'a [String],
}

impl Show for RankPlaces<'_> {
    /// Writes the tables. A few recordings get a column each; more recordings share two columns, for the least and the
    /// most.
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let amounts = Amounts::of(self.places.iter().flat_map(|place| place.bytes.iter().copied()));
        let mut table = Table::new().column("scope: place", Fit::LeftCutFront);
        if self.names.len() <= MOST_COLUMNS {
            let room = paint.width() / 2 / self.names.len().max(1) - 2;
            for name in headings(self.names, room) {
                table = table.amounts(&name, amounts);
            }
            for place in self.places {
                let values = place.bytes.iter().map(|bytes| Cell::from(amounts.show(*bytes)));
                table.row([Cell::from(&place.name)].into_iter().chain(values));
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
