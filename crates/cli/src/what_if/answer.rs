//! The result: the memory that the program needs with each setting, as a table and as JSON.

use std::{
    fmt,
    io::{self, Write},
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table, or_unknown},
    model::Bytes,
    report::counted,
};
use serde::Serialize;

use super::{recorded::ReplayedRecording, search::PRECISION};

/// The environment variable for PyTorch's allocator.
pub(super) const ALLOCATOR: &str = "PYTORCH_CUDA_ALLOC_CONF";
/// The settings that are tried by default. Each changes how PyTorch's allocator splits or keeps memory.
pub(super) const SETTINGS: [&str; 6] = [
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
    "backend:cudaMallocAsync",
];

/// The memory that the program needs with one environment. The field names are those in JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct AnswerRow {
    /// The variables that were set. Empty for the unchanged program.
    pub(crate) environment: String,
    /// The highest value that the driver handed out to a process, or to PyTorch's allocator in a replay. `None` if the
    /// program failed.
    pub(crate) most_bytes: Option<u64>,
    /// The bytes of `most_bytes` that no tensor used. Only known for replays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unused_bytes: Option<u64>,
    /// The number of times that the allocator emptied its cache because the GPU was full. Only known for replays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retries: Option<u64>,
    /// The number of requests that failed for good. A request that succeeds after the allocator has emptied its cache
    /// does not count.
    #[serde(rename = "refused")]
    pub(crate) rejected: u64,
    /// The number of values that the program of a dry run read although they were not computed: sizes that depend on them may differ.
    pub(crate) unknown_values: u64,
    /// The memory of the smallest card on which the program succeeds and gets everything it requests. It is up to 2 %
    /// too large. `None` if the program failed.
    pub(crate) smallest_card_bytes: Option<u64>,
    /// Why there are no values.
    pub(crate) failed: Option<String>,
}

