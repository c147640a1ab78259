use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use super::{super::json_line, *};
use crate::{
    error::Kind,
    model::{ByteDelta, Bytes, Device, Family, Gauge, MemKind, Source, Trace},
    report::{
        Change, Leaks, LiveBlock, OutOfMemory, PeakHolder, PeakHolders, Peaks, Place, PoolAtPeak, Stats, Tracked,
    },
};

fn written(content: Content) -> String {
    json_line(&Output::new(content, UNIX_EPOCH + Duration::from_secs(1_537_019_943), 7))
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
        (Content::Stats(Stats::default()), "stats", "info"),
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
        let line: Value = serde_json::from_str(&json_line(&output)).unwrap();
        assert_eq!((&line["type"], &line["level"], &line["pid"]), (&json!(name), &json!(level), &json!(7)));
        assert_eq!((&line["thread"], &line["thread_name"]), (&json!(3), &json!("main")), "{line}");
        assert_eq!(line["time"], "1970-01-01T00:00:00.000000Z");
    }
}

fn oom() -> OutOfMemory {
    OutOfMemory {
        device: 1,
        requested: Bytes::mib(3),
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
fn out_of_memory_has_the_line_of_the_allocation() {
    let line = parsed(Content::OutOfMemory(Box::new(oom())));
    assert_eq!((&line["file"], &line["line"], &line["device"]), (&json!("src/train.rs"), &json!(12), &json!(1)));
    assert_eq!(
        (&line["requested"], &line["kind"], &line["scopes"]),
        (&json!(3 << 20), &json!("pool"), &json!(["train"]))
    );
    assert!(line["breakdown"].is_null() && line["why_no_breakdown"].is_string(), "{line}");
    let place = json!({"name": "src/a.rs:1", "caller": null, "blocks": 2, "bytes": 2 << 20, "bytes_each": 1 << 20});
    assert_eq!(line["largest_places"], json!([place]));
}

#[test]
fn what_is_left_and_what_was_most_are_lists() {
    let block = LiveBlock {
        id: 1,
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
        pools: vec![PoolAtPeak { name: "arena".to_owned(), used: Bytes::new(2), reserved: Bytes::new(6) }],
        untracked: 0,
        lost: 3,
    };
    let line = parsed(Content::Peaks(Peaks::new(vec![peak], true)));
    let device = &line["devices"][0];
    assert_eq!((&device["device"], &device["bytes"], &device["lost_events"]), (&json!(1), &json!(5), &json!(3)));
    assert_eq!(device["pools"], json!([{"name": "arena", "used": 2, "reserved": 6}]));
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
         \"thread_name\":null,\"device\":2,\"module\":null,\"file\":null,\"line\":null,\"outer\":[],\"ctx\":\"a \\\"b\\\"\\n\",\"subctx\":null,\"simulated\":false,\"gauge\":\"exact\",\
         \"source\":\"cupti\",\"used\":-1,\"peaked\":5,\"peak_over_start\":5,\"sampling\":null,\"untracked_frees\":0,\"lost_events\":0,\"shared\":0,\"allocated_on\":null}"
    );
    let line = written(Content::Trace(Report::new(Trace { shared: Bytes::mib(1), ..trace }, None, None)));
    assert!(line.ends_with("\"lost_events\":0,\"shared\":1048576,\"allocated_on\":null}"), "{line}");
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
    let line = parsed(Content::Tracked(Tracked { used: Some(Bytes::mib(3)), changes: Some(vec![change]), ..tracked }));
    assert_eq!((&line["file"], &line["line"], &line["ctx"]), (&json!("src/train.rs"), &json!(12), &json!("load")));
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
