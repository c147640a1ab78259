//! Writes everything that gpumem prints as JSON objects. Bytes are exact, and a value that was not measured is `null`.

use serde_core::ser::SerializeMap;

use super::{
    super::time::rfc3339,
    object::{Object, object},
};
use crate::{
    model::{Sampling, Trace},
    report::{Content, Line, Output, Report, SourceLine},
};

// The first entries of each line. Their names are part of the public interface.
object!(Output as output {
    type: output.content.name(),
    level: output.level.name(),
    time: rfc3339(output.time),
    pid, thread, thread_name, device,
    module: output.module.as_deref(),
    file: output.at.as_ref().map(SourceLine::file),
    line: output.at.as_ref().map(SourceLine::line);
    flatten output.content
});

impl Object for Content {
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        match self {
            Self::Trace(report) => report.entries(map),
            Self::Stats(stats) => stats.entries(map),
            Self::Tracked(tracked) => tracked.entries(map),
            Self::OutOfMemory(oom) => oom.entries(map),
            Self::Leaks(leaks) => leaks.entries(map),
            Self::Peaks(peaks) => peaks.entries(map),
            Self::Budget(text) | Self::Notice(text) => map.serialize_entry("text", text),
        }
    }
}

/// Returns the value, or `None` if the trace was not measured.
fn measured<T>(trace: &Trace, figure: T) -> Option<T> {
    trace.is_measured().then_some(figure)
}

object!(Report as report {
    outer, ctx, subctx,
    simulated: report.trace.simulated,
    gauge: report.trace.gauge.name(),
    source: report.trace.source.name(),
    used: measured(&report.trace, report.trace.used),
    peaked: measured(&report.trace, report.trace.peaked),
    peak_over_start: measured(&report.trace, report.trace.peak_over_start()),
    sampling: report.trace.sampling,
    untracked_frees: report.trace.untracked,
    lost_events: report.trace.lost,
    shared: report.trace.shared,
    allocated_on: report.trace.allocated_on;
    unless_empty lines: report.lines
});

object!(Line as line {
    line: line.number,
    source: &*line.source,
    used: measured(&line.trace, line.trace.used),
    peaked: measured(&line.trace, line.trace.peaked),
    total: measured(&line.trace, line.total),
});

object!(Sampling as sampling {
    every_us: sampling.every,
    readings,
    longest_gap_us: sampling.longest_gap,
});
