//! Everything that gpumem prints, as JSON objects. Bytes are exact; what was not measured is `null`.

use serde::Serialize;

use super::{json::microseconds, places_json::BreakdownObject, time::rfc3339};
use crate::{
    model::{Bytes, Sampling},
    report::{
        self, Change, Content, Leaks, OutOfMemory, Output, PeakHolders, Peaks, Place, Report, SourceLine, Tracked,
    },
};

/// What each line begins with. The wire form: its names are a promise, those of the types inside are not.
#[derive(Serialize)]
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
    line: Option<u32>,
    #[serde(flatten)]
    content: ContentLine<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ContentLine<'a> {
    Trace(Line<'a>),
    Tracked(TrackedLine<'a>),
    OutOfMemory(OutOfMemoryLine<'a>),
    Leaks(LeaksLine<'a>),
    Peaks(PeaksLine<'a>),
    Text { text: &'a str },
}

/// A JSON object, without a line break at the end.
pub(super) fn output(output: &Output) -> String {
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
            Content::Trace(report) => ContentLine::Trace(Line::new(report)),
            Content::Tracked(tracked) => ContentLine::Tracked(TrackedLine::new(tracked)),
            Content::OutOfMemory(oom) => ContentLine::OutOfMemory(OutOfMemoryLine::new(oom)),
            Content::Leaks(leaks) => ContentLine::Leaks(LeaksLine::new(leaks)),
            Content::Peaks(peaks) => ContentLine::Peaks(PeaksLine::new(peaks)),
            Content::Budget(text) | Content::Notice(text) => ContentLine::Text { text },
        },
    };
    // Words and figures can always be written.
    serde_json::to_string(&line).unwrap_or_default()
}

#[derive(Serialize)]
struct Line<'a> {
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<Statement<'a>>,
}

impl<'a> Line<'a> {
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
            lines: report.lines.iter().map(Statement::new).collect(),
        }
    }
}

#[derive(Serialize)]
struct OutOfMemoryLine<'a> {
    asked: u64,
    kind: &'static str,
    scopes: &'a [String],
    breakdown: Option<BreakdownObject<'a>>,
    why_no_breakdown: Option<String>,
    largest_scopes: Vec<PlaceLine<'a>>,
    largest_places: Vec<PlaceLine<'a>>,
    peak: Option<PeakLine<'a>>,
}

impl<'a> OutOfMemoryLine<'a> {
    fn new(oom: &'a OutOfMemory) -> Self {
        Self {
            asked: oom.asked.get(),
            kind: oom.kind.name(),
            scopes: &oom.path,
            breakdown: oom.breakdown.as_ref().ok().map(BreakdownObject::new),
            why_no_breakdown: oom.breakdown.as_ref().err().map(ToString::to_string),
            largest_scopes: oom.scopes.iter().map(PlaceLine::new).collect(),
            largest_places: oom.places.iter().map(PlaceLine::new).collect(),
            peak: oom.peak.as_ref().map(PeakLine::new),
        }
    }
}

#[derive(Serialize)]
struct PlaceLine<'a> {
    name: &'a str,
    caller: Option<&'a str>,
    blocks: u64,
    bytes: u64,
    bytes_each: Option<u64>,
}

impl<'a> PlaceLine<'a> {
    fn new(place: &'a Place) -> Self {
        let Place { name, caller, blocks, bytes, each } = place;
        Self { name, caller: caller.as_deref(), blocks: *blocks, bytes: bytes.get(), bytes_each: each.map(Bytes::get) }
    }
}

#[derive(Serialize)]
struct LeaksLine<'a> {
    blocks: u64,
    bytes: u64,
    places: Vec<PlaceLine<'a>>,
    gone_with_context: u64,
    intercepted: bool,
}

impl<'a> LeaksLine<'a> {
    fn new(leaks: &'a Leaks) -> Self {
        Self {
            blocks: leaks.blocks,
            bytes: leaks.bytes.get(),
            places: leaks.places.iter().map(PlaceLine::new).collect(),
            gone_with_context: leaks.gone,
            intercepted: leaks.is_intercepted,
        }
    }
}

#[derive(Serialize)]
struct PeaksLine<'a> {
    devices: Vec<PeakLine<'a>>,
    intercepted: bool,
}

impl<'a> PeaksLine<'a> {
    fn new(peaks: &'a Peaks) -> Self {
        Self { devices: peaks.devices.iter().map(PeakLine::new).collect(), intercepted: peaks.is_intercepted }
    }
}

#[derive(Serialize)]
struct PeakLine<'a> {
    device: u32,
    simulated: bool,
    bytes: u64,
    over_start: bool,
    holders: Vec<HolderLine<'a>>,
    untracked_frees: u64,
    lost_events: u64,
}

#[derive(Serialize)]
struct HolderLine<'a> {
    scopes: &'a [String],
    scope_place: Option<&'a str>,
    library: Option<&'a str>,
    line: Option<&'a str>,
    caller: Option<&'a str>,
    older: bool,
    bytes: i64,
}

