//! Tests that a process which runs for long does not grow with its past work. `cargo bench -p gpumem-tests --bench growth` does
//! more of it.

use gpumem::{Bytes, sim::SimGpu};
use gpumem_tests::growth;

/// Each part is measured by itself, because the memory of the whole process counts.
#[test]
fn a_process_does_not_grow_with_its_past_work() {
    let gpu = SimGpu::install(Bytes::gib(16)).expect("there is none yet");
    for (what, grown, allowed) in [
        // Each needs fewer than 50 bytes.
        ("threads", growth::of_threads(&gpu, 10_000), 500_000),
        ("scopes", growth::of_names(&gpu, 20_000), 500_000),
        ("requests", growth::of_requests(&gpu, 20_000), 200_000),
        ("events", growth::of_events(200_000), 1_000_000),
    ] {
        assert!(grown <= allowed, "{grown} bytes by {what}");
        println!("{what}: {grown} bytes");
    }
}
