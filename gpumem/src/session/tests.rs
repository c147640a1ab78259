//! Several sessions in one process.

#[cfg(feature = "macros")]
mod names;

use std::sync::{Arc, Mutex};

use super::{GpuMemTrace, MemTracker, TestSession, current, label, set_sink, status, summary};
use crate::{
    export::Sink,
    model::{Bytes, Gauge},
};

/// A session whose reports are collected.
fn session(variables: &[(&str, &str)]) -> (TestSession, Arc<Mutex<Vec<String>>>) {
    let session = TestSession::new(variables).unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&lines);
    let sink = Sink::custom(move |output| {
        to.lock().unwrap().extend(output.report().map(ToString::to_string));
    });
    session.run(|| set_sink(sink));
    (session, lines)
}

#[test]
fn sessions_are_independent() {
    let (one, one_lines) = session(&[("GPUMEM_SIM", "1GiB")]);
    let (other, other_lines) = session(&[("GPUMEM_SIM", "2GiB,4GiB")]);
    let gpu = one.add(Bytes::gib(8)).unwrap();
    assert_eq!(gpu.ordinal(), 1);
    let kept = one.run(|| {
        let trace = GpuMemTrace::builder().ctx("load").device(1).start().unwrap();
        let kept = gpu.alloc(Bytes::mib(10)).unwrap();
        // Inside the first session.
        other.run(|| {
            let trace = GpuMemTrace::with_ctx("other");
            assert_eq!((trace.data().used.mb(), summary().scopes.len()), (0, 2));
            assert!(std::ptr::eq(current(), other.run(current)));
        });
        assert_eq!(trace.data().used.mb(), 10);
        kept
    });
    assert_eq!(*one_lines.lock().unwrap(), ["△Used Peaked MB:     10      0 (load: exit)"]);
    assert_eq!(*other_lines.lock().unwrap(), ["△Used Peaked MB:      0      0 (other: exit)"]);
    let paths = |session: &TestSession| {
        session.run(|| summary().scopes.into_iter().map(|scope| scope.path).collect::<Vec<_>>())
    };
    assert_eq!(paths(&one), [vec![], vec!["load".to_owned()]]);
    assert_eq!(paths(&other), [vec![], vec!["other".to_owned()]]);
    drop(kept);
}

/// A guard belongs to the session in which it was created, wherever it is used.
#[test]
fn a_guard_stays_in_its_session() {
    let (session, lines) = session(&[("GPUMEM_SIM", "1GiB")]);
    let gpu = session.add(Bytes::gib(1)).unwrap();
    let mut trace = session.run(|| GpuMemTrace::builder().ctx("step").device(gpu.ordinal()).start().unwrap());
    let handle = trace.handle();
    let block = std::thread::scope(|threads| {
        threads.spawn(|| handle.in_scope(|| gpu.alloc(Bytes::mib(3)))).join().unwrap().unwrap()
    });
    assert_eq!(trace.live().len(), 1);
    trace.report_n_reset();
    drop(trace);
    drop(block);
    let expected = ["△Used Peaked MB:      3      0 (step)", "△Used Peaked MB:      0      0 (step: exit)"];
    assert_eq!(*lines.lock().unwrap(), expected);
}

#[test]
fn settings_are_those_of_the_session() {
    let (off, lines) = session(&[("GPUMEM_SIM", "1GiB"), ("GPUMEM_GAUGE", "off")]);
    off.run(|| {
        let trace = GpuMemTrace::new();
        assert_eq!((trace.data().gauge, status().gauge), (Gauge::Off, Gauge::Off));
    });
    assert!(lines.lock().unwrap().is_empty());
    let (sampled, _) = session(&[("GPUMEM_SIM", "1GiB"), ("GPUMEM_GAUGE", "sampled"), ("GPUMEM_SAMPLE_MS", "7")]);
    let data = sampled.run(|| GpuMemTrace::new().data());
    assert_eq!(data.sampling.unwrap().every.as_millis(), 7);
    assert!(TestSession::new(&[("GPUMEM_SIM", "lots")]).is_err());
}

#[test]
fn labels_and_trackers_are_those_of_the_session() {
    let (one, _) = session(&[]);
    let (other, _) = session(&[]);
    let gpus = [&one, &other].map(|session| session.add(Bytes::gib(1)).unwrap());
    let mut trackers =
        [&one, &other].map(|session| session.run(|| MemTracker::builder().to(std::io::sink()).start().unwrap()));
    let blocks = gpus.map(|gpu| gpu.alloc(Bytes::mib(1)).unwrap());
    assert_eq!(blocks[0].address(), blocks[1].address());
    one.run(|| label("w", &[1], "u8", blocks[0].address())).unwrap();
    let names = trackers.each_mut().map(|tracker| tracker.track().changes.unwrap()[0].names.clone());
    assert_eq!(names, [vec![("w".to_owned(), 1)], vec![]]);
}

#[test]
fn a_filter_is_for_lines_alone() {
    let filter = "off,step=lines,step=every=2,load>=10MiB,request #=lines";
    let (session, lines) = session(&[("GPUMEM_SIM", "1GiB"), ("GPUMEM", filter)]);
    let gpu = session.add(Bytes::gib(1)).unwrap();
    session.run(|| {
        let trace = |ctx: &str| GpuMemTrace::builder().ctx(ctx).device(gpu.ordinal()).start().unwrap();
        let outer = trace("train");
        for _ in 0..3 {
            let step = trace("step");
            drop(gpu.alloc(Bytes::mib(3)).unwrap());
            assert_eq!(step.data().peaked.mb(), 3);
        }
        for mib in [9, 10] {
            let load = trace("load");
            drop(gpu.alloc(Bytes::mib(mib)).unwrap());
            drop(load);
        }
        drop(trace("request 7"));
        outer.report();
        // The scopes are there, whatever is printed.
        assert_eq!(summary().scopes.iter().map(|scope| scope.calls).sum::<u64>(), 1 + 3 + 2 + 1);
    });
    let expected = [
        "△Used Peaked MB:      0      3   (train > step: exit)",
        "△Used Peaked MB:      0      3   (train > step: exit)",
        "△Used Peaked MB:      0     10   (train > load: exit)",
        "△Used Peaked MB:      0      0   (train > request 7: exit)",
    ];
    assert_eq!(*lines.lock().unwrap(), expected);
}

/// The numbers of stacks in a thread's cache are those of the process's session: another session does not use them.
#[test]
#[cfg(feature = "backtrace")]
fn stacks_are_those_of_the_session() {
    let alloc = || {
        let (session, _) = session(&[]);
        let gpu = session.add(Bytes::gib(1)).unwrap();
        let trace = session.run(|| GpuMemTrace::builder().silent(true).start().unwrap());
        let block = gpu.alloc(Bytes::mib(1)).unwrap();
        let live = trace.live();
        drop(block);
        (live[0].backtrace.clone(), session)
    };
    let [(first, _), (second, _)] = [(); 2].map(|()| alloc());
    assert!(!first.is_empty());
    assert!(first == second, "{first:#?}\n{second:#?}");
}
