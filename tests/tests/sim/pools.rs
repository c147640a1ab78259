//! Tests pools on the simulated device.

use gpumem::{Bytes, pool::Pool};
use gpumem_tests::{OwnProcess, part, simulated_gpu};

/// The summary is about the whole process, so this test runs in a separate process.
#[test]
fn parts_that_overlap_are_lost_events_of_a_summary() {
    if part().is_none() {
        OwnProcess::new("pools::parts_that_overlap_are_lost_events_of_a_summary").part("only").passes();
        return;
    }
    let gpu = simulated_gpu();
    let pool = Pool::register("arena", gpu.ordinal()).unwrap();
    let block = gpu.alloc(Bytes::mib(100)).unwrap();
    pool.set_reserved(Bytes::mib(100));
    let mib = |mib| block.address() + Bytes::mib(mib).get();
    pool.allocated(mib(0), Bytes::mib(40));
    assert_eq!(gpumem::summary().lost, 0);
    pool.allocated(mib(30), Bytes::mib(20));
    let summary = gpumem::summary();
    assert_eq!(summary.lost, 1, "{summary}");
    let row = "\ncache of arena: not known, because parts overlap: 10 MiB count twice; wrong calls: 1 part that overlaps another one\n";
    let text = summary.to_string();
    assert!(text.contains(row) && text.contains(", 1 lost event: some numbers may be wrong\n"), "{text}");
    // Only live parts count as overlapping, and this one has been freed.
    pool.freed(mib(30));
    assert_eq!(gpumem::summary().lost, 0);
}
