//! Tests `GPUMEM_CAPTURE` in programs, and reads their recordings.

use std::fs::File;
use std::path::PathBuf;

use gpumem_core::derive;
use gpumem_recording::{End, Reader};
use gpumem_tests::{CONTEXT, Library, Standin};
use tempfile::TempDir;

/// The file of a recording, which is removed with its folder.
struct Recording(PathBuf, #[expect(dead_code, reason = "it is removed with its file")] TempDir);

impl Recording {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self(folder.path().join("a.capture"), folder)
    }

    fn of(&self, machine: Standin) -> Standin {
        machine.env("GPUMEM_CAPTURE", self.0.to_str().expect("the path is text"))
    }

    fn reader(&self) -> Reader<File> {
        Reader::new(File::open(&self.0).expect("it was written")).expect("it is a recording")
    }
}

/// The program has scopes on 17 threads. The reader has neither the driver nor the program's settings.
#[test]
fn a_recording_yields_the_reports_of_its_program() {
    let script = format!(
        "{CONTEXT}; scope load; call cuMemAlloc_v2 &a 9437184; call cuMemAllocAsync &b 4194304 0; rush 16; scope step; \
         call cuMemAlloc_v2 &c 64; call cuMemFree_v2 a; drop; call cuMemFree_v2 16; drop; all_reports"
    );
    for machine in [Standin::new().dispatch(), Standin::new().cupti()] {
        let recording = Recording::new();
        let outcome = recording.of(machine.set("yields=1")).run(&script);
        let mut reader = recording.reader();
        while reader.step().unwrap().is_some() {}
        assert!(reader.skipped().is_nothing() && reader.end() == Some(&End::Complete), "{outcome}");
        let summary = reader.summary().unwrap().to_string();
        let (ledger, names) = (reader.ledger(), reader.definitions());
        let stats = derive::of_device(ledger, ledger.stats()[0].device);
        let live = derive::live_blocks(ledger, names, None);
        assert!(live.len() == 18 && live[0].line.is_some(), "{outcome}");
        let read = format!("{summary:?} {stats:?} {live:?}");
        assert_eq!(without_threads(&read), without_threads(outcome.answer("all_reports")), "{outcome}");
    }
}

/// Removes the ids of threads. The program also numbers threads without events, which are not in a recording.
fn without_threads(reports: &str) -> String {
    reports.split("thread: ").map(|part| part.trim_start_matches(|sign: char| sign.is_ascii_digit())).collect()
}

/// The UUID has the form that `nvidia-smi -L` prints, so that a reader knows which GPU of a machine it was.
#[test]
fn devices_have_their_uuid() {
    let script = format!("{CONTEXT}; new; call cuMemAlloc_v2 &a 512; drop");
    // The UUID consists of the text `stand-in gpu` or `stand-in mig` and the index of the GPU.
    let [gpu, slice] = ["GPU-7374616e-642d-696e-2067-707500000000", "MIG-7374616e-642d-696e-206d-696700000000"];
    let machine = || Standin::new().dispatch();
    for (source, machine, uuid) in [
        ("dispatch", machine(), gpu),
        ("cupti", Standin::new().cupti(), gpu),
        ("dispatch", machine().set("mig=1"), slice),
        // Only NVML knows whether the device is a slice.
        ("dispatch", machine().without(Library::Nvml), &gpu["GPU-".len()..]),
    ] {
        let recording = Recording::new();
        let outcome = recording.of(machine).run(&script);
        let mut reader = recording.reader();
        while reader.step().unwrap().is_some() {}
        let uuids: Vec<_> = reader.definitions().devices().map(|device| device.uuid.clone()).collect();
        assert_eq!(uuids, [Some(uuid.to_owned())], "{outcome}");
        let by = reader.definitions().interceptions().last().map(|by| by.source.name());
        assert_eq!(by, Some(source), "{outcome}");
    }
}

/// If a user sets `GPUMEM_CAPTURE` and no file is written, a notice gives the reason.
#[test]
fn a_program_that_is_not_recorded_says_why() {
    let machine = || Standin::new().dispatch();
    for (machine, why) in [
        (machine().env("GPUMEM_GAUGE", "off"), "GPUMEM_GAUGE is off"),
        (machine().without(Library::Cuda), "traces are off: cannot load libcuda"),
    ] {
        let recording = Recording::new();
        let outcome = recording.of(machine).run("new; report; drop; new; drop");
        let text = format!("gpumem: nothing is recorded to {}: {why}", recording.0.display());
        let lines = outcome.stderr.lines().filter(|line| line.starts_with(&text));
        assert_eq!(lines.count(), 1, "{text}\n{outcome}");
        assert!(!recording.0.exists(), "{outcome}");
    }
    // There is no notice if the session is recorded.
    let recording = Recording::new();
    let outcome = recording.of(machine()).run(&format!("{CONTEXT}; new; drop"));
    assert!(outcome.is_clean() && !outcome.stderr.contains("nothing is recorded"), "{outcome}");
}

/// The parent's recording is complete, and no child writes to it.
#[test]
fn children_of_a_fork_record_nothing() {
    let recording = Recording::new();
    let machine = Standin::new().dispatch();
    let outcome = recording.of(machine).run("forks 50");
    assert_eq!(outcome.answer("forks 50"), "none hung, none printed", "{outcome}");
    let mut reader = recording.reader();
    while reader.step().unwrap().is_some() {}
    assert_eq!(reader.end(), Some(&End::Complete), "{outcome}");
    let skipped = reader.skipped();
    assert_eq!((skipped.not_understood, skipped.contradictions, skipped.above_limits), (0, 0, 0), "{outcome}");
}

#[test]
fn a_file_that_cannot_be_written_is_one_notice() {
    let script = format!("{CONTEXT}; new; call cuMemAlloc_v2 &a 9437184; report");
    let outcome = Standin::new().dispatch().env("GPUMEM_CAPTURE", "/dev/null/file").run(&script);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
    assert!(outcome.stderr.starts_with("gpumem: cannot record to /dev/null/file: "), "{outcome}");
    assert_eq!(outcome.reports().first(), Some(&"△Used Peaked MB:      9      0"), "{outcome}");
    let full = Standin::new().dispatch().env("GPUMEM_CAPTURE", "/dev/full").run(&script);
    assert!(full.is_clean() && full.stderr.lines().count() == 1, "{full}");
    assert!(full.stderr.contains("/dev/full"), "{full}");
}
