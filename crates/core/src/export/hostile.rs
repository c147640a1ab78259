//! Tests hostile names in all outputs of the library: a terminal shows them without interpreting them, and JSON parsers get
//! them unchanged.

use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::{
    error::Kind,
    model::{ByteDelta, Bytes, Device, Family, Gauge, GpuMemory, MemKind, Trace},
    report::{
        Breakdown, Change, Content, Leaks, Lines, LiveBlock, NameStats, OutOfMemory, Part, PartKind, PeakHolder,
        PeakHolders, Peaks, Place, PoolAtPeak, RegisteredPool, Report, ScopeSummary, SourceLine, Stats, Summary,
        Tracked,
    },
    testing,
};

const NAME: &str = "x\u{0}\u{1b}[5m\u{1b}]0;t\u{7}\r\t\u{7f}\u{85}\u{9b}2J\u{200b}\u{200e}\u{2028}\u{202e}\u{2066}\u{feff}\"\\\nFORGED: y";

fn name() -> String {
    NAME.to_owned()
}

fn peak() -> PeakHolders {
    let holder = |bytes, path: Vec<String>, line, library| PeakHolder {
        path,
        line,
        library,
        caller: Some(name()),
        scope_place: Some(name()),
        bytes: ByteDelta::new(bytes),
        ..PeakHolder::default()
    };
    let holders = vec![
        holder(3 << 20, vec![name(); 2], Some(name()), None),
        holder(2 << 20, vec![name()], None, Some(name())),
        holder(1 << 20, Vec::new(), None, None),
    ];
    PeakHolders {
        device: 0,
        simulated: false,
        bytes: Bytes::mib(6),
        is_over_start: true,
        holders,
        pools: vec![PoolAtPeak { name: name(), used: Bytes::mib(1), reserved: Bytes::mib(2) }],
        untracked: 1,
        lost: 1,
    }
}

fn block() -> LiveBlock {
    LiveBlock {
        id: 1,
        device: 0,
        simulated: false,
        bytes: Bytes::mib(1),
        kind: MemKind::Device,
        path: vec![name()],
        scope_place: Some(name()),
        line: Some(name()),
        caller: Some(name()),
        library: Some(name()),
        backtrace: vec![name()],
        thread: 1,
        time: Duration::ZERO,
    }
}

fn out_of_memory() -> OutOfMemory {
    let place = Place { name: name(), caller: Some(name()), blocks: 2, bytes: Bytes::mib(2), each: None };
    let part = |kind, path: Vec<String>| Part { kind, name: name(), path, bytes: Bytes::mib(1), count: 2 };
    let parts = vec![
        part(PartKind::Others, Vec::new()),
        part(PartKind::Scope, vec![name()]),
        part(PartKind::Library, Vec::new()),
        part(PartKind::Unknown, Vec::new()),
    ];
    let memory = GpuMemory::new(Bytes::gib(2), Bytes::gib(1), Bytes::gib(1), None);
    OutOfMemory {
        device: 0,
        requested: Bytes::mib(3),
        kind: MemKind::Pool,
        path: vec![name()],
        line: Some(format!("{NAME}:12:9")),
        breakdown: Ok(Breakdown { device: 0, name: Some(name()), simulated: false, memory, parts }),
        scopes: vec![place.clone()],
        places: vec![place],
        peak: Some(peak()),
    }
}

