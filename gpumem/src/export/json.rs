//! A JSON object a line. Bytes are exact; what was not measured is `null`.

use std::{io, time::Duration};

use serde::Serialize;

use crate::{
    model::Sampling,
    report::{self, Report},
};

/// The wire form: its names are a promise, those of the types inside are not.
#[derive(Serialize)]
struct Line<'a> {
    ctx: Option<&'a str>,
    subctx: Option<&'a str>,
    device: u32,
    simulated: bool,
    gauge: &'static str,
    used: Option<i64>,
    peaked: Option<u64>,
    peak_over_start: Option<u64>,
    sampling: Option<SamplingLine>,
    untracked_frees: u64,
    lost_events: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<Statement>,
}

#[derive(Serialize)]
struct Statement {
    line: u32,
    source: &'static str,
    used: Option<i64>,
    peaked: Option<u64>,
    total: Option<i64>,
}

impl Statement {
    fn new(line: &report::Line) -> Self {
        let measured = line.trace.is_measured();
        Self {
            line: line.number,
            source: line.source,
            used: measured.then(|| line.trace.used.get()),
            peaked: measured.then(|| line.trace.peaked.get()),
            total: measured.then(|| line.total.get()),
        }
    }
}

#[derive(Serialize)]
struct SamplingLine {
    every_us: u64,
    readings: u64,
    longest_gap_us: u64,
}

pub(super) fn write(report: &Report, to: &mut dyn io::Write) -> io::Result<()> {
    let trace = &report.trace;
    let measured = trace.is_measured();
    let microseconds = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let line = Line {
        ctx: report.ctx.as_deref(),
        subctx: report.subctx.as_deref(),
        device: trace.device,
        simulated: trace.simulated,
        gauge: trace.gauge.name(),
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
        lines: report.lines.iter().map(Statement::new).collect(),
    };
    serde_json::to_writer(&mut *to, &line)?;
    writeln!(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        export::JSON,
        model::{ByteDelta, Bytes, Gauge, Trace},
    };

    #[test]
    fn figures_are_exact_and_words_are_escaped() {
        let trace = Trace { gauge: Gauge::Exact, used: ByteDelta::new(-1), peaked: Bytes::new(5), ..Trace::off(2) };
        let line = JSON.line(&Report::new(trace, Some("a \"b\"\n"), None));
        assert_eq!(
            line,
            "{\"ctx\":\"a \\\"b\\\"\\n\",\"subctx\":null,\"device\":2,\"simulated\":false,\"gauge\":\"exact\",\
             \"used\":-1,\"peaked\":5,\"peak_over_start\":5,\"sampling\":null,\"untracked_frees\":0,\"lost_events\":0}\n"
        );
    }

    #[test]
    fn what_was_not_measured_is_null() {
        let sampling =
            Some(Sampling { every: Duration::from_millis(1), readings: 3, longest_gap: Duration::from_micros(1500) });
        let stale = Trace { gauge: Gauge::Sampled, stale: true, sampling, ..Trace::off(0) };
        let line: serde_json::Value = serde_json::from_str(&JSON.line(&Report::new(stale, None, None))).unwrap();
        assert!(line["used"].is_null() && line["peaked"].is_null() && line["peak_over_start"].is_null());
        assert_eq!(line["sampling"]["readings"], 3);
        assert_eq!(line["sampling"]["longest_gap_us"], 1500);
    }
}
