//! Tests of the recording of a session. `tests/tests/standin/capture.rs` compares the reports of a program with its recording.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use gpumem_recording::{End, Item, Reader, items_of};
use tempfile::TempDir;

use crate::{
    export::Sink,
    model::{Bytes, EventKind},
    session::{GpuMemTrace, TestSession, set_sink},
};

/// A file that is removed with its folder.
struct Recording(PathBuf, #[expect(dead_code, reason = "it is removed with its file")] TempDir);

impl Recording {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self(folder.path().join("a.capture"), folder)
    }

    fn read(&self) -> Reader<fs::File> {
        let mut reader = Reader::new(fs::File::open(&self.0).unwrap()).unwrap();
        while reader.step().unwrap().is_some() {}
        assert!(reader.skipped().is_nothing(), "{:?}", reader.skipped());
        assert_eq!(reader.end(), Some(&End::Complete));
        reader
    }
}

/// Returns a recorded session.
fn recorded() -> (TestSession, Recording) {
    let recording = Recording::new();
    let path = recording.0.to_str().unwrap();
    (TestSession::new(&[("GPUMEM_CAPTURE", path), ("GPUMEM_SIM", "1GiB,2GiB")]).unwrap(), recording)
}

/// Two scopes on one line differ by their column. The module of functions with an attribute is known.
#[test]
fn callsites_have_their_column_and_module() {
    let (session, recording) = recorded();
    session.add(Bytes::gib(1)).unwrap();
    let trace = || GpuMemTrace::builder().device(2).silent(true);
    let line = line!() + 1;
    session.run(|| [drop(trace().start().unwrap()), drop(trace().start().unwrap())]);
    session.run(|| drop(trace().function("app::train::step::{{closure}}", "app::train").start().unwrap()));
    session.end_recording();
    let (items, _) = items_of(fs::File::open(&recording.0).unwrap()).unwrap();
    let callsites: Vec<_> = items
        .iter()
        .filter_map(|item| if let Item::Callsite(callsite) = item { Some(callsite) } else { None })
        .collect();
    let [first, second, function] = callsites[..] else { panic!("{callsites:?}") };
    assert_eq!((first.line, second.line), (line, line), "{callsites:?}");
    assert!(first.column > 1 && second.column > first.column, "{callsites:?}");
    assert_eq!([&first.module_path, &second.module_path], [&None, &None]);
    assert_eq!(function.module_path.as_deref(), Some("app::train"));
}

/// Many threads post events while the ledger's time is fixed. The recorded times of the events advance.
#[test]
fn events_have_true_times_and_threads() {
    let (session, recording) = recorded();
    let gpu = session.add(Bytes::gib(4)).unwrap();
    session.run(|| {
        let _trace = GpuMemTrace::builder().device(2).silent(true).start().unwrap();
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..50 {
                        drop(gpu.alloc_async(Bytes::kib(64)).unwrap());
                        std::thread::sleep(std::time::Duration::from_micros(50));
                    }
                });
            }
        });
    });
    session.end_recording();
    let (items, _) = items_of(fs::File::open(&recording.0).unwrap()).unwrap();
    let reader = recording.read();
    let events: Vec<_> = items
        .iter()
        .filter_map(|item| match item {
            Item::Event(event) if matches!(event.kind, EventKind::Alloc { .. }) => Some(event),
            _ => None,
        })
        .collect();
    assert_eq!(events.len(), 200);
    let times: Vec<_> = events.iter().map(|event| reader.definitions().time(event.ticks).unwrap()).collect();
    assert!(times.is_sorted_by(|a, b| a < b), "{times:?}");
    assert!(times[199].checked_sub(times[0]) > Some(std::time::Duration::from_micros(50 * 49)));
    let mut threads: Vec<_> = events.iter().map(|event| event.thread).collect();
    threads.sort_by_key(|thread| thread.0);
    threads.dedup();
    assert_eq!(threads.len(), 4);
    assert!(threads.iter().all(|thread| reader.definitions().thread(*thread).is_some_and(|thread| thread.os_id > 0)));
}

/// A second recording would destroy both.
#[test]
fn a_file_has_one_recording_at_a_time() {
    let (first, recording) = recorded();
    let gpu = first.add(Bytes::gib(1)).unwrap();
    let trace = first.run(|| GpuMemTrace::builder().device(2).silent(true).start().unwrap());
    let path = recording.0.to_str().unwrap();
    let second = TestSession::new(&[("GPUMEM_CAPTURE", path), ("GPUMEM_SIM", "1GiB")]).unwrap();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&notices);
    second.run(|| {
        set_sink(Sink::custom(move |output| to.lock().unwrap().push(output.to_string())));
        drop(GpuMemTrace::builder().silent(true).start().unwrap());
    });
    let notices = notices.lock().unwrap().join("\n");
    assert!(notices.contains("another process records to it") && notices.contains("%p"), "{notices}");
    drop(gpu.alloc(Bytes::mib(3)).unwrap());
    drop(trace);
    first.end_recording();
    recording.read();
}

#[test]
fn a_device_or_a_pipe_is_no_file_for_a_recording() {
    let session = TestSession::new(&[("GPUMEM_CAPTURE", "/dev/null"), ("GPUMEM_SIM", "1GiB")]).unwrap();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&notices);
    session.run(|| {
        set_sink(Sink::custom(move |output| to.lock().unwrap().push(output.to_string())));
        drop(GpuMemTrace::builder().silent(true).start().unwrap());
    });
    assert!(notices.lock().unwrap().iter().any(|notice| notice.contains("/dev/null: it is not a regular file")));
}
