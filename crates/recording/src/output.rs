//! The reports that the program requested, derived again.

use std::{fmt, time::UNIX_EPOCH};

use gpumem_core::report::{
    self, Breakdown, Content, LiveBlock, MemoryStats, OutOfMemory, PeakHolders, Report, Summary, Tracked,
};

/// A report that the program requested. `Display` is the text that the program printed, or would have printed, without the line
/// break at the end.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ReplayedReport {
    /// The line of a trace.
    Report(Report),
    /// `gpumem::summary`.
    Summary(Summary),
    /// `gpumem::breakdown`.
    Breakdown(Breakdown),
    /// `gpumem::torch::memory_stats`.
    MemoryStats(Box<MemoryStats>),
    /// Live blocks.
    LiveBlocks(Vec<LiveBlock>),
    /// The reports at exit: leaks and peaks.
    AtExit(Box<report::Output>),
    /// The allocations that made the peak of a scope.
    PeakHolders(PeakHolders),
    /// The blocks allocated and freed between two lines.
    Tracked(Tracked),
    /// An allocation was rejected.
    OutOfMemory(OutOfMemory),
}

impl fmt::Display for ReplayedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Report(report) => printed(Content::Trace(report.clone())).fmt(f),
            Self::Summary(summary) => summary.fmt(f),
            Self::Breakdown(breakdown) => breakdown.fmt(f),
            Self::MemoryStats(stats) => stats.fmt(f),
            Self::LiveBlocks(blocks) => blocks.iter().try_for_each(|block| writeln!(f, "{block:?}")),
            Self::AtExit(output) => output.fmt(f),
            Self::PeakHolders(peak) => peak.fmt(f),
            Self::Tracked(tracked) => tracked.fmt(f),
            Self::OutOfMemory(oom) => printed(Content::OutOfMemory(Box::new(oom.clone()))).fmt(f),
        }
    }
}

/// Creates an output without a time, because the text does not contain it.
fn printed(content: Content) -> report::Output {
    report::Output::new(content, UNIX_EPOCH, 0)
}

/// Creates an output that is printed at exit.
pub(super) fn at_exit(content: Content, pid: u32) -> ReplayedReport {
    ReplayedReport::AtExit(Box::new(report::Output::new(content, UNIX_EPOCH, pid)))
}
