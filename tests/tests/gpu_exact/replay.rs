//! Compares the results for random programs with the sums that the programs compute themselves.

use super::*;

/// PyTorch's statistics equal what the program adds up, and the high-water marks of a real pool are reset.
#[test]
fn the_statistics_equal_what_is_added_up() {
    let Some(_guard) = device() else { return };
    let (mut random, mut blocks, mut mismatches) = (Random::new(7), Vec::new(), Mismatches::default());
    let before = memory_stats(0).expect("it is intercepted").all;
    let [mut current, mut peak, mut allocated] =
        [before.bytes.current, before.bytes.peak, before.bytes.allocated].map(Bytes::get);
    let mut allocations = before.blocks.allocated;
    let (trace, start, mut most) = (exact(), current, current);
    for step in 0..2_000 {
        if step % 100 == 0 {
            reset_peak_memory_stats(0).expect("it is intercepted, and the pool can be reset");
            peak = current;
        }
        if random.below(9) < 4 && !blocks.is_empty() {
            let block: Block = blocks.swap_remove(random.below(blocks.len()));
            current -= block.counted().unsigned_abs();
            free_block(block);
        } else {
            let block = allocate(random_way(&mut random), random_size(&mut random));
            current += block.counted().unsigned_abs();
            allocated += block.counted().unsigned_abs();
            allocations += u64::from(block.counted() > 0);
            (peak, most) = (peak.max(current), most.max(current));
            blocks.push(block);
        }
        let statistics = memory_stats(0).expect("it is intercepted").all;
        let reported = statistics.bytes;
        let reserved = memory_reserved(0).expect("the pool can be read");
        let is_right = memory_allocated(0) == Ok(Bytes::new(current))
            && max_memory_allocated(0) == Ok(Bytes::new(peak))
            && (reported.current, reported.peak) == (Bytes::new(current), Bytes::new(peak))
            && (reported.allocated, reported.freed) == (Bytes::new(allocated), Bytes::new(allocated - current))
            && statistics.blocks.allocated == allocations
            && reserved.get() >= current;
        if !is_right {
            mismatches.record(Err(format!(
                "step {step}: {reported:?}, reserved {reserved}, not {current}, {peak}, {allocated}"
            )));
        }
    }
    assert_eq!(trace.data().peak_over_start().get(), most - start, "a reset of these peaks does not reset a trace");
    println!("2000 steps: {current} B allocated, {allocated} B in all, {} wrong", mismatches.count());
    blocks.into_iter().for_each(free_block);
    let pooled = allocate(Way::Async, 40 * MIB);
    free_block(pooled);
    let high = max_memory_reserved(0).expect("the pool can be read");
    empty_cache().expect("nothing is captured");
    reset_peak_memory_stats(0).expect("it is intercepted, and the pool can be reset");
    let (now, most) = (memory_reserved(0), max_memory_reserved(0));
    println!("reserved: {high} at most, {now:?} after a trim, {most:?} after a reset of the peaks");
    if high.at_least < Bytes::mib(40) || most.map(|most| most.at_least) != now {
        mismatches.record(Err("the pool's mark".to_owned()));
    }
    println!("{}", memory_summary(0).expect("it is intercepted"));
    mismatches.assert_none();
}

const THREADS: usize = 16;

/// Threads allocate and free at the same time. Returns an error if the results differ from the sum of the blocks that the threads
/// kept.
fn at_once(ways: &[Way]) -> Result<(), String> {
    let before = status();
    let trace = exact();
    let kept = Mutex::new(Vec::new());
    let ever = AtomicI64::new(0);
    let run = |me: usize| {
        Context::primary(0).make_current();
        let mut random = Random::new(1000 + me as u64);
        let mut own: Vec<Block> = Vec::new();
        for step in 0..300 {
            let nested = exact();
            if random.below(100) < 55 || own.is_empty() {
                let block = allocate(ways[random.below(ways.len())], random_size(&mut random));
                ever.fetch_add(block.counted(), Relaxed);
                own.push(block);
            } else {
                free_block(own.swap_remove(random.below(own.len())));
            }
            assert_eq!(nested.data().lost, 0, "thread {me}, step {step}");
        }
        // Half of the remaining blocks are freed later, by the main thread.
        let half = own.split_off(own.len() / 2);
        kept.lock().expect("no thread panicked").extend(half);
        for block in own {
            free_block(block);
        }
    };
    thread::scope(|threads| {
        for me in 0..THREADS {
            let run = &run;
            threads.spawn(move || run(me));
        }
    });
    let kept = kept.into_inner().expect("no thread panicked");
    let expected: i64 = kept.iter().map(Block::counted).sum();
    let data = trace.data();
    let events = status().events - before.events;
    kept.into_iter().for_each(free_block);
    let end = trace.data();
    let message = format!(
        "16 threads at once by {ways:?}: {events} events, used {} where {expected} B were kept, {} when all was freed, \
         peaked {}, lost {}, untracked {}",
        data.used.get(),
        end.used.get(),
        data.peaked,
        end.lost,
        end.untracked
    );
    println!("{message}");
    let right = data.used.get() == expected && end.used == 0 && (end.lost, end.untracked) == (0, 0);
    // The peak is not higher than the sum of all allocations.
    let right = right && data.peak_over_start() <= ever.load(Relaxed).unsigned_abs();
    if right && status().live == before.live { Ok(()) } else { Err(message) }
}

#[test]
fn sixteen_threads_at_once_add_up() {
    let Some(_guard) = device() else { return };
    let apart = Way::ALL.map(|way| at_once(&[way]));
    let together = at_once(&Way::ALL);
    let mut mismatches = Mismatches::default();
    apart.into_iter().chain([together]).for_each(|result| mismatches.record(result));
    mismatches.assert_none();
}