impl AnswerRow {
    /// Returns the settings as the user would write them.
    fn name(&self) -> String {
        match self.environment.strip_suffix('=') {
            Some(variable) => format!("without {variable}"),
            None => self.environment.clone(),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Answer {
    pub(crate) rows: Vec<AnswerRow>,
    /// The environment that needs the smallest card, if it is not the unchanged program's.
    pub(crate) best: Option<String>,
    /// The environment in which PyTorch's cache holds the least driver memory, if it is not the unchanged program's.
    /// Other programs then have more.
    pub(crate) least: Option<String>,
    #[serde(flatten)]
    pub(crate) by: By,
}

/// Where the rows come from.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum By {
    /// From this many dry runs.
    DryRuns(usize),
    /// From replays of a recording in a model of PyTorch's allocator.
    #[serde(rename = "modelled")]
    Replay(ReplayedRecording),
}

impl Answer {
    pub(super) fn of(rows: Vec<AnswerRow>, by: By) -> Self {
        let rank = |row: &&AnswerRow| (row.smallest_card_bytes.unwrap_or(u64::MAX), row.most_bytes.unwrap_or(u64::MAX));
        let best = rows.iter().min_by_key(rank).filter(|best| {
            let [own, best] = [&rows[0], *best].map(|row| row.smallest_card_bytes.unwrap_or(u64::MAX));
            // Differences below the error of the search are ignored. Replays have no such error, but a gain of less
            // than 1 % does not matter.
            let error = if matches!(by, By::DryRuns(_)) { best / (PRECISION / 2) } else { best / 100 };
            own > best && own - best > error
        });
        let can_compare = !matches!(&by, By::Replay(recorded) if !recorded.is_exact());
        // The pool of `cudaMallocAsync` belongs to the driver, which hands out more than is counted.
        let own = rows[0].most_bytes.unwrap_or(u64::MAX);
        let known =
            rows.iter().filter(|row| !row.environment.contains("cudaMallocAsync") && row.most_bytes < Some(own));
        let least = known.filter(|row| row.most_bytes.is_some()).min_by_key(|row| row.most_bytes);
        let [best, least] = [best, least].map(|row| row.filter(|_| can_compare).map(|row| row.environment.clone()));
        Self { rows, best, least, by }
    }

    /// Returns whether the program succeeds with at least one of the environments.
    pub(crate) fn has_any(&self) -> bool {
        self.rows.iter().any(|row| row.failed.is_none())
    }

    pub(crate) fn write(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        let recorded = match &self.by {
            By::DryRuns(_) => None,
            By::Replay(recorded) => Some(recorded),
        };
        if let Some(recorded) = recorded {
            writeln!(out, "{}", paint.on(Role::Heading, recorded.title()))?;
        }
        writeln!(out, "{}", InPaint(&Rows(&self.rows, recorded.is_some()), paint))?;
        let unit = amounts_of(&self.rows);
        let in_words = |bytes: u64| unit.in_words(Bytes::new(bytes).signed());
        let card = |row: &AnswerRow| row.smallest_card_bytes.map_or_else(|| "no GPU".to_owned(), in_words);
        let row = |environment: &Option<String>| {
            environment.as_ref().and_then(|environment| self.rows.iter().find(|row| row.environment == *environment))
        };
        let sentence = match row(&self.best) {
            _ if !self.has_any() => "The program does not run with any of these. A larger --card may help.".to_owned(),
            _ if recorded.is_some_and(|recorded| !recorded.is_exact()) => {
                "No setting can be recommended, because the replay does not match the recording.".to_owned()
            }
            Some(best) => {
                format!("Best: {}, for a GPU of {} instead of {}.", best.name(), card(best), card(&self.rows[0]))
            }
            None if recorded.is_some_and(|recorded| recorded.older_bytes > 0) => {
                "None of these needs a smaller GPU, but all of them include the memory that was reserved before the history starts."
                    .to_owned()
            }
            None => "None of these needs a smaller GPU than the program as it is.".to_owned(),
        };
        writeln!(out, "{}", paint.on(Role::Heading, sentence))?;
        let most = |row: &AnswerRow| in_words(row.most_bytes.unwrap_or(0));
        if let Some(least) = row(&self.least).filter(|_| self.least != self.best) {
            writeln!(
                out,
                "Least from the driver: {}, {} instead of {}.",
                least.name(),
                most(least),
                most(&self.rows[0])
            )?;
        }
        let notes = match &self.by {
            By::DryRuns(count) => {
                let runs = counted(*count as u64, "dry run", "dry runs");
                let card = format!("{runs}. The size of a GPU is all of its memory, including what the driver takes.");
                let unknown = self.rows.iter().map(|row| row.unknown_values).max();
                [Some(card), unknown.and_then(unknown_values)].into_iter().flatten().collect()
            }
            By::Replay(recorded) => recorded.notes(),
        };
        notes.iter().try_for_each(|note| writeln!(out, "{}", paint.on(Role::Faint, note)))
    }
}

/// Returns the sentence that tells how many values dry runs read although they were not computed. `most` is the largest count of one run.
pub(crate) fn unknown_values(most: u64) -> Option<String> {
    let values = counted(most, "value was", "values were");
    let next = "`gpumem run --dry` shows where, and sizes that depend on them may differ";
    (most > 0).then(|| format!("Up to {values} read from memory that is not there: {next}."))
}

/// The rows, and whether they come from a replay.
struct Rows<'a>(&'a [AnswerRow], bool);

fn values(row: &AnswerRow) -> [Option<i64>; 3] {
    let amount = |bytes: Option<u64>| bytes.and_then(|bytes| i64::try_from(bytes).ok());
    [row.most_bytes, row.unused_bytes, row.smallest_card_bytes].map(amount)
}

/// Returns the format of the table. The sentences below it use the same unit.
fn amounts_of(rows: &[AnswerRow]) -> Amounts {
    Amounts::of(rows.iter().flat_map(values).flatten())
}

impl Show for Rows<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let amounts = amounts_of(self.0);
        let (own, most) =
            if self.1 { ("as it was recorded", "most reserved") } else { ("the program as it is", "from the driver") };
        let mut table = Table::new().column("with", Fit::LeftCutFront).amounts(most, amounts);
        table = if self.1 {
            table.amounts("unused", amounts).column("retries", Fit::Right).amounts("smallest GPU", amounts)
        } else {
            table.amounts("smallest GPU", amounts).column("", Fit::Left)
        };
        for row in self.0 {
            let [most, unused, card] = values(row).map(|bytes| or_unknown(bytes.map(|bytes| amounts.show(bytes))));
            // All rows of a replay set the same variable.
            let variable = row.environment.strip_prefix(ALLOCATOR).filter(|_| self.1);
            let name = match variable.and_then(|setting| setting.strip_prefix('=')) {
                _ if row.environment.is_empty() => own,
                Some("") => "PyTorch's defaults",
                Some(setting) => setting,
                None => &row.environment,
            };
            let note = match (&row.failed, row.rejected) {
                (Some(_), 0) => "failed",
                (Some(_), _) => "out of memory",
                (None, _) => "",
            };
            let retries = or_unknown(row.retries);
            if self.1 {
                let most = if row.failed.is_some() { note } else { &most };
                table.row([Cell::from(name), most.into(), unused.into(), retries.into(), card.into()]);
            } else {
                table.row([Cell::from(name), most.into(), card.into(), note.into()]);
            }
        }
        table.show(f, paint)
    }
}
