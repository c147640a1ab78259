//! Writes everything that gpumem prints as JSON objects. Bytes are exact, and a value that was not measured is `null`.

use serde_core::ser::SerializeMap;

use super::{
    super::time::rfc3339,
    object::{micros, object},
};
use crate::{
    model::{GpuMemory, Sampling, Trace},
    report::{Content, Line, Output, Report, SourceLine},
};

// The first entries of each line. Their names are part of the public interface.
object!(Output as output {
    type: output.content.name(),
    level: output.level.name(),
    time: rfc3339(output.time),
    pid, thread, thread_name, device, module,
    file: output.at.as_ref().map(SourceLine::file),
    line: output.at.as_ref().map(SourceLine::line);
    flatten output.content
});

impl Content {
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
fn measured<T>(trace: &Trace, value: T) -> Option<T> {
    trace.is_measured().then_some(value)
}

object!(Report as report {
    outer, ctx, subctx;
    flatten Figures(&report.trace);
    unless_empty lines
});

object!(Trace as trace { device; flatten Figures(trace) });

/// A trace in a report, whose line has the device among its first entries.
struct Figures<'a>(&'a Trace);

object!(Figures<'_> as values {
    simulated: values.0.simulated,
    gauge: values.0.gauge,
    source: values.0.source,
    used: measured(values.0, values.0.used),
    peaked: measured(values.0, values.0.peaked),
    peak_over_start: measured(values.0, values.0.peak_over_start()),
    sampling: values.0.sampling,
    untracked_frees: values.0.untracked,
    lost_events: values.0.lost,
    shared: values.0.shared,
    allocated_on: values.0.allocated_on,
});

object!(Line as line {
    line: line.number,
    source,
    used: measured(&line.trace, line.trace.used),
    peaked: measured(&line.trace, line.trace.peaked),
    total: measured(&line.trace, line.total),
});

object!(Sampling as sampling {
    every_us: micros(sampling.every),
    readings,
    longest_gap_us: micros(sampling.longest_gap),
});

object!(GpuMemory as memory { total, free, used, reserved });
