//! The page of `gpumem report --html`, which is self-contained. It loads nothing from a network, and its policy forbids
//! that.
//!
//! `page.js` documents how the data are laid out and drawn. They contain every event, and the page chooses what to draw
//! at a zoom level. If there are many recordings, only some are on the page with their events: the extreme ones, and
//! those that the user asks for.

mod data;
mod script;

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Serializer;

use self::{data::Recording, script::InScript};
use crate::{
    failure::Failure,
    history::History,
    report::{
        compared::{ComparedPlace, Comparison, Extremes, difference},
        overview::Overview,
    },
};

/// Up to this many recordings are all on the page with their events.
pub(crate) const MOST_IN_DETAIL: usize = 64;
/// If there are more recordings, at most this many of those that ran out of memory are on the page with their events,
/// the earliest ones.
const MOST_OUT_OF_MEMORY: usize = 4;
/// The number of places that are compared: those that differ most.
const MOST_PLACES: usize = 40;

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The recordings of a page. Each one is read, converted and dropped.
#[derive(Default)]
pub(crate) struct Page {
    recordings: Vec<Recording>,
    comparison: Comparison,
    /// The recordings on the page with their events. If there are many recordings, each comes with the reason for choosing it.
    in_detail: Vec<(usize, &'static str)>,
}

/// The differences between many recordings, as `page.js` reads them.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AboutFleet<'a> {
    words: Vec<String>,
    in_detail: &'a [(usize, &'static str)],
    places: Vec<ComparedPlace>,
}

impl Page {
    /// Adds a recording, with or without its events.
    pub(crate) fn add(&mut self, history: &History, is_in_detail: bool) -> io::Result<()> {
        let overview = Overview::of(history);
        self.recordings.push(Recording::of(history, &overview, is_in_detail)?);
        self.comparison.add(&overview);
        Ok(())
    }

    /// Chooses the recordings for [`add_events`](Self::add_events), if all were added without events.
    ///
    /// # Errors
    /// Returns an error if a rank has no recording.
    pub(crate) fn choose(&mut self, ranks: &[u64]) -> Result<Vec<usize>, Failure> {
        let extremes = self.comparison.extremes().into_iter();
        let extremes = extremes.flat_map(|Extremes { highest, median, lowest }| {
            [(highest, "the highest peak"), (median, "the median peak"), (lowest, "the lowest peak")]
        });
        let mut chosen: Vec<_> = extremes.collect();
        let out_of_memory = self.comparison.out_of_memory().into_iter().take(MOST_OUT_OF_MEMORY);
        chosen.extend(out_of_memory.map(|number| (number, "out of memory")));
        for rank in ranks {
            let before = chosen.len();
            chosen.extend(self.comparison.of_rank(*rank).map(|number| (number, "asked for")));
            if chosen.len() == before {
                let next = "pass a rank whose recording is among the files";
                return Err(Failure::new(format!("--rank {rank} cannot be shown"), "no recording has this rank", next));
            }
        }
        self.in_detail = chosen;
        let mut numbers: Vec<_> = self.in_detail.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        Ok(numbers)
    }

    /// Adds the events of a recording that was added without them.
    pub(crate) fn add_events(&mut self, number: usize, history: &History) -> io::Result<()> {
        self.recordings[number] = Recording::of(history, &Overview::of(history), true)?;
        Ok(())
    }

    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        for part in HTML.split_inclusive("-->") {
            let (text, name) = part.rsplit_once("<!--").unwrap_or((part, ""));
            out.write_all(text.as_bytes())?;
            match name.trim_end_matches("-->") {
                "style" => out.write_all(STYLE.as_bytes())?,
                "about" => self.write_about(out)?,
                "script" => out.write_all(SCRIPT.as_bytes())?,
                "data" => {
                    for (number, recording) in self.recordings.iter().enumerate() {
                        if let Some(data) = &recording.data {
                            write_data(&format!("data-{number}"), data, out)?;
                        }
                        if let Some(tensors) = &recording.tensors {
                            write_data(&format!("tensors-{number}"), tensors, out)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn write_about(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{{\"version\":\"{}\",\"recordings\":[", env!("CARGO_PKG_VERSION"))?;
        for (number, Recording { about, .. }) in self.recordings.iter().enumerate() {
            write!(out, "{}{about}", if number > 0 { "," } else { "" })?;
        }
        write!(out, "]")?;
        if self.recordings.len() > MOST_IN_DETAIL {
            write!(out, ",\"fleet\":")?;
            let fleet = AboutFleet {
                words: self.comparison.in_words().into_iter().chain(self.comparison.out_of_memory_in_words()).collect(),
                in_detail: &self.in_detail,
                places: self.comparison.places(MOST_PLACES, difference),
            };
            fleet.serialize(&mut Serializer::with_formatter(&mut *out, InScript))?;
        }
        write!(out, "}}")
    }
}

fn write_data(id: &str, data: &str, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "<script type=\"text/plain\" id=\"{id}\">{data}</script>")
}
