//! A sample of each report, with one name wherever a program or a user may choose it. The figures of a report differ, so that a test
//! finds two that are exchanged.

use std::time::{Duration, UNIX_EPOCH};

use crate::{
    error::Kind,
    model::{ByteDelta, Bytes, Device, Family, Gauge, GpuMemory, MemKind, Sampling, Source, Trace},
    report::{
        Breakdown, Change, Content, InUse, LargestOfDriver, Leaks, Lines, LiveBlock, MeasuredCalls, NameStats,
        OutOfMemory, Part, PartKind, PeakHolder, PeakHolders, Peaks, Place, PoolAtPeak, RegisteredPool, Report,
        ScopeSummary, SourceLine, Spread, Stats, Summary, Tracked, WorstCall,
    },
};

pub(super) fn block(name: &str) -> LiveBlock {
    LiveBlock {
        id: u64::MAX,
        device: 1,
        simulated: false,
        bytes: Bytes::mib(1),
        kind: MemKind::PinnedHost,
        path: vec![name.to_owned()],
        scope_place: Some(name.to_owned()),
        line: Some(name.to_owned()),
        caller: Some(name.to_owned()),
        library: Some(name.to_owned()),
        backtrace: vec![name.to_owned()],
        thread: 3,
        time: Duration::from_millis(100),
    }
}

pub(super) fn peak(name: &str) -> PeakHolders {
    let holder = |bytes: i64, path: usize, line: Option<&str>, library: Option<&str>| PeakHolder {
        path: vec![name.to_owned(); path],
        line: line.map(str::to_owned),
        library: library.map(str::to_owned),
        caller: Some(name.to_owned()),
        scope_place: Some(name.to_owned()),
        bytes: ByteDelta::new(bytes << 20),
        is_older: bytes < 0,
    };
    PeakHolders {
        device: 0,
        simulated: false,
        bytes: Bytes::mib(6),
        is_over_start: true,
        holders: vec![
            holder(3, 2, Some(name), None),
            holder(2, 1, None, Some(name)),
            holder(1, 0, None, None),
            holder(-2, 0, None, None),
        ],
        pools: vec![PoolAtPeak { name: name.to_owned(), used: Bytes::mib(1), reserved: Bytes::mib(2) }],
        untracked: 1,
        lost: 2,
    }
}

fn in_use(name: &str) -> InUse {
    let largest = Some(LargestOfDriver::new(name, Bytes::mib(6)));
    let read = [Some(Bytes::gib(1)), Some(Bytes::gib(3))];
    InUse::of_process(read, Bytes::mib(10), (Some(Bytes::mib(10)), false), largest)
}

pub(super) fn breakdown(name: &str) -> Breakdown {
    let part = |(mib, kind)| Part {
        kind,
        name: name.to_owned(),
        path: if kind == PartKind::Scope { vec![name.to_owned()] } else { Vec::new() },
        bytes: Bytes::mib(mib),
        count: 2,
    };
    let kinds = [
        PartKind::Others,
        PartKind::Scope,
        PartKind::Library,
        PartKind::PoolCache,
        PartKind::RegisteredPool,
        PartKind::Driver,
        PartKind::Unknown,
    ];
    Breakdown {
        device: 0,
        name: Some(name.to_owned()),
        simulated: false,
        memory: GpuMemory::new(Bytes::gib(4), Bytes::gib(1), Bytes::gib(3), None),
        parts: (1..).zip(kinds).map(part).collect(),
        in_use: in_use(name),
    }
}

pub(super) fn out_of_memory(name: &str) -> OutOfMemory {
    let place = Place {
        name: name.to_owned(),
        caller: Some(name.to_owned()),
        blocks: 2,
        bytes: Bytes::mib(2),
        each: Some(Bytes::mib(1)),
    };
    OutOfMemory {
        device: 0,
        requested: Bytes::mib(3),
        kind: MemKind::Pool,
        path: vec![name.to_owned()],
        line: Some(format!("{name}:12:9")),
        breakdown: Ok(breakdown(name)),
        scopes: vec![Place { each: None, ..place.clone() }],
        places: vec![place],
        peak: Some(peak(name)),
    }
}

pub(super) fn pool(name: &str, used: Bytes, reserved: Bytes) -> RegisteredPool {
    RegisteredPool {
        name: name.to_owned(),
        device: 0,
        parts: 1,
        used,
        reserved,
        reported: reserved,
        unknown_frees: 0,
        doubled: 0,
        outside: 0,
        late: 0,
        read_early: 0,
        below: 0,
        overlapping: 0,
        counted_twice: Bytes::ZERO,
    }
}

