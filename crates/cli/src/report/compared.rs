//! Finds out which of several recordings differs from the others, and in which place. Only a few numbers of each
//! recording are kept.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    path::Path,
};

use gpumem_core::{
    export::shortened,
    model::{Bytes, one_line},
    report::{SharedNames, nearest_rank},
};
use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use super::{overview::Overview, text::unit_of};

/// Recordings side by side.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    recordings: Vec<Compared>,
    /// The names of places by id, and the ids by name.
    places: Vec<String>,
    numbers: HashMap<String, u32>,
}

/// The values of a recording that are compared.
#[derive(Debug)]
struct Compared {
    file: String,
    rank: Option<u64>,
    /// The peak of the device with the highest one.
    peak: Option<u64>,
    /// The time of the first failed allocation, if the program did not get the memory afterwards.
    out_of_memory: Option<f64>,
    /// The ids of places and their bytes at the peak.
    places: Vec<(u32, i64)>,
}

/// The bytes of one place at the peak of each recording.
#[derive(Debug, Serialize)]
pub(crate) struct ComparedPlace {
    pub(crate) name: String,
    pub(crate) bytes: Vec<i64>,
    pub(crate) median: i64,
}

/// The values by which a place is chosen.
pub(crate) struct Spread<'a> {
    least: i64,
    median: i64,
    /// For each recording that contains the place: the place's id, its bytes, and the index of the recording. Sorted by
    /// bytes.
    cells: &'a [(u32, i64, usize)],
}

impl Spread<'_> {
    fn of(&self, recording: usize) -> i64 {
        self.cells.iter().find(|(_, _, at)| *at == recording).map_or(0, |(_, bytes, _)| *bytes)
    }
}

/// Returns the largest amount that a recording has in a place.
pub(crate) fn most(place: &Spread<'_>) -> i64 {
    place.cells.last().map_or(0, |(_, bytes, _)| *bytes)
}

/// Returns the largest difference from the median.
pub(crate) fn difference(place: &Spread<'_>) -> i64 {
    (most(place) - place.median).max(place.median - place.least)
}

/// The recordings with the highest and the lowest peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extremes {
    pub(crate) highest: usize,
    pub(crate) median: usize,
    pub(crate) lowest: usize,
}

impl Comparison {
    pub(crate) fn of(overviews: &[Overview]) -> Self {
        let mut comparison = Self::default();
        for overview in overviews {
            comparison.add(overview);
        }
        comparison
    }

    pub(crate) fn add(&mut self, overview: &Overview) {
        let mut places: HashMap<u32, i64> = HashMap::new();
        let busiest = overview.busiest();
        let sums = || busiest.into_iter().flat_map(|device| &device.peak_by_place);
        let names = SharedNames::of(sums().map(|sum| &*sum.scope));
        for sum in sums() {
            let scope = names.path(&sum.scope).join(" > ");
            let scope = if scope.is_empty() { scope } else { format!("{scope}: ") };
            let name = format!("{scope}{}", sum.place);
            let number = *self.numbers.entry(name).or_insert_with_key(|name| {
                self.places.push(name.clone());
                u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
            });
            *places.entry(number).or_default() += sum.bytes;
        }
        let rejected = overview.rejected.as_ref().filter(|rejected| rejected.count > rejected.obtained_soon);
        self.recordings.push(Compared {
            file: overview.file.clone(),
            rank: overview.rank,
            peak: busiest.and_then(|device| device.peak_bytes),
            out_of_memory: rejected.map(|rejected| rejected.main.seconds),
            places: places.into_iter().collect(),
        });
    }

    /// Returns the shortest file names that are still distinct.
    pub(crate) fn names(&self) -> Vec<String> {
        let files: Vec<_> = self.recordings.iter().map(|recording| Path::new(&recording.file)).collect();
        let short = |file: &Path| file.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let all: BTreeSet<_> = files.iter().map(|file| short(file)).collect();
        let is_clear = all.len() == files.len();
        files.iter().map(|file| if is_clear { short(file) } else { file.display().to_string() }).collect()
    }

    /// Returns the places with the largest values of `by`, the largest first.
    pub(crate) fn places(&self, count: usize, by: impl Fn(&Spread<'_>) -> i64) -> Vec<ComparedPlace> {
        let all = (0..).zip(&self.recordings);
        let mut cells: Vec<_> =
            all.flat_map(|(at, of)| of.places.iter().map(move |(place, bytes)| (*place, *bytes, at))).collect();
        cells.sort_unstable();
        let mut spreads: Vec<_> = cells.chunk_by(|a, b| a.0 == b.0).map(|cells| self.spread(cells)).collect();
        let name = |spread: &Spread<'_>| &self.places[spread.cells[0].0 as usize];
        spreads.sort_by_cached_key(|spread| (Reverse(by(spread)), name(spread)));
        spreads.truncate(count);
        let place = |spread: &Spread<'_>| {
            let mut bytes = vec![0; self.recordings.len()];
            spread.cells.iter().for_each(|(_, of_place, at)| bytes[*at] = *of_place);
            ComparedPlace { name: name(spread).clone(), bytes, median: spread.median }
        };
        spreads.iter().map(place).collect()
    }

