//! A JSON object a line. Bytes are exact; what was not measured is `null`.

use std::{io, time::Duration};

use serde::Serialize;

use crate::{
    model::{Bytes, Sampling},
    report::{self, AllocStats, Change, LiveBlock, MemoryStats, Report, ReservedStats, Tally, Tracked},
};

/// The wire form: its names are a promise, those of the types inside are not.
#[derive(Serialize)]
struct Line<'a> {
    ctx: Option<&'a str>,
    subctx: Option<&'a str>,
    device: u32,
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<Statement<'a>>,
}

#[derive(Serialize)]
struct Statement<'a> {
    line: u32,
    source: &'a str,
    used: Option<i64>,
    peaked: Option<u64>,
    total: Option<i64>,
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

#[derive(Serialize)]
struct SamplingLine {
    every_us: u64,
    readings: u64,
    longest_gap_us: u64,
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[derive(Serialize)]
struct TrackedLine<'a> {
    tracked_at: String,
    word: Option<&'a str>,
    device: u32,
    simulated: bool,
    used: Option<u64>,
    live: Option<u64>,
    changes: Option<Vec<ChangeLine<'a>>>,
    lost_events: u64,
}

#[derive(Serialize)]
struct ChangeLine<'a> {
    count: i64,
    bytes_each: u64,
    bytes: i64,
    kind: &'static str,
    dtype: Option<&'a str>,
    shape: Option<&'a [usize]>,
    names: Vec<NameLine<'a>>,
    scopes: Option<&'a [String]>,
    line: Option<&'a str>,
    library: Option<&'a str>,
}

#[derive(Serialize)]
struct NameLine<'a> {
    name: &'a str,
    count: u64,
}

pub(super) fn write_tracked(tracked: &Tracked, to: &mut dyn io::Write) -> io::Result<()> {
    let line = TrackedLine {
        tracked_at: tracked.at.to_string(),
        word: tracked.word.as_deref(),
        device: tracked.device,
        simulated: tracked.simulated,
        used: tracked.used.map(Bytes::get),
        live: tracked.live.map(Bytes::get),
        changes: tracked.changes.as_ref().map(|changes| changes.iter().map(ChangeLine::of).collect()),
        lost_events: tracked.lost,
    };
    serde_json::to_writer(&mut *to, &line)?;
    writeln!(to)
}

impl<'a> ChangeLine<'a> {
    fn of(change: &'a Change) -> Self {
        Self {
            count: change.count,
            bytes_each: change.each.get(),
            bytes: change.total().get(),
            kind: change.kind,
            dtype: change.dtype.as_deref(),
            shape: change.shape.as_deref(),
            names: change.names.iter().map(|(name, count)| NameLine { name, count: *count }).collect(),
            scopes: change.dtype.is_none().then_some(&change.path),
            line: change.line.as_deref(),
            library: change.library.as_deref(),
        }
    }
}

pub(super) fn write(report: &Report, to: &mut dyn io::Write) -> io::Result<()> {
    let trace = &report.trace;
    let measured = trace.is_measured();
    let line = Line {
        ctx: report.ctx.as_deref(),
        subctx: report.subctx.as_deref(),
        device: trace.device,
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
        lines: report.lines.iter().map(Statement::new).collect(),
    };
    serde_json::to_writer(&mut *to, &line)?;
    writeln!(to)
}

/// Under the names that PyTorch's `memory_stats_as_nested_dict` has.
#[derive(Serialize)]
struct StatsLine<'a> {
    device: u32,
    simulated: bool,
    heard_by: &'a str,
    since_us: u64,
    untracked_frees: u64,
    lost_events: u64,
    allocated_bytes: KindsLine,
    allocation: KindsLine,
    reserved_bytes: Option<ReservedLine>,
}

#[derive(Serialize)]
struct KindsLine {
    all: TallyLine,
    device: TallyLine,
    pool: TallyLine,
    vmm: TallyLine,
    graph: TallyLine,
    managed: TallyLine,
    pinned_host: TallyLine,
}

#[derive(Serialize)]
struct TallyLine {
    current: u64,
    peak: u64,
    allocated: u64,
    freed: u64,
}

#[derive(Serialize)]
struct ReservedLine {
    current: u64,
    peak_at_least: u64,
    peak_at_most: u64,
}

impl KindsLine {
    fn new(stats: &MemoryStats, line: impl Fn(&AllocStats) -> TallyLine) -> Self {
        let [all, device, pool, vmm, graph, managed, pinned_host] = stats.named().map(|(_, stats)| line(stats));
        Self { all, device, pool, vmm, graph, managed, pinned_host }
    }
}

