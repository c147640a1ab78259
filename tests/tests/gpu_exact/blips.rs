//! Tests memory that is in use only for a moment. Exact traces see it, and sampled traces may miss it.

use super::*;

const BLIPS: usize = 40;

#[test]
fn blips_are_seen_by_exact_traces() {
    let Some(_guard) = device() else { return };
    // The pool keeps its memory, as the pool of a busy program does.
    cu::keep_pool(0, u64::MAX);
    let sampled = GpuMemTrace::builder().gauge(Gauge::Sampled).device(0).on_exit_report(false).start();
    let mut sampled = sampled.expect("the device can be read");
    println!("| by | asked for | size | held | Exact: right to the byte | Sampled, 1 ms: saw it | highest it saw |");
    println!("|---|---|---|---|---|---|---|");
    let mut mismatches = Mismatches::default();
    for way in [Way::Plain, Way::Async, Way::Vmm] {
        for (bytes, requested) in [(512 * MIB, "512 MiB"), (4096, "4 KiB")] {
            free_block(allocate(way, bytes));
            for held in [0, 1, 20].map(Duration::from_millis) {
                let (mut right, mut seen, mut highest, mut size) = (0, 0, Bytes::ZERO, Bytes::ZERO);
                for _ in 0..BLIPS {
                    sampled.reset();
                    let trace = exact();
                    let block = allocate(way, bytes);
                    size = Bytes::new(block.counted().unsigned_abs());
                    if !held.is_zero() {
                        thread::sleep(held);
                    }
                    free_block(block);
                    let (intercepted, polled) = (trace.data(), sampled.data());
                    let exact = intercepted.used == 0
                        && intercepted.peaked == size
                        && intercepted.lost == 0
                        && intercepted.untracked == 0;
                    right += usize::from(exact);
                    seen += usize::from(polled.peak_over_start() >= size);
                    highest = highest.max(polled.peak_over_start());
                }
                println!(
                    "| {} | {requested} | {size} | {} ms | {right} of {BLIPS} | {seen} of {BLIPS} | {highest} |",
                    way.call(),
                    held.as_millis(),
                );
                if right != BLIPS {
                    mismatches.record(Err(format!("{way:?} {requested} {held:?}: {right} of {BLIPS}")));
                }
            }
        }
    }
    cu::keep_pool(0, 0);
    mismatches.assert_none();
}
