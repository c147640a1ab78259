//! Measures how much the memory of a process grows: with a million threads that end, a million scopes and a million requests with
//! different names, 10^8 events, and a million live parts of a pool.
//!
//! `cargo bench -p gpumem-tests --bench growth` runs all measurements. With an argument, such as `-- requests`, it runs only
//! those whose names contain the argument.

use std::{env, time::Instant};

use gpumem::{Bytes, sim::SimGpu};
use gpumem_tests::growth;

fn main() {
    let gpu = SimGpu::install(Bytes::gib(16)).expect("there is none yet");
    // Cargo adds its own option, `--bench`.
    let chosen = env::args().skip(1).find(|argument| !argument.starts_with("--")).unwrap_or_default();
    let timed = |what: &str, grows: &dyn Fn() -> u64| {
        if !what.contains(&chosen) {
            return;
        }
        let started = Instant::now();
        let grown = grows();
        println!("{what}: {grown} B more resident, {:.2} s", started.elapsed().as_secs_f64());
        assert!(grown <= 4 << 20, "{what} leave something behind");
    };
    if "parts".contains(&chosen) {
        let parts = growth::of_parts(1_000_000);
        println!("1,000,000 live parts of a pool: {} B each", parts / 1_000_000);
        assert!(parts <= 64 * 1_000_000, "a part takes at most 64 B");
    }
    timed("1,000,000 threads", &|| growth::of_threads(&gpu, 1_000_000));
    timed("1,000,000 scopes", &|| growth::of_names(&gpu, 1_000_000));
    timed("1,000,000 requests with stats", &|| growth::of_requests(&gpu, 1_000_000));
    timed("100,000,000 events", &|| growth::of_events(50_000_000));
}