impl<'a> PeakLine<'a> {
    fn new(peak: &'a PeakHolders) -> Self {
        let holders = peak.holders.iter().map(|holder| HolderLine {
            scopes: &holder.path,
            scope_place: holder.scope_place.as_deref(),
            library: holder.library.as_deref(),
            line: holder.line.as_deref(),
            caller: holder.caller.as_deref(),
            older: holder.is_older,
            bytes: holder.bytes.get(),
        });
        Self {
            device: peak.device,
            simulated: peak.simulated,
            bytes: peak.bytes.get(),
            over_start: peak.is_over_start,
            holders: holders.collect(),
            untracked_frees: peak.untracked,
            lost_events: peak.lost,
        }
    }
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

#[derive(Serialize)]
struct TrackedLine<'a> {
    word: Option<&'a str>,
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

impl<'a> TrackedLine<'a> {
    fn new(tracked: &'a Tracked) -> Self {
        Self {
            word: tracked.word.as_deref(),
            simulated: tracked.simulated,
            used: tracked.used.map(Bytes::get),
            live: tracked.live.map(Bytes::get),
            changes: tracked.changes.as_ref().map(|changes| changes.iter().map(ChangeLine::of).collect()),
            lost_events: tracked.lost,
        }
    }
}

impl<'a> ChangeLine<'a> {
    fn of(change: &'a Change) -> Self {
        Self {
            count: change.count,
            bytes_each: change.each.get(),
            bytes: change.total().get(),
            kind: change.kind.name(),
            dtype: change.dtype.as_deref(),
            shape: change.shape.as_deref(),
            names: change.names.iter().map(|(name, count)| NameLine { name, count: *count }).collect(),
            scopes: change.dtype.is_none().then_some(&change.path),
            line: change.line.as_deref(),
            library: change.library.as_deref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use serde_json::{Value, json};

    use super::*;
    use crate::{
        error::Kind,
        model::{ByteDelta, Device, Family, Gauge, MemKind, Source, Trace},
        report::{LiveBlock, PeakHolder},
    };

    fn written(content: Content) -> String {
        output(&Output::new(content, UNIX_EPOCH + Duration::from_secs(1_537_019_943), 7))
    }

    fn parsed(content: Content) -> Value {
        let line = written(content);
        assert_eq!(line.lines().count(), 1, "{line}");
        serde_json::from_str(&line).unwrap()
    }

    fn of_report(report: Report) -> Value {
        parsed(Content::Trace(report))
    }

    #[test]
    fn each_line_has_a_type_a_time_a_process_and_a_thread() {
        let trace = Report::new(Trace::off(0), None, None);
        let at = SourceLine::new("src/train.rs", 12, 9);
        let device = Device { family: Family::Cuda, ordinal: 1 };
        let peaks = Peaks::new(Vec::new(), true);
        for (content, name, level) in [
            (Content::Trace(trace), "trace", "info"),
            (Content::Tracked(Tracked::at(UNIX_EPOCH, at, None, device)), "tracked", "info"),
            (Content::OutOfMemory(Box::new(oom())), "out_of_memory", "error"),
            (Content::Leaks(Leaks::of(&[])), "leaks", "warning"),
            (Content::Peaks(peaks), "peaks", "info"),
            (Content::Budget("text".to_owned()), "budget", "warning"),
            (Content::Notice("text".to_owned()), "notice", "warning"),
        ] {
            let mut output = Output::new(content, UNIX_EPOCH, 7);
            output.thread = Some(3);
            output.thread_name = Some("main".to_owned());
            let line: Value = serde_json::from_str(&super::output(&output)).unwrap();
            assert_eq!((&line["type"], &line["level"], &line["pid"]), (&json!(name), &json!(level), &json!(7)));
            assert_eq!((&line["thread"], &line["thread_name"]), (&json!(3), &json!("main")), "{line}");
            assert_eq!(line["time"], "1970-01-01T00:00:00.000000Z");
        }
    }

    fn oom() -> OutOfMemory {
        OutOfMemory {
            device: 1,
            asked: Bytes::mib(3),
            kind: MemKind::Pool,
            path: vec!["train".to_owned()],
            line: Some("src/train.rs:12:9".to_owned()),
            breakdown: Err(Kind::Forked.into()),
            scopes: Vec::new(),
            places: vec![Place {
                name: "src/a.rs:1".to_owned(),
                caller: None,
                blocks: 2,
                bytes: Bytes::mib(2),
                each: Some(Bytes::mib(1)),
            }],
            peak: None,
        }
    }

    #[test]
    fn out_of_memory_has_the_line_that_asked() {
        let line = parsed(Content::OutOfMemory(Box::new(oom())));
        assert_eq!((&line["file"], &line["line"], &line["device"]), (&json!("src/train.rs"), &json!(12), &json!(1)));
        assert_eq!(
            (&line["asked"], &line["kind"], &line["scopes"]),
            (&json!(3 << 20), &json!("pool"), &json!(["train"]))
        );
        assert!(line["breakdown"].is_null() && line["why_no_breakdown"].is_string(), "{line}");
        let place = json!({"name": "src/a.rs:1", "caller": null, "blocks": 2, "bytes": 2 << 20, "bytes_each": 1 << 20});
        assert_eq!(line["largest_places"], json!([place]));
    }

    #[test]
    fn what_is_left_and_what_was_most_are_lists() {
        let block = LiveBlock {
            key: 1,
            device: 0,
            simulated: false,
            bytes: Bytes::new(7),
            kind: MemKind::Device,
            path: Vec::new(),
            scope_place: None,
            line: Some("src/a.rs:1".to_owned()),
            caller: None,
            library: None,
            backtrace: Vec::new(),
            thread: 1,
            time: Duration::ZERO,
        };
        let line = parsed(Content::Leaks(Leaks::of(&[block])));
        assert_eq!((&line["blocks"], &line["bytes"], &line["places"][0]["bytes"]), (&json!(1), &json!(7), &json!(7)));
        let holder = PeakHolder { path: vec!["a".to_owned()], bytes: ByteDelta::new(-2), ..PeakHolder::default() };
        let peak = PeakHolders {
            device: 1,
            simulated: true,
            bytes: Bytes::new(5),
            is_over_start: false,
            holders: vec![holder],
            untracked: 0,
            lost: 3,
        };
        let line = parsed(Content::Peaks(Peaks::new(vec![peak], true)));
        let device = &line["devices"][0];
        assert_eq!((&device["device"], &device["bytes"], &device["lost_events"]), (&json!(1), &json!(5), &json!(3)));
        assert_eq!((&device["holders"][0]["scopes"], &device["holders"][0]["bytes"]), (&json!(["a"]), &json!(-2)));
    }

    #[test]
    fn figures_are_exact_and_words_are_escaped() {
        let source = Source::Cupti;
        let (used, peaked) = (ByteDelta::new(-1), Bytes::new(5));
        let trace = Trace { gauge: Gauge::Exact, source, used, peaked, ..Trace::off(2) };
        let line = written(Content::Trace(Report::new(trace, Some("a \"b\"\n"), None)));
        assert_eq!(
            line,
            "{\"type\":\"trace\",\"level\":\"info\",\"time\":\"2018-09-15T13:59:03.000000Z\",\"pid\":7,\"thread\":null,\
             \"thread_name\":null,\"device\":2,\"module\":null,\"file\":null,\"line\":null,\"ctx\":\"a \\\"b\\\"\\n\",\"subctx\":null,\"simulated\":false,\"gauge\":\"exact\",\
             \"source\":\"cupti\",\"used\":-1,\"peaked\":5,\"peak_over_start\":5,\"sampling\":null,\"untracked_frees\":0,\"lost_events\":0,\"overlapped\":false}"
        );
        let line = written(Content::Trace(Report::new(Trace { overlapped: true, ..trace }, None, None)));
        assert!(line.ends_with("\"lost_events\":0,\"overlapped\":true}"), "{line}");
    }

    #[test]
    fn statements_are_in_the_line_of_their_function() {
        let mut lines = crate::report::Lines::default();
        let trace = Trace { gauge: Gauge::Exact, used: ByteDelta::new(3), peaked: Bytes::new(5), ..Trace::off(0) };
        lines.push(7, "let x = \"a\";", trace);
        let (_, lines) = lines.finish(9, Trace { stale: true, ..trace });
        let line = of_report(Report { lines, ..Report::new(trace, None, None) });
        let expected = json!([
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
            kind: MemKind::Device,
            dtype: Some("f32".to_owned()),
            shape: Some(vec![512, 512]),
            names,
            path: Vec::new(),
            line: None,
            library: None,
        };
        let at = SourceLine::new("src/train.rs", 12, 9);
        let tracked = Tracked::at(UNIX_EPOCH, at, Some("load".to_owned()), device);
        let line =
            parsed(Content::Tracked(Tracked { used: Some(Bytes::mib(3)), changes: Some(vec![change]), ..tracked }));
        assert_eq!((&line["file"], &line["line"], &line["word"]), (&json!("src/train.rs"), &json!(12), &json!("load")));
        assert_eq!((&line["device"], &line["used"], &line["live"]), (&json!(1), &json!(3 << 20), &Value::Null));
        let change = json!({
            "count": -2, "bytes_each": 1 << 20, "bytes": -2 << 20, "kind": "device", "dtype": "f32", "shape": [512, 512],
            "names": [{"name": "w", "count": 2}], "scopes": null, "line": null, "library": null,
        });
        assert_eq!(line["changes"], json!([change]));
    }

    #[test]
    fn what_was_not_measured_is_null() {
        let sampling =
            Some(Sampling { every: Duration::from_millis(1), readings: 3, longest_gap: Duration::from_micros(1500) });
        let stale = Trace { gauge: Gauge::Sampled, stale: true, sampling, ..Trace::off(0) };
        let line = of_report(Report::new(stale, None, None));
        assert!(line["used"].is_null() && line["peaked"].is_null() && line["peak_over_start"].is_null());
        assert_eq!(line["sampling"]["readings"], 3);
        assert_eq!(line["sampling"]["longest_gap_us"], 1500);
    }
}