impl TallyLine {
    fn bytes(stats: &AllocStats) -> Self {
        let Tally { current, peak, allocated, freed } = stats.bytes;
        let [current, peak, allocated, freed] = [current, peak, allocated, freed].map(Bytes::get);
        Self { current, peak, allocated, freed }
    }

    fn blocks(stats: &AllocStats) -> Self {
        let Tally { current, peak, allocated, freed } = stats.blocks;
        Self { current, peak, allocated, freed }
    }
}

impl MemoryStats {
    /// As a JSON object on one line, nested as PyTorch's `memory_stats_as_nested_dict`:
    /// `{"device":0, …, "allocated_bytes":{"all":{"current":335544320, …`. What could not be read is `null`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let MemoryStats { device, simulated, since, untracked, lost, .. } = *self;
        let reserved_bytes = self.reserved.map(|ReservedStats { current, peak }| ReservedLine {
            current: current.get(),
            peak_at_least: peak.at_least.get(),
            peak_at_most: peak.at_most.get(),
        });
        let line = StatsLine {
            device,
            simulated,
            heard_by: &self.heard_by,
            since_us: microseconds(since),
            untracked_frees: untracked,
            lost_events: lost,
            allocated_bytes: KindsLine::new(self, TallyLine::bytes),
            allocation: KindsLine::new(self, TallyLine::blocks),
            reserved_bytes,
        };
        // Plain figures can always be written.
        serde_json::to_string(&line).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct BlockLine<'a> {
    key: u64,
    bytes: u64,
    device: u32,
    simulated: bool,
    kind: &'static str,
    path: &'a [String],
    scope_place: Option<&'a str>,
    line: Option<&'a str>,
    caller: Option<&'a str>,
    library: Option<&'a str>,
    backtrace: &'a [String],
    thread: u32,
    time_us: u64,
}

impl LiveBlock {
    /// As a JSON object on one line.
    #[must_use]
    pub fn to_json(&self) -> String {
        let line = BlockLine {
            key: self.key,
            bytes: self.bytes.get(),
            device: self.device,
            simulated: self.simulated,
            kind: self.kind,
            path: &self.path,
            scope_place: self.scope_place.as_deref(),
            line: self.line.as_deref(),
            caller: self.caller.as_deref(),
            library: self.library.as_deref(),
            backtrace: &self.backtrace,
            thread: self.thread,
            time_us: microseconds(self.time),
        };
        // Words and figures can always be written.
        serde_json::to_string(&line).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        export::JSON,
        model::{ByteDelta, Device, Family, Gauge, Source, Trace},
        report::KindStats,
    };

    #[test]
    fn figures_are_exact_and_words_are_escaped() {
        let source = Source::Cupti;
        let (used, peaked) = (ByteDelta::new(-1), Bytes::new(5));
        let trace = Trace { gauge: Gauge::Exact, source, used, peaked, ..Trace::off(2) };
        let line = JSON.line(&Report::new(trace, Some("a \"b\"\n"), None));
        assert_eq!(
            line,
            "{\"ctx\":\"a \\\"b\\\"\\n\",\"subctx\":null,\"device\":2,\"simulated\":false,\"gauge\":\"exact\",\
             \"source\":\"cupti\",\"used\":-1,\"peaked\":5,\"peak_over_start\":5,\"sampling\":null,\"untracked_frees\":0,\"lost_events\":0,\"overlapped\":false}\n"
        );
        let line = JSON.line(&Report::new(Trace { overlapped: true, ..trace }, None, None));
        assert!(line.ends_with("\"lost_events\":0,\"overlapped\":true}\n"), "{line}");
    }

    #[test]
    fn statements_are_in_the_line_of_their_function() {
        let mut lines = crate::report::Lines::default();
        let trace = Trace { gauge: Gauge::Exact, used: ByteDelta::new(3), peaked: Bytes::new(5), ..Trace::off(0) };
        lines.push(7, "let x = \"a\";", trace);
        let (_, lines) = lines.finish(9, Trace { stale: true, ..trace });
        let line = JSON.line(&Report { lines, ..Report::new(trace, None, None) });
        assert_eq!(line.lines().count(), 1);
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        let expected = serde_json::json!([
            {"line": 7, "source": "let x = \"a\";", "used": 3, "peaked": 5, "total": 3},
            {"line": 9, "source": "}", "used": null, "peaked": null, "total": null},
        ]);
        assert_eq!(line["lines"], expected);
    }

