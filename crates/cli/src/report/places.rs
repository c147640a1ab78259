//! A table of places, with their memory at the peak and everything that they allocated, for `--table`.

use std::{
    cmp::Reverse,
    collections::HashMap,
    fmt,
    io::{self, Write},
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table, or_unknown, shortened},
    report::SharedNames,
};
use serde::Serialize;

use crate::history::{History, Moment, OriginSum};

/// One place, over the whole recording.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PlaceStats {
    pub(crate) scope: Vec<String>,
    #[serde(rename = "place")]
    pub(crate) name: String,
    pub(crate) caller: Option<String>,
    pub(crate) library: Option<String>,
    pub(crate) kind: &'static str,
    pub(crate) device: u32,
    /// The bytes that the place has at the peak of its device. `None` if the recording does not contain them.
    pub(crate) at_peak_bytes: Option<i64>,
    pub(crate) at_peak_blocks: Option<i64>,
    pub(crate) live_at_end_bytes: i64,
    /// All bytes that the place allocated. `None` if the recording does not contain them.
    pub(crate) allocated_bytes: Option<i64>,
    pub(crate) allocations: Option<i64>,
}

/// Returns the places of a recording, those with the most at the peak first.
pub(crate) fn places<'a>(history: &'a History) -> Vec<PlaceStats> {
    let mut places: Vec<PlaceStats> = Vec::new();
    let mut known = HashMap::new();
    let is_whole = !history.has_only_peaks();
    let mut of = |held: &OriginSum<'a>, add: &dyn Fn(&mut PlaceStats)| {
        let origin = held.origin;
        let key = (held.device, &origin.path, origin.place(), &origin.caller, origin.kind);
        let at = *known.entry(key).or_insert_with(|| {
            places.push(PlaceStats {
                scope: origin.path.clone(),
                name: origin.place(),
                caller: origin.caller.clone(),
                library: origin.library.clone(),
                kind: origin.kind.name(),
                device: history.devices[usize::from(held.device)].device.ordinal,
                at_peak_bytes: history.has_kind_at(origin.kind, Moment::Peak).then_some(0),
                at_peak_blocks: history.has_kind_at(origin.kind, Moment::Peak).then_some(0),
                allocated_bytes: is_whole.then_some(0),
                allocations: is_whole.then_some(0),
                ..PlaceStats::default()
            });
            places.len() - 1
        });
        add(&mut places[at]);
    };
    for held in history.allocated() {
        of(&held, &|place| {
            add_to(&mut place.allocated_bytes, held.bytes);
            add_to(&mut place.allocations, held.blocks);
        });
    }
    for held in history.held_after(&history.changes_at(Moment::Peak)).iter().flatten() {
        of(held, &|place| {
            add_to(&mut place.at_peak_bytes, held.bytes);
            add_to(&mut place.at_peak_blocks, held.blocks);
        });
    }
    for held in history.held_after(&history.changes_at(Moment::End)).iter().flatten() {
        of(held, &|place| place.live_at_end_bytes += held.bytes);
    }
    places.sort_by(|a, b| {
        let order = |place: &PlaceStats| (Reverse(place.at_peak_bytes), Reverse(place.allocated_bytes));
        order(a).cmp(&order(b)).then_with(|| (&a.scope, &a.name).cmp(&(&b.scope, &b.name)))
    });
    places
}

fn add_to(sum: &mut Option<i64>, more: i64) {
    *sum = sum.map(|sum| sum + more);
}

/// Adds up the places of scopes whose names differ only in numbers, if there are many.
fn grouped(places: Vec<PlaceStats>) -> Vec<PlaceStats> {
    let names = SharedNames::of(places.iter().map(|place| &*place.scope));
    if !names.has_any() {
        return places;
    }
    let (mut rows, mut known) = (Vec::<PlaceStats>::new(), HashMap::new());
    for place in &places {
        let scope = names.path(&place.scope).into_owned();
        let key = (place.device, scope.clone(), &place.name, &place.caller, place.kind);
        let at = *known.entry(key).or_insert(rows.len());
        let Some(row) = rows.get_mut(at) else {
            rows.push(PlaceStats { scope, ..place.clone() });
            continue;
        };
        // If a value of one place is not known, the sum is not known either.
        let add = |sum: &mut Option<i64>, more: Option<i64>| *sum = sum.zip(more).map(|(sum, more)| sum + more);
        add(&mut row.at_peak_bytes, place.at_peak_bytes);
        add(&mut row.at_peak_blocks, place.at_peak_blocks);
        add(&mut row.allocated_bytes, place.allocated_bytes);
        add(&mut row.allocations, place.allocations);
        row.live_at_end_bytes += place.live_at_end_bytes;
    }
    rows.sort_by_key(|place| (Reverse(place.at_peak_bytes), Reverse(place.allocated_bytes)));
    rows
}

/// At most this many rows are printed; JSON contains all.
const MOST: usize = 40;

pub(crate) fn write(history: &History, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let places = grouped(places(history));
    let what = ": places, by their memory at the peak";
    let file = shortened(&history.path.display().to_string(), paint.width().saturating_sub(what.len()));
    let title = format!("{file}{what}");
    writeln!(out, "{}", paint.on(Role::Heading, title))?;
    if places.is_empty() {
        return writeln!(out, "nothing was allocated");
    }
    writeln!(out, "{}", InPaint(&PlaceStatsTable(&places[..places.len().min(MOST)]), paint))?;
    if places.len() > MOST {
        writeln!(out, "({} more places; --json lists all)", places.len() - MOST)?;
    }
    Ok(())
}

struct PlaceStatsTable<'a>(&'a [PlaceStats]);

impl Show for PlaceStatsTable<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let in_use = Amounts::of(
            self.0.iter().flat_map(|place| place.at_peak_bytes.into_iter().chain([place.live_at_end_bytes])),
        );
        let total = in_use.for_others(self.0.iter().filter_map(|place| place.allocated_bytes));
        let highest = self.0.iter().filter_map(|place| place.at_peak_bytes).max().unwrap_or(0);
        let mut table = Table::new()
            .column("scope: place", Fit::LeftCutFront)
            .column("kind", Fit::Left)
            .amounts("at peak", in_use)
            .amounts("at end", in_use)
            .amounts("total", total)
            .column("allocs", Fit::Right)
            .column("", Fit::Left);
        for place in self.0 {
            let scope = if place.scope.is_empty() { String::new() } else { format!("{}: ", place.scope.join(" > ")) };
            let cells = [
                format!("{scope}{}", place.name),
                place.kind.to_owned(),
                or_unknown(place.at_peak_bytes.map(|bytes| in_use.show(bytes))),
                in_use.show(place.live_at_end_bytes),
                or_unknown(place.allocated_bytes.map(|bytes| total.show(bytes))),
                or_unknown(place.allocations),
            ];
            table.row(cells.map(Cell::from).into_iter().chain([Cell::bar(place.at_peak_bytes.unwrap_or(0), highest)]));
            if let Some(caller) = &place.caller {
                table.note(1, &format!("from {caller}"));
            }
        }
        table.show(f, paint)
    }
}
