//! The data of reports. It is derived from the ledger; nothing is measured here.

mod block;
mod breakdown;
mod budget;
mod distribution;
mod driver;
mod in_use;
mod leaks;
mod lines;
mod memory_stats;
mod oom;
mod other_threads;
mod output;
mod peak;
mod pool;
mod shared_names;
mod stats;
mod summary;
mod tracked;

pub(crate) use self::block::missing_in_words;
pub use self::{
    block::LiveBlock,
    breakdown::{Breakdown, Part, PartKind},
    budget::{Quantity, Relation},
    driver::{DriverMemory, ROUNDING, cause_in_words},
    in_use::{InUse, LargestOfDriver},
    leaks::Leaks,
    lines::{Line, SourceLine},
    memory_stats::{AllocStats, KindStats, MemoryStats, MemorySummary, PeakBounds, ReservedStats, Tally},
    oom::{OutOfMemory, Place},
    output::{Content, Level, Output, Peaks},
    peak::{PeakHolder, PeakHolders},
    pool::{PoolAtPeak, RegisteredPool},
    stats::{MeasuredCalls, NameStats, Spread, Stats, WorstCall},
    summary::{ScopeSummary, Summary},
    tracked::{Change, Tracked},
};
pub use self::{
    block::{counted, place_in_words},
    breakdown::{DeviceReading, Group, path_in_words},
    budget::{Counted, Limit, Measurement, Verdict, judge},
    distribution::{Distribution, nearest_rank},
    leaks::{by_place, leak_in_words},
    lines::Lines,
    other_threads::{BelongsTo, OtherThread, ThreadFacts},
    shared_names::{MOST_ALIKE, SharedNames},
    summary::Path,
    tracked::{AllocatedAt, Groups, Sort, What, difference, live, place_of},
};
use crate::model::Trace;

/// One reading of a trace, and the names in its line.
///
/// `Display` is fastai's line, without the line break.
///
/// Example: see `gpumem::sink::Output::report`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The numbers.
    pub trace: Trace,
    /// The names of the scopes around the trace, the outermost first. A scope without a name is shown as the place where it was
    /// opened. Empty outside all scopes.
    pub outer: Vec<String>,
    /// The trace's own context, such as the name of the function. Never empty.
    pub ctx: Option<String>,
    /// The name of this report, such as `exit`. Never empty.
    pub subctx: Option<String>,
    /// Each statement of the function, under `#[gpu_mem_trace(lines)]`.
    pub lines: Vec<Line>,
}

impl Report {
    /// Creates a report. An empty name counts as no name; fastai would print ` (: exit)` for it.
    #[doc(hidden)]
    pub fn new(trace: Trace, ctx: Option<&str>, subctx: Option<&str>) -> Self {
        let name = |name: Option<&str>| name.filter(|name| !name.is_empty()).map(str::to_owned);
        Self { trace, outer: Vec::new(), ctx: name(ctx), subctx: name(subctx), lines: Vec::new() }
    }

    /// Creates the report of a trace in these scopes.
    #[doc(hidden)]
    #[must_use]
    pub fn inside(self, outer: Vec<String>) -> Self {
        Self { outer, ..self }
    }
}
