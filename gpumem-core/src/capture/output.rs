//! What the program asked for, derived again.

use std::fmt;

use crate::{
    export,
    report::{Breakdown, LiveBlock, MemoryStats, OutOfMemory, PeakHolders, Report, Summary, Tracked},
};

/// A report that the program asked for. `Display` is what the program printed, or would have printed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Output {
    /// The line of a trace.
    Report(Report),
    /// `gpumem::summary`.
    Summary(Summary),
    /// `gpumem::breakdown`.
    Breakdown(Breakdown),
    /// `gpumem::memory_stats`.
    MemoryStats(Box<MemoryStats>),
    /// Live blocks.
    LiveBlocks(Vec<LiveBlock>),
    /// What is reported when the process ends: leaks, and peaks.
    AtExit(String),
    /// Which allocations made the peak of a scope.
    PeakHolders(PeakHolders),
    /// What came and went between two lines.
    Tracked(Tracked),
    /// An allocation was refused.
    OutOfMemory(OutOfMemory),
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Report(report) => f.write_str(&export::TEXT.line(report)),
            Self::Summary(summary) => summary.fmt(f),
            Self::Breakdown(breakdown) => breakdown.fmt(f),
            Self::MemoryStats(stats) => stats.fmt(f),
            Self::LiveBlocks(blocks) => blocks.iter().try_for_each(|block| writeln!(f, "{block:?}")),
            Self::AtExit(text) => f.write_str(text),
            Self::PeakHolders(peak) => peak.fmt(f),
            Self::Tracked(tracked) => f.write_str(&export::TEXT.tracked(tracked)),
            Self::OutOfMemory(oom) => write!(f, "gpumem: {oom}"),
        }
    }
}