pub(super) fn summary(name: &str) -> Summary {
    let scope = ScopeSummary {
        path: vec![name.to_owned(); 2],
        place: Some(name.to_owned()),
        device: 1,
        simulated: true,
        calls: 2,
        used: Bytes::new(3),
        peak: Bytes::new(4),
        at_peak: Bytes::new(2),
        device_peak: Bytes::new(5),
        allocated: Bytes::new(6),
        allocations: 7,
    };
    let pool = RegisteredPool {
        reported: Bytes::mib(3),
        unknown_frees: 2,
        doubled: 3,
        outside: 4,
        late: 5,
        read_early: 6,
        below: 7,
        overlapping: 8,
        counted_twice: Bytes::mib(1),
        ..pool(name, Bytes::mib(1), Bytes::mib(2))
    };
    Summary { scopes: vec![scope], pools: vec![pool], untracked: 8, lost: 9, not_intercepted: Some(name.to_owned()) }
}

/// Returns the next of the sample contents, at least one of each kind. The match forces a new kind to be added here.
fn after(content: Option<&Content>, name: &'static str) -> Option<Content> {
    let named = || name.to_owned();
    let trace = Trace {
        gauge: Gauge::Exact,
        source: Source::Cupti,
        used: ByteDelta::new(-1),
        peaked: Bytes::new(5),
        shared: Bytes::mib(1),
        untracked: 2,
        lost: 3,
        ..Trace::off(2)
    };
    Some(match content {
        None => {
            let mut lines = Lines::default();
            lines.push(7, name, Trace { used: ByteDelta::new(3), ..trace });
            let (_, lines) = lines.finish(9, Trace { stale: true, ..trace });
            Content::Trace(Report { lines, ..Report::new(trace, Some(name), Some(name)).inside(vec![named()]) })
        }
        Some(Content::Trace(Report { trace: Trace { stale: false, .. }, .. })) => {
            let (every, longest_gap) = (Duration::from_millis(1), Duration::from_micros(1500));
            let sampling = Some(Sampling { every, readings: 3, longest_gap });
            let gauge = Gauge::Sampled;
            let stale = Trace { gauge, stale: true, sampling, allocated_on: Some(1), ..trace };
            Content::Trace(Report::new(stale, Some(name), None))
        }
        Some(Content::Trace(_)) => {
            let used = Spread::new(-1, 0, 1, 3).map(|mib| ByteDelta::new(mib << 20));
            let peaked = Spread::new(63, 64, 500, 512).map(Bytes::mib);
            let worst = WorstCall::new(250, Some(named()), Duration::from_millis(12_340), Bytes::mib(515));
            let measured = Some(MeasuredCalls::new(used, ByteDelta::new(-5 << 30), peaked, worst));
            let unread = NameStats { calls: 1, unmeasured: 1, ..NameStats::new(named(), 0, true) };
            let measured = NameStats { calls: 9, measured, sampled: 7, doubtful: 2, shared: 3, ..unread.clone() };
            Content::Stats(Stats::of(vec![unread, measured]))
        }
        Some(Content::Stats(_)) => {
            let of_label = Change {
                count: -2,
                each: Bytes::mib(1),
                kind: MemKind::Device,
                dtype: Some(named()),
                shape: Some(vec![2, 512]),
                names: vec![(named(), 1), (named(), 3)],
                path: Vec::new(),
                line: Some(named()),
                library: Some(named()),
            };
            let of_scope = Change { dtype: None, shape: None, path: vec![named()], ..of_label.clone() };
            let (used, changes) = (Some(Bytes::mib(3)), Some(vec![of_label, of_scope]));
            let at = SourceLine::new(named(), 12, 9);
            let device = Device { family: Family::Cuda, ordinal: 1 };
            Content::Tracked(Tracked { used, changes, lost: 4, ..Tracked::at(UNIX_EPOCH, at, Some(named()), device) })
        }
        Some(Content::Tracked(_)) => Content::OutOfMemory(Box::new(out_of_memory(name))),
        Some(Content::OutOfMemory(oom)) if oom.breakdown.is_ok() => {
            let breakdown = Err(Kind::BadBaseline { file: named(), detail: named() }.into());
            Content::OutOfMemory(Box::new(OutOfMemory { breakdown, ..out_of_memory(name) }))
        }
        Some(Content::OutOfMemory(_)) => {
            let blocks = [block(name), LiveBlock { line: None, ..block(name) }];
            Content::Leaks(Leaks { gone: 5, ..Leaks::of(&blocks) })
        }
        Some(Content::Leaks(_)) => Content::Peaks(Peaks::new(vec![peak(name)], false)),
        Some(Content::Peaks(_)) => Content::Budget(named()),
        Some(Content::Budget(_)) => Content::Notice(named()),
        Some(Content::Notice(_)) => return None,
    })
}

/// Returns sample contents, at least one of each kind.
pub(super) fn contents(name: &'static str) -> Vec<Content> {
    std::iter::successors(after(None, name), |content| after(Some(content), name)).collect()
}