    #[test]
    fn what_a_tracker_saw_is_a_line() {
        let device = Device { family: Family::Cuda, ordinal: 1 };
        let names = vec![("w".to_owned(), 2)];
        let change = Change {
            count: -2,
            each: Bytes::mib(1),
            kind: "device",
            dtype: Some("f32".to_owned()),
            shape: Some(vec![512, 512]),
            names,
            path: Vec::new(),
            line: None,
            library: None,
        };
        let tracked = Tracked::at(std::panic::Location::caller().into(), None, device);
        let tracked = Tracked { used: Some(Bytes::mib(3)), changes: Some(vec![change]), ..tracked };
        let line = JSON.tracked(&tracked);
        assert_eq!(
            line.split_once(".rs:").unwrap().1.split_once('"').unwrap().1,
            ",\"word\":null,\"device\":1,\"simulated\":false,\"used\":3145728,\"live\":null,\"changes\":[{\"count\":-2,\
             \"bytes_each\":1048576,\"bytes\":-2097152,\"kind\":\"device\",\"dtype\":\"f32\",\"shape\":[512,512],\
             \"names\":[{\"name\":\"w\",\"count\":2}],\"scopes\":null,\"line\":null,\"library\":null}],\"lost_events\":0}\n"
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

    #[test]
    fn statistics_are_nested_as_in_pytorch() {
        let bytes =
            Tally { current: Bytes::new(7), peak: Bytes::new(9), allocated: Bytes::new(20), freed: Bytes::new(13) };
        let vmm = AllocStats { bytes, blocks: Tally { current: 1, peak: 2, allocated: 4, freed: 3 } };
        let kinds = KindStats { vmm, ..KindStats::default() };
        let stats = MemoryStats {
            device: 2,
            simulated: true,
            heard_by: "the \"simulated\" device".to_owned(),
            since: Duration::from_millis(5),
            untracked: 1,
            lost: 0,
            all: vmm,
            kinds,
            reserved: Some(ReservedStats::new(&kinds, None)),
        };
        let zeros = "{\"current\":0,\"peak\":0,\"allocated\":0,\"freed\":0}";
        let kinds = |vmm| {
            format!(
                "{{\"all\":{vmm},\"device\":{zeros},\"pool\":{zeros},\"vmm\":{vmm},\"graph\":{zeros},\"managed\":{zeros},\
                 \"pinned_host\":{zeros}}}"
            )
        };
        let expected = format!(
            "{{\"device\":2,\"simulated\":true,\"heard_by\":\"the \\\"simulated\\\" device\",\"since_us\":5000,\
             \"untracked_frees\":1,\"lost_events\":0,\"allocated_bytes\":{},\"allocation\":{},\
             \"reserved_bytes\":{{\"current\":7,\"peak_at_least\":9,\"peak_at_most\":9}}}}",
            kinds("{\"current\":7,\"peak\":9,\"allocated\":20,\"freed\":13}"),
            kinds("{\"current\":1,\"peak\":2,\"allocated\":4,\"freed\":3}"),
        );
        assert_eq!(stats.to_json(), expected);
        let unread = MemoryStats { reserved: None, ..stats }.to_json();
        assert!(unread.ends_with("\"reserved_bytes\":null}"), "{unread}");
    }

    #[test]
    fn a_block_is_a_line() {
        let block = LiveBlock {
            key: u64::MAX,
            device: 1,
            simulated: false,
            bytes: Bytes::new(7),
            kind: "pinned host",
            path: vec!["epoch 1".to_owned(), "a \"b\"\n".to_owned()],
            scope_place: Some("src/train.rs:12".to_owned()),
            line: None,
            caller: None,
            library: Some("cuBLAS".to_owned()),
            backtrace: Vec::new(),
            thread: 3,
            time: Duration::from_millis(100),
        };
        assert_eq!(
            block.to_json(),
            "{\"key\":18446744073709551615,\"bytes\":7,\"device\":1,\"simulated\":false,\"kind\":\"pinned host\",\
             \"path\":[\"epoch 1\",\"a \\\"b\\\"\\n\"],\"scope_place\":\"src/train.rs:12\",\"line\":null,\
             \"caller\":null,\"library\":\"cuBLAS\",\"backtrace\":[],\"thread\":3,\"time_us\":100000}"
        );
    }
}