/// Returns the next of the sample contents, one of each kind. The match forces a new kind to be added here.
fn after(content: Option<&Content>) -> Option<Content> {
    let at = SourceLine::new(NAME, 12, 9);
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let trace = Trace { gauge: Gauge::Exact, ..Trace::off(0) };
    Some(match content {
        None => {
            let mut lines = Lines::default();
            lines.push(7, NAME, trace);
            let (_, lines) = lines.finish(9, trace);
            Content::Trace(Report { lines, ..Report::new(trace, Some(NAME), Some(NAME)) })
        }
        Some(Content::Trace(_)) => {
            Content::Stats(Stats::of(vec![NameStats { sampled: 1, ..NameStats::new(name(), 0, false) }]))
        }
        Some(Content::Stats(_)) => {
            let change = |dtype, shape, path| Change {
                count: 2,
                each: Bytes::mib(1),
                kind: MemKind::Device,
                dtype,
                shape,
                names: vec![(name(), 1), (name(), 1)],
                path,
                line: Some(name()),
                library: Some(name()),
            };
            let changes = vec![change(Some(name()), Some(vec![2]), Vec::new()), change(None, None, vec![name()])];
            Content::Tracked(Tracked { changes: Some(changes), ..Tracked::at(UNIX_EPOCH, at, Some(name()), device) })
        }
        Some(Content::Tracked(_)) => Content::OutOfMemory(Box::new(out_of_memory())),
        Some(Content::OutOfMemory(oom)) if oom.breakdown.is_ok() => {
            let breakdown = Err(Kind::BadBaseline { file: name(), detail: name() }.into());
            Content::OutOfMemory(Box::new(OutOfMemory { breakdown, ..out_of_memory() }))
        }
        Some(Content::OutOfMemory(_)) => Content::Leaks(Leaks::of(&[block(), LiveBlock { line: None, ..block() }])),
        Some(Content::Leaks(_)) => Content::Peaks(Peaks::new(vec![peak()], false)),
        Some(Content::Peaks(_)) => Content::Budget(name()),
        Some(Content::Budget(_)) => Content::Notice(name()),
        Some(Content::Notice(_)) => return None,
    })
}

#[track_caller]
fn assert_printable(text: &str) {
    // The colours of `Role`, none of which occurs in the name.
    let codes = ["\u{1b}[0m", "\u{1b}[1m", "\u{1b}[2m", "\u{1b}[31m", "\u{1b}[32m", "\u{1b}[36m"];
    let text = codes.iter().fold(text.to_owned(), |text, code| text.replace(code, ""));
    testing::assert_printable(&text);
    assert!(text.contains("FORGED"), "its names are not there: {text:?}");
}

/// Checks a form of the output. The match forces a new form to be added here.
fn check(form: Form, output: &Output) {
    match form {
        Form::Text => {
            assert_printable(&form.write(output, Paint::PLAIN.in_columns(400)));
            assert_printable(&form.write(output, Paint::ANSI.in_columns(400)));
            let is_short = matches!(output.content, Content::Budget(_) | Content::Notice(_));
            assert!(!is_short || form.write(output, Paint::PLAIN).lines().count() == 1);
        }
        Form::Json => {
            let line = form.write(output, Paint::PLAIN);
            assert_printable(&line);
            assert_eq!(line.lines().count(), 1);
            assert!(testing::has(&serde_json::from_str(&line).unwrap(), NAME), "{line}");
        }
    }
}

#[test]
fn all_that_is_printed() {
    let mut content = after(None);
    while let Some(this) = content {
        content = after(Some(&this));
        let mut output = Output::new(this, UNIX_EPOCH, 7);
        (output.thread_name, output.module) = (Some(name()), Some(name().into()));
        check(Form::Text, &output);
        check(Form::Json, &output);
    }
}

#[test]
fn all_that_a_program_prints_itself() {
    let scope = ScopeSummary {
        path: vec![name(); 2],
        place: Some(name()),
        device: 0,
        simulated: false,
        calls: 2,
        used: Bytes::new(3),
        peak: Bytes::new(4),
        at_peak: Bytes::new(2),
        device_peak: Bytes::new(5),
        allocated: Bytes::new(6),
        allocations: 7,
    };
    let pool = RegisteredPool {
        name: name(),
        device: 0,
        parts: 1,
        used: Bytes::mib(1),
        reserved: Bytes::mib(2),
        reported: Bytes::mib(3),
        unknown_frees: 1,
        doubled: 0,
        outside: 1,
        late: 0,
        read_early: 1,
        below: 1,
        overlapping: 1,
        counted_twice: Bytes::mib(1),
    };
    let summary =
        Summary { scopes: vec![scope], pools: vec![pool], untracked: 8, lost: 9, not_intercepted: Some(name()) };
    let Ok(breakdown) = out_of_memory().breakdown else { unreachable!("it has one") };
    let without_line = LiveBlock { line: None, ..block() };
    for text in [block().to_string(), without_line.to_string(), summary.to_string(), breakdown.to_string()] {
        assert_printable(&text);
    }
    for json in [block().to_json(), summary.to_json(), breakdown.to_json()] {
        assert_printable(&json);
        assert!(testing::has(&serde_json::from_str(&json).unwrap(), NAME), "{json}");
    }
}
