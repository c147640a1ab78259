//! Tests recordings that the program starts and ends.

use std::{fs, io::ErrorKind, path::Path};

use gpumem::{Bytes, GpuMemTrace, recording, recording::Keep, sim::SimGpu};
use gpumem_core::{derive::Names, model::EventKind};
use gpumem_driver::ring_memory::SharedMemory;
use gpumem_recording::{Reader, Step, recover};
use gpumem_tests::{OwnProcess, output_of, part};

/// Returns the bytes of the allocations in a recording, in order, and whether the process may have allocated before the recording
/// started.
fn recorded(file: &Path) -> (Vec<u64>, bool) {
    let mut reader = Reader::new(fs::File::open(file).expect("it was written")).expect("it is a recording");
    let mut bytes = Vec::new();
    while let Some(step) = reader.step().expect("it can be read") {
        if let Step::Event(event) = step
            && let EventKind::Alloc { block, .. } = event.kind
        {
            bytes.push(block.bytes.get());
        }
    }
    (bytes, reader.definitions().process().ran_before.is_some())
}

#[test]
fn a_program_records_parts_of_its_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [first, second, none] = ["first", "second", "none/file"].map(|name| folder.path().join(name));
    let gpu = SimGpu::install(Bytes::gib(16)).expect("there is no other device");
    let alloc = |bytes| drop(gpu.alloc(Bytes::new(bytes)).expect("there is room"));

    alloc(1);
    recording::start(&none, Keep::All).expect_err("there is no such folder");
    recording::start(&first, Keep::All).expect("it can be written");
    alloc(2);
    let twice = recording::start(&second, Keep::All).expect_err("a process has one recording at a time");
    assert_eq!((twice.kind(), second.exists()), (ErrorKind::AlreadyExists, false));
    recording::end();
    alloc(3);
    recording::start(&second, Keep::All).expect("it can be written");
    alloc(4);
    recording::end();

    assert_eq!(recorded(&first), (vec![2], true));
    assert_eq!(recorded(&second), (vec![4], true));
}

/// `a_killed_program_keeps_the_name_of_its_latest_scope` runs this test in a separate process. During the pause between the
/// scopes, the thread that writes the recording reads to the end of the ring.
#[test]
fn child() {
    if part().is_none() {
        return;
    }
    let gpu = SimGpu::install(Bytes::gib(16)).expect("there is no other device");
    for name in ["first", "newest"] {
        let _trace = GpuMemTrace::with_ctx(name);
        let _block = gpu.alloc(Bytes::mib(1)).expect("there is room");
        if name == "newest" {
            std::process::abort();
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

#[test]
fn a_killed_program_keeps_the_name_of_its_latest_scope() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("a.capture");
    let mut command = OwnProcess::new("child").part("killed").command();
    let ended = output_of(command.env("GPUMEM_CAPTURE", &file));
    assert!(!ended.status.success());
    let opened = fs::File::options().read(true).write(true).open(&file).expect("it was written");
    recover(&file, opened, &SharedMemory, None).expect("it is a recording").expect("it was not complete");
    let mut reader = Reader::new(fs::File::open(&file).expect("it was written")).expect("it is a recording");
    let mut scopes = Vec::new();
    while let Some(step) = reader.step().expect("it can be read") {
        if let Step::Event(event) = step
            && let EventKind::Open { spec, .. } = event.kind
        {
            scopes.push(spec.callsite);
        }
    }
    let names: Vec<_> = scopes.iter().map(|id| reader.definitions().callsite(*id).to_string()).collect();
    assert_eq!(names, ["first", "newest"]);
}
