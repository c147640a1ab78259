//! Everything that gpumem prints, as JSON objects. Bytes are exact; what was not measured is `null`.

use serde_core::ser::SerializeMap;

use super::object::{Object, object};
use super::{
    super::time::rfc3339,
    holders::{LeaksLine, OutOfMemoryLine, PeaksLine},
    json_line, microseconds,
    tracked::TrackedLine,
};
use crate::{
    model::Sampling,
    report::{self, Content, Output, Report, SourceLine},
};

object! {
    /// The first entries of each line. Their names are part of the public interface.
    struct OutputLine<'a> {
        r#type: &'static str,
        level: &'static str,
        time: String,
        pid: u32,
        thread: Option<u32>,
        thread_name: Option<&'a str>,
        device: Option<u32>,
        module: Option<&'a str>,
        file: Option<&'a str>,
        line: Option<u32>;
        flatten content: ContentLine<'a>
    }
}

enum ContentLine<'a> {
    Trace(TraceLine<'a>),
    Tracked(TrackedLine<'a>),
    OutOfMemory(OutOfMemoryLine<'a>),
    Leaks(LeaksLine<'a>),
    Peaks(PeaksLine<'a>),
    Text { text: &'a str },
}

impl Object for ContentLine<'_> {
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        match self {
            Self::Trace(line) => line.entries(map),
            Self::Tracked(line) => line.entries(map),
            Self::OutOfMemory(line) => line.entries(map),
            Self::Leaks(line) => line.entries(map),
            Self::Peaks(line) => line.entries(map),
            Self::Text { text } => map.serialize_entry("text", text),
        }
    }
}

/// A JSON object, without a line break at the end.
pub(in crate::export) fn output(output: &Output) -> String {
    let Output { level, time, pid, thread, thread_name, device, module, at, content } = output;
    let line = OutputLine {
        r#type: content.name(),
        level: level.name(),
        time: rfc3339(*time),
        pid: *pid,
        thread: *thread,
        thread_name: thread_name.as_deref(),
        device: *device,
        module: module.as_deref(),
        file: at.as_ref().map(SourceLine::file),
        line: at.as_ref().map(SourceLine::line),
        content: match content {
            Content::Trace(report) => ContentLine::Trace(TraceLine::new(report)),
            Content::Tracked(tracked) => ContentLine::Tracked(TrackedLine::new(tracked)),
            Content::OutOfMemory(oom) => ContentLine::OutOfMemory(OutOfMemoryLine::new(oom)),
            Content::Leaks(leaks) => ContentLine::Leaks(LeaksLine::new(leaks)),
            Content::Peaks(peaks) => ContentLine::Peaks(PeaksLine::new(peaks)),
            Content::Budget(text) | Content::Notice(text) => ContentLine::Text { text },
        },
    };
    json_line(&line)
}

object! {
    struct TraceLine<'a> {
        ctx: Option<&'a str>,
        subctx: Option<&'a str>,
        simulated: bool,
        gauge: &'static str,
        source: &'static str,
        used: Option<i64>,
        peaked: Option<u64>,
        peak_over_start: Option<u64>,
        sampling: Option<SamplingLine>,
        untracked_frees: u64,
        lost_events: u64,
        overlapped: bool,
        own_scope: bool,
        allocated_on: Option<u32>;
        unless_empty lines: Vec<Statement<'a>>
    }
}

impl<'a> TraceLine<'a> {
    fn new(report: &'a Report) -> Self {
        let trace = &report.trace;
        let measured = trace.is_measured();
        Self {
            ctx: report.ctx.as_deref(),
            subctx: report.subctx.as_deref(),
            simulated: trace.simulated,
            gauge: trace.gauge.name(),
            source: trace.source.name(),
            used: measured.then(|| trace.used.get()),
            peaked: measured.then(|| trace.peaked.get()),
            peak_over_start: measured.then(|| trace.peak_over_start().get()),
            sampling: trace.sampling.map(|Sampling { every, readings, longest_gap }| SamplingLine {
                every_us: microseconds(every),
                readings,
                longest_gap_us: microseconds(longest_gap),
            }),
            untracked_frees: trace.untracked,
            lost_events: trace.lost,
            overlapped: trace.overlapped,
            own_scope: trace.own_scope,
            allocated_on: trace.allocated_on,
            lines: report.lines.iter().map(Statement::new).collect(),
        }
    }
}

object! {
    struct Statement<'a> {
        line: u32,
        source: &'a str,
        used: Option<i64>,
        peaked: Option<u64>,
        total: Option<i64>,
    }
}

impl<'a> Statement<'a> {
    fn new(line: &'a report::Line) -> Self {
        let measured = line.trace.is_measured();
        Self {
            line: line.number,
            source: &line.source,
            used: measured.then(|| line.trace.used.get()),
            peaked: measured.then(|| line.trace.peaked.get()),
            total: measured.then(|| line.total.get()),
        }
    }
}

object! {
    struct SamplingLine {
        every_us: u64,
        readings: u64,
        longest_gap_us: u64,
    }
}

#[cfg(test)]
mod tests;
