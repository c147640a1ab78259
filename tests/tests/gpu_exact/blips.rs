//! Memory that is in use for a moment only: exact traces see it, sampled ones miss it.

use super::*;

const BLIPS: usize = 40;

#[test]
fn blips_are_seen_by_exact_traces() {
    let Some(_one) = device() else { return };
    // The pool keeps what it has, as that of a program at work does.
    cu::keep_pool(0, u64::MAX).expect("the default pool has a threshold");
    let sampled = GpuMemTrace::builder().gauge(Gauge::Sampled).device(0).on_exit_report(false).start();
    let mut sampled = sampled.expect("the device can be read");
    println!("| by | asked for | size | held | Exact: right to the byte | Sampled, 1 ms: saw it | highest it saw |");
    println!("|---|---|---|---|---|---|---|");
    let mut missed = Wrong::default();
    for way in [Way::Plain, Way::Async, Way::Vmm] {
        for (bytes, asked) in [(512 * MIB, "512 MiB"), (4096, "4 KiB")] {
            give(take(way, bytes));
            for held in [0, 1, 20].map(Duration::from_millis) {
                let (mut right, mut seen, mut highest, mut size) = (0, 0, Bytes::ZERO, Bytes::ZERO);
                for _ in 0..BLIPS {
                    sampled.reset();
                    let trace = exact();
                    let block = take(way, bytes);
                    size = Bytes::new(block.counted().unsigned_abs());
                    if !held.is_zero() {
                        thread::sleep(held);
                    }
                    give(block);
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
                    "| {} | {asked} | {size} | {} ms | {right} of {BLIPS} | {seen} of {BLIPS} | {highest} |",
                    way.call(),
                    held.as_millis(),
                );
                if right != BLIPS {
                    missed.note(Err(format!("{way:?} {asked} {held:?}: {right} of {BLIPS}")));
                }
            }
        }
    }
    cu::keep_pool(0, 0).expect("the default pool has a threshold");
    missed.end();
}

#[test]
fn blips_in_the_pool_are_seen_by_its_mark() {
    let Some(_one) = device() else { return };
    cu::keep_pool(0, u64::MAX).expect("the default pool has a threshold");
    let start = || GpuMemTrace::builder().gauge(Gauge::Pool).device(0).on_exit_report(false).start();
    // Each blip is the peak of a nested trace. The outer trace has the highest of them.
    let mut outer = start().expect("the device has a pool");
    println!("| size | held | Pool: right to the byte |");
    println!("|---|---|---|");
    let mut missed = Wrong::default();
    for (bytes, size) in [(512 * MIB, "512 MiB"), (4096, "4 KiB")] {
        outer.reset();
        for held in [0, 1, 20].map(Duration::from_millis) {
            let mut right = 0;
            for _ in 0..BLIPS {
                let trace = start().expect("the device has a pool");
                let block = take(Way::Async, bytes);
                if !held.is_zero() {
                    thread::sleep(held);
                }
                give(block);
                let data = trace.data();
                right += usize::from(data.used == 0 && data.peaked == Bytes::new(bytes as u64) && data.lost == 0);
            }
            println!("| {size} | {} ms | {right} of {BLIPS} |", held.as_millis());
            if right != BLIPS {
                missed.note(Err(format!("{size} {held:?}: {right} of {BLIPS}")));
            }
        }
        let data = outer.data();
        println!("the trace around them: used {}, peaked {}, lost {}", data.used.get(), data.peaked.get(), data.lost);
        if (data.used.get(), data.peaked, data.lost) != (0, Bytes::new(bytes as u64), 0) {
            missed.note(Err(format!("{size}: the trace around them")));
        }
    }
    cu::keep_pool(0, 0).expect("the default pool has a threshold");
    missed.end();
}
