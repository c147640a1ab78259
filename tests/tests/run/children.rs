//! Tests programs of several processes.

use super::*;

#[test]
fn each_rank_has_a_file_with_its_rank_and_device() {
    let folder = Folder::new();
    let file = folder.file("train.capture");
    let probe = probe();
    // Rank 5 uses both devices. Rank 6 uses the second device, and memory of the host, which is on no device.
    let second = in_shell(&["context 1", "call cuMemAlloc_v2 &other 512"]);
    let steps = in_shell(&ALLOCATES);
    let pinned = in_shell(&["context 1", "call cuMemAllocHost_v2 &pinned 4096", "call cuMemAlloc_v2 &block 512"]);
    let script = format!(
        "for rank in 0 1 2 3 4 5 6 7; do case $rank in 5) RANK=$rank {probe}{steps}{second} & ;; \
         6) RANK=$rank {probe}{pinned} & ;; *) RANK=$rank {probe}{steps} & ;; esac; done; wait"
    );
    let outcome = run(&machine().devices(2), &file, &["sh", "-c", &script]);
    assert!(outcome.is_clean(), "{outcome}");
    let names = folder.names();
    assert_eq!(names.len(), 8, "{names:?}\n{outcome}");
    for (rank, name) in names.iter().enumerate() {
        let gpus = match rank {
            5 => "gpu0+1",
            6 => "gpu1",
            _ => "gpu0",
        };
        assert!(name.starts_with(&format!("train.rank{rank}.{gpus}.pid")), "{names:?}");
        let expected = of_allocates();
        let recorded = recorded(&folder.file(name));
        if rank == 6 {
            assert_eq!(recorded, RecordingContent { bytes: vec![4096, 512], frees: 0 });
            continue;
        }
        assert_eq!((&recorded.bytes[..2], recorded.frees), (&expected.bytes[..], 1), "{name}");
        assert_eq!(recorded.bytes.len(), if rank == 5 { 3 } else { 2 });
    }
}

#[test]
fn a_program_in_the_place_of_another_has_a_file_of_its_own() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let probe = probe();
    let next = format!("exec {probe} & {}", ALLOCATES.join(" & "));
    // The first program is replaced, so its exit handlers do not run.
    let outcome = run_probe(&machine(), &file, &[&ALLOCATES[..5], &[next.as_str()]].concat());
    assert!(outcome.is_clean(), "{outcome}");
    let names = folder.names();
    assert!(names.len() == 2 && names.iter().all(|name| name.starts_with("a.gpu0.pid")), "{names:?}\n{outcome}");
    let second = names.iter().find(|name| name.ends_with(".2.capture")).expect("it has the same number");
    assert_eq!(recorded(&folder.file(second)), of_allocates());
    let first = names.iter().find(|name| *name != second).unwrap();
    assert_eq!(recorded(&folder.file(first)), RecordingContent { bytes: vec![4 << 20, 32 << 20], frees: 0 });
}

/// CUDA does not work in the child of a process that uses CUDA, but works in the child of any other process.
#[test]
fn children_of_fork_are_recorded_if_cuda_works_there() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let fork = format!("fork {}", ALLOCATES.join(" | "));
    let outcome = run_probe(&machine(), &file, &[&fork]);
    assert!(outcome.is_clean() && outcome.answer(&fork) == "the child ended with 0", "{outcome}");
    assert_eq!((folder.names(), recorded(&file)), (vec!["a.capture".to_owned()], of_allocates()));
    let after = run_probe(&machine(), &file, &[&ALLOCATES[..], &["fork sleep 1"]].concat());
    assert!(after.is_clean(), "{after}");
    assert_eq!((folder.names(), recorded(&file)), (vec!["a.capture".to_owned()], of_allocates()), "{after}");
}
