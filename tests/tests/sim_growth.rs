//! Tests that the memory of a process that runs for a long time does not grow with its past work. The benchmark `growth` does the
//! same with much more work.

use gpumem::{Bytes, sim::SimGpu};
use gpumem_tests::growth;

/// One test measures all parts in turn, because each measurement is of the memory of the whole process.
#[test]
fn a_process_does_not_grow_with_its_past_work() {
    let gpu = SimGpu::install(Bytes::gib(16)).expect("there is none yet");
    for (what, grown, allowed) in [
        // These limits allow at most 50 bytes for each thread, scope, request or event.
        ("threads", growth::of_threads(&gpu, 10_000), 500_000),
        ("scopes", growth::of_names(&gpu, 20_000), 500_000),
        ("requests", growth::of_requests(&gpu, 20_000), 200_000),
        ("events", growth::of_events(200_000), 1_000_000),
    ] {
        assert!(grown <= allowed, "{grown} bytes by {what}");
        println!("{what}: {grown} bytes");
    }
}