    /// Returns the spread of a place. Recordings without the place have 0 bytes there.
    fn spread<'a>(&self, cells: &'a [(u32, i64, usize)]) -> Spread<'a> {
        let without = self.recordings.len() - cells.len();
        let median = middle_of(self.recordings.len()).checked_sub(without).map_or(0, |at| cells[at].1);
        let least = if without > 0 { 0 } else { cells.first().map_or(0, |(_, bytes, _)| *bytes) };
        Spread { least, median, cells }
    }

    /// Returns the recordings with the highest and the lowest peak. `None` if nothing was allocated. The first of
    /// several equal peaks is used.
    pub(crate) fn extremes(&self) -> Option<Extremes> {
        let mut known: Vec<_> = (0..self.recordings.len()).filter(|at| self.recordings[*at].peak.is_some()).collect();
        known.sort_by_key(|at| self.recordings[*at].peak);
        let highest = known.iter().copied().min_by_key(|at| Reverse(self.recordings[*at].peak))?;
        Some(Extremes { highest, median: known[middle_of(known.len())], lowest: known[0] })
    }

    /// Returns the recordings whose programs ran out of memory, the earliest first.
    pub(crate) fn out_of_memory(&self) -> Vec<usize> {
        let mut all: Vec<_> =
            (0..).zip(&self.recordings).filter_map(|(at, of)| Some((of.out_of_memory?, at))).collect();
        all.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        all.into_iter().map(|(_, at)| at).collect()
    }

    /// Describes the programs that ran out of memory. `None` if none did.
    pub(crate) fn out_of_memory_in_words(&self) -> Option<String> {
        const MOST: usize = 8;
        let (all, names) = (self.out_of_memory(), headings(&self.names(), 20));
        let first: Vec<_> = all.iter().take(MOST).map(|at| one_line(&names[*at])).collect();
        let more = if all.len() > MOST { format!(" and {} more", all.len() - MOST) } else { String::new() };
        (!all.is_empty()).then(|| format!("Out of memory: {}{more}.", first.join(", ")))
    }

    /// Returns the recordings of a rank.
    pub(crate) fn of_rank(&self, rank: u64) -> impl Iterator<Item = usize> {
        (0..).zip(&self.recordings).filter(move |(_, recording)| recording.rank == Some(rank)).map(|(at, _)| at)
    }

    /// Describes the spread of the peaks, and the place that made the highest one.
    pub(crate) fn in_words(&self) -> Vec<String> {
        let Some(Extremes { highest, median, lowest }) = self.extremes() else { return Vec::new() };
        let names = headings(&self.names(), 20);
        let name = |at: usize| one_line(&names[at]).into_owned();
        let peak = |at: usize| self.recordings[at].peak.unwrap_or(0);
        let [high, middle, low] = [highest, median, lowest].map(peak);
        // The tables above use the unit of the highest peak, too.
        let unit = unit_of(high);
        let in_words = |bytes: u64| unit.in_words(Bytes::new(bytes).signed());
        if high == low {
            return vec![format!("Each peak is {}.", in_words(high))];
        }
        let peaks = format!(
            "The peaks are from {} ({}) to {} ({}); the median is {}.",
            in_words(low),
            name(lowest),
            in_words(high),
            name(highest),
            in_words(middle)
        );
        let most = self.places(1, |place| place.of(highest) - place.median);
        let most = most.iter().filter(|place| place.bytes[highest] > place.median);
        let most = most.map(|place| {
            let [bytes, median] = [place.bytes[highest], place.median].map(|bytes| unit.in_words(bytes));
            let name_of_place = one_line(&place.name);
            let name = name(highest);
            format!("{name} differs most in {name_of_place}: it has {bytes} there, and the median is {median}.")
        });
        [peaks].into_iter().chain(most).collect()
    }
}

/// Returns the index of the median among this many sorted values.
fn middle_of(count: usize) -> usize {
    usize::try_from(nearest_rank(count as u64, 50)).unwrap_or(usize::MAX)
}

/// Returns names for headings of at most this many columns. If a name is longer, only the part that differs is
/// returned: `rank0` for `train.rank0.gpu0.pid4711`, `rank1` for `train.rank1.gpu1.pid4712`.
pub(crate) fn headings(names: &[String], room: usize) -> Vec<String> {
    let cut = |name: &String| shortened(name, room);
    if names.iter().all(|name| name.width() <= room) {
        return names.iter().map(cut).collect();
    }
    let parts: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    // The first part that is different in all names is used. The rank comes first.
    let part = |at: usize| parts.iter().map(move |parts| parts.get(at).or(parts.last()).copied().unwrap_or_default());
    let is_clear = |at: &usize| part(*at).collect::<BTreeSet<_>>().len() == names.len();
    match (0..parts.iter().map(Vec::len).max().unwrap_or(0)).find(is_clear) {
        Some(at) => part(at).map(|part| cut(&part.to_owned())).collect(),
        None => names.iter().map(cut).collect(),
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
        // The first two recordings have no ranks, and the last two belong to two runs.
        assert_eq!(headings(&names(&["train.gpu0.pid1", "train.gpu1.pid2"]), 8), ["gpu0", "gpu1"]);
        assert_eq!(headings(&names(&["a.rank0.pid1", "b.rank0.pid2"]), 8), ["a", "b"]);
        // The first process writes the file with the requested name.
        assert_eq!(headings(&names(&["train", "train.pid1"]), 8), ["train", "pid1"]);
        // No part distinguishes them within this number of columns.
        assert_eq!(
            headings(&names(&["/runs/a/train", "/runs/b/train"]), 8),
            ["/train", "/train"].map(|name| format!("…{name}"))
        );
    }
}
