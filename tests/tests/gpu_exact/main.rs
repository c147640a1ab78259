//! Exact figures on a real GPU. Switched on by `GPUMEM_DEVICE=1`; `docs/VERIFIED.md` holds what was seen on which.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_exact -- --nocapture --test-threads=1`

use std::{
    env,
    process::{Command, Stdio},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use gpumem::{
    Bytes, Gauge, GpuMemTrace, Trace, device_count, device_name, empty_cache, gpu_mem_get_used_no_cache,
    max_memory_allocated, max_memory_reserved, memory_allocated, memory_reserved, memory_stats, memory_summary,
    reset_peak_memory_stats, status, subscribe, try_gpu_mem_get, unsubscribe,
};
use gpumem_tests::{Random, Standin, on_the_standin, on_the_standin_with_both_sources, reported_by_both};

use crate::cu::{Block, Context, Way};

const MIB: usize = 1 << 20;

/// Heard, and current.
fn device() -> Option<MutexGuard<'static, ()>> {
    let one = gpumem_tests::device()?;
    Context::primary(0).expect("GPUMEM_DEVICE says that there is a device").make_current();
    subscribe().expect("allocations can be heard");
    Some(one)
}

fn exact() -> GpuMemTrace {
    exact_on(0)
}

fn exact_on(ordinal: u32) -> GpuMemTrace {
    let builder = GpuMemTrace::builder().gauge(Gauge::Exact).device(ordinal);
    builder.on_exit_report(false).start().expect("the device can be heard")
}

fn take(way: Way, bytes: usize) -> Block {
    cu::take(way, bytes).unwrap_or_else(|error| panic!("{bytes} bytes by {way:?}: {error:?}"))
}

fn give(block: Block) {
    let what = format!("{block:?}");
    cu::give(block).unwrap_or_else(|error| panic!("giving back {what}: {error:?}"));
}

/// What the driver counts as used on the device now, other processes included.
fn nvml(ordinal: u32) -> i64 {
    try_gpu_mem_get(ordinal).expect("the device can be read").used.get().cast_signed()
}

/// A difference in MiB.
fn mib(bytes: i64) -> String {
    let whole = bytes >> 20;
    if whole << 20 == bytes { format!("{whole} MiB") } else { format!("{bytes} B") }
}

/// To the byte, and nothing was missed; else what was wrong.
fn compare(trace: &GpuMemTrace, what: &str, used: i64, peaked: u64) -> Result<(), String> {
    let data = trace.data();
    let said = format!(
        "used {}, peaked {}, lost {}, untracked {} <- expected {}, {}: {what}",
        mib(data.used.get()),
        mib(data.peaked.get().cast_signed()),
        data.lost,
        data.untracked,
        mib(used),
        mib(peaked.cast_signed())
    );
    println!("{said}");
    let right = data.gauge == Gauge::Exact && data.used.get() == used && data.peaked.get() == peaked;
    if right && (data.lost, data.untracked) == (0, 0) { Ok(()) } else { Err(said) }
}

fn check(trace: &GpuMemTrace, what: &str, used: i64, peaked: u64) {
    if let Err(wrong) = compare(trace, what, used, peaked) {
        panic!("{wrong}");
    }
}

/// Everything that was wrong, at the end: a run on a rare machine is to say all of it.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn note(&mut self, result: Result<(), String>) {
        self.0.extend(result.err());
    }

    fn end(self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}

fn in_mib(count: i64) -> i64 {
    count << 20
}

/// It knows neither peers nor pinned memory of before.
#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&["blocks_older_than_the_subscription_are_looked_up", "two_devices_are_told_apart"]);
}

/// The other runs have one source each.
#[cfg(target_arch = "x86_64")]
#[test]
fn on_the_stand_in_driver_with_both_sources() {
    on_the_standin_with_both_sources(Standin::new().devices(2));
}

/// Each kind of memory, streams, pools and contexts, with failures, on two threads.
#[test]
fn both_sources_tell_the_same() {
    let Some(_one) = device() else { return };
    let reported = reported_by_both(|| {
        every_kind_of_call();
        thread::spawn(|| {
            Context::primary(0).expect("it was retained").make_current();
            every_kind_of_call();
        })
        .join()
        .expect("the thread did not panic");
    });
    let Some([by_dispatch, by_cupti]) = reported else { return };
    for (dispatch, cupti) in by_dispatch.iter().zip(&by_cupti) {
        assert_eq!(dispatch, cupti, "{by_dispatch:#?}\n{by_cupti:#?}");
    }
    assert_eq!(by_dispatch.len(), by_cupti.len());
    for kind in [
        "Allocated",
        "Pooled",
        "Refused",
        "NotCreated",
        "Freeing",
        "Freed",
        "Created",
        "Releasing",
        "Mapped",
        "Unmapping",
        "Pool ",
        "StreamCreated",
        "StreamDestroyed",
        "ContextGone",
        "named: Array",
        "named: Registered",
        "memory: Managed",
        "pool: Some",
    ] {
        assert!(by_dispatch.iter().any(|call| call.contains(kind)), "nothing was told of {kind}: {by_dispatch:#?}");
    }
    println!("both sources told of {} facts", by_dispatch.len());
}

fn every_kind_of_call() {
    for way in Way::ALL {
        let [kept, freed] = [10 * MIB, 3 * MIB].map(|bytes| take(way, bytes));
        give(freed);
        give(kept);
    }
    for refused in [cu::take(Way::Plain, 1 << 50), cu::take(Way::Async, 1 << 50), cu::take(Way::Vmm, 1 << 50)] {
        assert!(refused.is_err(), "{refused:?} is more than a device has");
    }
    assert!(cu::free(0x1234).is_err() && cu::free_async(0x1234).is_err(), "that is no block");
    let mut host = vec![0; 1 << 16];
    cu::register(&mut host).expect("memory of the program's can be registered");
    cu::unregister(&mut host).expect("it was registered");

    let stream = cu::stream().expect("a stream can be created");
    let pools = [cu::pool_create(0), cu::default_pool(0)].map(|pool| pool.expect("there are pools"));
    for pool in pools {
        let blocks = [cu::alloc_from_pool(MIB, pool, stream), cu::alloc_async(MIB, stream)];
        for block in blocks {
            cu::free_on(block.expect("the device has room"), stream).expect("it is a block");
        }
    }
    cu::synchronize(stream).expect("nothing failed");
    cu::pool_destroy(pools[0]).expect("it was created");
    cu::stream_destroy(stream).expect("it was created");

    let context = Context::create(0).expect("a second context can be created");
    let _goes_with_it = take(Way::Plain, MIB);
    context.destroy().expect("it was created");
    Context::primary(0).expect("it was retained").make_current();
}

#[test]
fn fastai_sequences_to_the_byte() {
    let Some(_one) = device() else { return };
    println!("{} on {}", status(), device_name(0).expect("device 0 has a name"));
    for way in [Way::Plain, Way::Async] {
        let mut trace = exact();
        let a = take(way, 10 * MIB);
        let b = take(way, 15 * MIB);
        give(b);
        check(&trace, &format!("{way:?}: allocate 10, allocate 15, free 15"), in_mib(10), 15 << 20);
        give(a);
        check(&trace, &format!("{way:?}: free 10"), 0, 25 << 20);
        let a = take(way, 10 * MIB);
        trace.reset();
        give(a);
        check(&trace, &format!("{way:?}: reset, free 10"), in_mib(-10), 0);

        trace.reset();
        let kept = take(way, 256 * MIB);
        check(&trace, &format!("{way:?}: 256 kept"), in_mib(256), 0);
        give(kept);
        trace.reset();
        let kept = take(way, 256 * MIB);
        let freed = take(way, 256 * MIB);
        give(freed);
        check(&trace, &format!("{way:?}: 256 + 256, one freed"), in_mib(256), 256 << 20);
        give(kept);
    }
}

#[test]
fn every_way_to_allocate_to_the_byte() {
    let Some(_one) = device() else { return };
    let mut wrong = Wrong::default();
    for way in Way::ALL {
        for bytes in [1, 1000, 4096, 1_000_003, 3 * MIB] {
            let trace = exact();
            let block = take(way, bytes);
            let counted = block.counted();
            assert!(counted == 0 || counted >= i64::try_from(bytes).expect("small"), "{block:?}");
            wrong.note(compare(&trace, &format!("{way:?}: {bytes} bytes asked for"), counted, 0));
            give(block);
            wrong.note(compare(&trace, &format!("{way:?}: freed"), 0, counted.unsigned_abs()));
        }
    }
    wrong.end();
}

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
                    let (heard, polled) = (trace.data(), sampled.data());
                    let exact = heard.used == 0 && heard.peaked == size && heard.lost == 0 && heard.untracked == 0;
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
    // Each blip is a nested trace's peak, and the outer one is told the highest.
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

fn any_way(random: &mut Random) -> Way {
    Way::ALL[random.below(Way::ALL.len())]
}

/// Small and large ones: up to 8 MiB, each power of two as likely as the others.
fn any_bytes(random: &mut Random) -> usize {
    let power = random.below(23);
    1 + random.below(1 << power) + (1 << power) / 2
}

/// What happened, in order.
enum Entry {
    /// Memory that this thread allocated was given out or back.
    Change { by: i64, of: usize },
    /// A trace began, or began anew.
    Begin { trace: usize },
    /// What a trace said.
    Said { trace: usize, used: i64, peaked: u64 },
}

/// Everything at once under one lock, so that the order of the log is the order of the events.
#[derive(Default)]
struct World {
    log: Vec<Entry>,
    /// Of each trace that ever was, the thread that it counts, if it does not count all.
    threads: Vec<Option<usize>>,
    traces: Vec<(usize, GpuMemTrace)>,
    blocks: Vec<(Block, usize)>,
    missed: u64,
}

impl World {
    fn allocate(&mut self, me: usize, random: &mut Random) {
        let block = take(any_way(random), any_bytes(random));
        self.log.push(Entry::Change { by: block.counted(), of: me });
        self.blocks.push((block, me));
    }

    fn free(&mut self, random: &mut Random) {
        if !self.blocks.is_empty() {
            let (block, of) = self.blocks.swap_remove(random.below(self.blocks.len()));
            self.log.push(Entry::Change { by: -block.counted(), of });
            give(block);
        }
    }

    fn open(&mut self, of_thread: Option<usize>) {
        let trace = if of_thread.is_some() {
            let builder = GpuMemTrace::builder().gauge(Gauge::Exact).device(0).thread_local_only();
            builder.on_exit_report(false).start().expect("the device can be heard")
        } else {
            exact()
        };
        let number = self.threads.len();
        self.threads.push(of_thread);
        self.traces.push((number, trace));
        self.log.push(Entry::Begin { trace: number });
    }

    fn read(&mut self, at: usize) {
        let (number, trace) = &self.traces[at];
        let data = trace.data();
        self.missed += data.lost + data.untracked;
        self.log.push(Entry::Said { trace: *number, used: data.used.get(), peaked: data.peaked.get() });
    }

    fn reset(&mut self, at: usize) {
        let (number, trace) = &mut self.traces[at];
        trace.reset();
        self.log.push(Entry::Begin { trace: *number });
    }

    fn close(&mut self, at: usize) {
        self.read(at);
        drop(self.traces.swap_remove(at));
    }

    /// Replays the log for each trace alone, and compares. Gives the number of comparisons.
    fn replay(&self) -> usize {
        let mut compared = 0;
        for (number, thread) in self.threads.iter().enumerate() {
            let (mut level, mut start, mut peak) = (0_i64, 0_i64, 0_i64);
            for entry in &self.log {
                match *entry {
                    Entry::Change { by, of } if thread.is_none_or(|thread| thread == of) => {
                        level += by;
                        peak = peak.max(level);
                    }
                    Entry::Begin { trace } if trace == number => (start, peak) = (level, level),
                    Entry::Said { trace, used, peaked } if trace == number => {
                        let expected = (level - start, peak.abs_diff(level.max(start)));
                        assert_eq!((used, peaked), expected, "trace {number} of thread {thread:?}");
                        compared += 1;
                    }
                    _ => {}
                }
            }
        }
        compared
    }

    fn end(&mut self, what: &str) {
        while let Some(at) = self.traces.len().checked_sub(1) {
            self.close(at);
        }
        while let Some((block, _)) = self.blocks.pop() {
            give(block);
        }
        let changes = self.log.iter().filter(|entry| matches!(entry, Entry::Change { .. })).count();
        let (traces, compared) = (self.threads.len(), self.replay());
        println!("{what}: {changes} allocations and frees, {traces} traces, {compared} readings equal to the replay");
        assert_eq!(self.missed, 0, "lost or untracked");
    }
}

#[test]
fn a_hundred_nested_traces_equal_the_replayed_log() {
    let Some(_one) = device() else { return };
    let (mut world, mut random) = (World::default(), Random::new(1));
    for depth in 0..100 {
        world.open((depth % 10 == 9).then_some(0));
        for _ in 0..5 {
            world.allocate(0, &mut random);
        }
        for _ in 0..random.below(6) {
            world.free(&mut random);
        }
    }
    for at in 0..100 {
        world.read(at);
    }
    while let Some(innermost) = world.traces.len().checked_sub(1) {
        for _ in 0..3 {
            world.free(&mut random);
        }
        world.allocate(0, &mut random);
        world.close(innermost);
    }
    world.end("100 nested traces");
}

/// What PyTorch's statistics say is what a program adds up by itself, and the marks of a real pool begin anew.
#[test]
fn the_statistics_equal_what_is_added_up() {
    let Some(_one) = device() else { return };
    let (mut random, mut blocks, mut wrong) = (Random::new(7), Vec::new(), Wrong::default());
    let before = memory_stats(0).expect("it is heard").all.bytes;
    let (mut current, mut peak, mut allocated) = (before.current.get(), before.peak.get(), before.allocated.get());
    for step in 0..2_000 {
        if step % 100 == 0 {
            reset_peak_memory_stats(0).expect("it is heard, and the pool can be reset");
            peak = current;
        }
        if random.below(9) < 4 && !blocks.is_empty() {
            let block: Block = blocks.swap_remove(random.below(blocks.len()));
            current -= block.counted().unsigned_abs();
            give(block);
        } else {
            let block = take(any_way(&mut random), any_bytes(&mut random));
            current += block.counted().unsigned_abs();
            allocated += block.counted().unsigned_abs();
            peak = peak.max(current);
            blocks.push(block);
        }
        let told = memory_stats(0).expect("it is heard").all.bytes;
        let reserved = memory_reserved(0).expect("the pool can be read");
        let is_right = memory_allocated(0) == Ok(Bytes::new(current))
            && max_memory_allocated(0) == Ok(Bytes::new(peak))
            && (told.current, told.peak) == (Bytes::new(current), Bytes::new(peak))
            && (told.allocated, told.freed) == (Bytes::new(allocated), Bytes::new(allocated - current))
            && reserved.get() >= current;
        if !is_right {
            wrong.note(Err(format!("step {step}: {told:?}, reserved {reserved}, not {current}, {peak}, {allocated}")));
        }
    }
    println!("2000 steps: {current} B allocated, {allocated} B in all, {} wrong", wrong.0.len());
    blocks.into_iter().for_each(give);
    let pooled = take(Way::Async, 40 * MIB);
    give(pooled);
    let high = max_memory_reserved(0).expect("the pool can be read");
    empty_cache().expect("nothing is captured");
    reset_peak_memory_stats(0).expect("it is heard, and the pool can be reset");
    let (now, most) = (memory_reserved(0), max_memory_reserved(0));
    println!("reserved: {high} at most, {now:?} after a trim, {most:?} after a reset of the peaks");
    if high.at_least < Bytes::mib(40) || most.map(|most| most.at_least) != now {
        wrong.note(Err("the pool's mark".to_owned()));
    }
    println!("{}", memory_summary(0).expect("it is heard"));
    wrong.end();
}

const THREADS: usize = 16;

#[test]
fn sixteen_threads_with_overlapping_traces_equal_the_replayed_log() {
    let Some(_one) = device() else { return };
    let world = Mutex::new(World::default());
    let steps = |me: usize| {
        Context::primary(0).expect("it is retained already").make_current();
        let mut random = Random::new(100 + me as u64);
        for _ in 0..300 {
            let mut world = world.lock().expect("no thread panicked");
            let open = world.traces.len();
            match random.below(12) {
                0..=4 => world.allocate(me, &mut random),
                5..=8 => world.free(&mut random),
                9 if open < 50 => world.open((random.below(3) == 0).then_some(me)),
                10 if open > 0 => world.reset(random.below(open)),
                11 if open > 20 => world.close(random.below(open)),
                _ if open > 0 => world.read(random.below(open)),
                _ => {}
            }
        }
    };
    thread::scope(|threads| {
        for me in 0..THREADS {
            let steps = &steps;
            threads.spawn(move || steps(me));
        }
    });
    world.into_inner().expect("no thread panicked").end("16 threads, one at a time");
}

/// Threads allocate and free at once. Says what differs from the sum of what they kept.
fn at_once(ways: &[Way]) -> Result<(), String> {
    let before = status();
    let trace = exact();
    let kept = Mutex::new(Vec::new());
    let ever = AtomicI64::new(0);
    let run = |me: usize| {
        Context::primary(0).expect("it is retained already").make_current();
        let mut random = Random::new(1000 + me as u64);
        let mut own: Vec<Block> = Vec::new();
        for step in 0..300 {
            let nested = exact();
            if random.below(100) < 55 || own.is_empty() {
                let block = take(ways[random.below(ways.len())], any_bytes(&mut random));
                ever.fetch_add(block.counted(), Relaxed);
                own.push(block);
            } else {
                give(own.swap_remove(random.below(own.len())));
            }
            assert_eq!(nested.data().lost, 0, "thread {me}, step {step}");
        }
        // Half of what is left is freed by others.
        let half = own.split_off(own.len() / 2);
        kept.lock().expect("no thread panicked").extend(half);
        for block in own {
            give(block);
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
    let heard = status().heard - before.heard;
    kept.into_iter().for_each(give);
    let end = trace.data();
    let said = format!(
        "16 threads at once by {ways:?}: {heard} events, used {} where {expected} B were kept, {} when all was freed, \
         peaked {}, lost {}, untracked {}",
        data.used.get(),
        end.used.get(),
        data.peaked,
        end.lost,
        end.untracked
    );
    println!("{said}");
    let right = data.used.get() == expected && end.used == 0 && (end.lost, end.untracked) == (0, 0);
    // No more than was ever allocated.
    let right = right && data.peak_over_start() <= ever.load(Relaxed).unsigned_abs();
    if right && status().live == before.live { Ok(()) } else { Err(said) }
}

#[test]
fn sixteen_threads_at_once_add_up() {
    let Some(_one) = device() else { return };
    let apart = Way::ALL.map(|way| at_once(&[way]));
    let together = at_once(&Way::ALL);
    let mut wrong = Wrong::default();
    apart.into_iter().chain([together]).for_each(|result| wrong.note(result));
    wrong.end();
}

#[test]
fn blocks_older_than_the_subscription_are_looked_up() {
    let Some(_one) = device() else { return };
    let mut wrong = Wrong::default();
    let mut older = |way, bytes: usize, right: &dyn Fn(i64, i64, u64) -> bool| {
        unsubscribe();
        let block = take(way, bytes);
        subscribe().expect("nobody else is subscribed");
        let trace = exact();
        let counted = block.counted();
        give(block);
        let data = trace.data();
        let (used, untracked) = (data.used.get(), data.untracked);
        let said = format!("{way:?} of {counted} counted bytes, older: used {used}, untracked {untracked}");
        println!("{said}");
        let right = right(counted, used, untracked) && (data.peaked.get(), data.lost) == (0, 0);
        wrong.note(if right { Ok(()) } else { Err(said) });
    };
    for way in [Way::Plain, Way::Async, Way::Managed, Way::Pinned] {
        for bytes in [64 * MIB, 2 * MIB] {
            older(way, bytes, &|counted, used, untracked| (used, untracked) == (-counted, 0));
        }
    }
    // The driver may tell the size that it rounded up to.
    let rounded = |counted: i64, used: i64, _: u64| used <= -counted && used > -counted - in_mib(2);
    for way in [Way::Plain, Way::Async, Way::Pitched] {
        older(way, 1_000_003, &rounded);
    }
    // Nobody can be asked, and nothing is guessed.
    for way in [Way::Array, Way::Vmm, Way::VmmReleasedEarly] {
        older(way, 4 * MIB, &|_, used, _| used == 0);
    }
    wrong.end();
}

#[test]
fn what_fails_is_not_counted() {
    let Some(_one) = device() else { return };
    let (trace, mut wrong) = (exact(), Wrong::default());
    let too_much = usize::try_from(try_gpu_mem_get(0).expect("the device can be read").total.get()).expect("64 bits");
    for way in [Way::Plain, Way::Pitched, Way::Async, Way::Vmm] {
        let error = cu::take(way, too_much + 64 * MIB).expect_err("more than the device has");
        wrong.note(compare(&trace, &format!("{way:?} of more than there is: {error:?}"), 0, 0));
    }
    let block = take(Way::Plain, MIB);
    let size = in_mib(1);
    let inside = cu::free(block.name() + 4096).expect_err("the middle of a block is none");
    wrong.note(compare(&trace, &format!("cuMemFree of the middle of a block: {inside:?}"), size, 0));
    let name = block.name();
    give(block);
    for (what, refused) in [
        ("cuMemFree of what was freed", cu::free(name)),
        ("cuMemFree of no address", cu::free(0xdead_0000)),
        ("cuMemFreeAsync of no address", cu::free_async(0xdead_0000)),
        ("cuMemFreeHost of no address", cu::free_host(0xdead_0000)),
    ] {
        wrong.note(compare(&trace, &format!("{what}: {refused:?}"), 0, 1 << 20));
        assert!(refused.is_err(), "{what}");
    }
    let nothing = cu::free(0);
    wrong.note(compare(&trace, &format!("cuMemFree of 0: {nothing:?}"), 0, 1 << 20));
    wrong.end();
}

#[test]
fn a_trace_of_one_thread_counts_its_own() {
    let Some(_one) = device() else { return };
    let all = exact();
    let builder = GpuMemTrace::builder().device(0).thread_local_only().on_exit_report(false);
    let own = builder.start().expect("the device can be heard");
    let elsewhere = |code: &(dyn Fn() + Sync)| {
        thread::scope(|threads| {
            let run = || {
                Context::primary(0).expect("it is retained already").make_current();
                code();
            };
            threads.spawn(run).join().expect("it did not panic");
        });
    };
    for way in Way::ALL {
        let (mine, theirs) = (Mutex::new(Some(take(way, 10 * MIB))), Mutex::new(None));
        elsewhere(&|| *theirs.lock().expect("alone") = Some(take(way, 20 * MIB)));
        let size = mine.lock().expect("alone").as_ref().map_or(0, Block::counted);
        let other = theirs.lock().expect("alone").as_ref().map_or(0, Block::counted);
        let (before, whole) = (own.data(), all.data());
        println!("{way:?}: of one thread {}, of all {}", mib(before.used.get()), mib(whole.used.get()));
        assert_eq!((before.used.get(), whole.used.get()), (size, size + other), "{way:?}");
        elsewhere(&|| give(mine.lock().expect("alone").take().expect("it was allocated")));
        assert_eq!(own.data().used.get(), 0, "{way:?}: freed by another thread");
        give(theirs.into_inner().expect("alone").expect("it was allocated"));
        assert_eq!((own.data().used.get(), all.data().used.get()), (0, 0), "{way:?}: another thread's, freed by us");
    }
    assert!(own.data().peak_over_start() < Bytes::mib(20), "never another thread's");
    assert_eq!((all.data().lost, all.data().untracked), (0, 0));
}

#[test]
fn unsubscribing_in_the_middle_keeps_what_is_known() {
    let Some(_one) = device() else { return };
    let spanning = exact();
    let (plain, pooled) = (take(Way::Plain, 10 * MIB), take(Way::Async, 20 * MIB));
    let virtually = take(Way::Vmm, 6 * MIB);
    unsubscribe();
    assert!(status().heard_by.is_none());
    let refused = GpuMemTrace::builder().gauge(Gauge::Exact).device(0).start();
    println!("an exact trace while unsubscribed: {}", refused.expect_err("nothing is heard"));
    let unheard = take(Way::Plain, 40 * MIB);
    subscribe().expect("nobody else is subscribed");
    let trace = exact();
    give(plain);
    give(pooled);
    give(virtually);
    check(&trace, "known before, freed after", in_mib(-36), 0);
    give(unheard);
    check(&trace, "not heard, looked up", in_mib(-76), 0);
    let data = spanning.data();
    println!("the trace that spans it: used {}, lost {}", mib(data.used.get()), data.lost);
    assert!(data.lost > 0, "it says that something was missed");
}

fn live(kind: &str) -> (u64, u64) {
    let status = status();
    let found = status.live.iter().find(|live| live.kind == kind);
    found.map_or((0, 0), |live| (live.blocks, live.bytes.get()))
}

#[test]
fn each_kind_is_listed_and_goes_to_nothing() {
    let Some(_one) = device() else { return };
    let before = status().live;
    let mut host = vec![0_u8; 4 * MIB];
    let blocks = [
        (Way::Pinned, "pinned host", 8),
        (Way::Managed, "managed", 16),
        (Way::Plain, "device", 2),
        (Way::Async, "pool", 3),
        (Way::Vmm, "vmm", 4),
    ]
    .map(|(way, kind, size)| {
        let (count, bytes) = live(kind);
        let block = take(way, size * MIB);
        assert_eq!(live(kind), (count + 1, bytes + (size * MIB) as u64), "{kind}");
        block
    });
    let (count, bytes) = live("pinned host");
    cu::register(&mut host).expect("memory of this process");
    assert_eq!(live("pinned host"), (count + 1, bytes + (4 << 20)), "registered");
    println!("{}", status());
    cu::unregister(&mut host).expect("it is registered");
    blocks.into_iter().for_each(give);
    assert_eq!(status().live, before);
}

#[test]
fn the_ledger_agrees_with_nvml_and_the_driver() {
    let Some(_one) = device() else { return };
    // What the driver takes for itself at the first use of each.
    for way in [Way::Plain, Way::Vmm] {
        give(take(way, 64 * MIB));
    }
    let trace = exact();
    let (nvml_before, free_before) = (nvml(0), cu::free_memory().expect("a context is current"));
    let mut blocks = Vec::new();
    for (way, size) in [(Way::Plain, 1024), (Way::Vmm, 512), (Way::Plain, 333), (Way::Vmm, 2048), (Way::Plain, 4096)] {
        blocks.push(take(way, size * MIB));
        let (exact, seen) = (trace.data().used.get(), nvml(0) - nvml_before);
        let driver = free_before - cu::free_memory().expect("a context is current");
        println!("{way:?} of {size} MiB: Exact {}, NVML {}, cuMemGetInfo {}", mib(exact), mib(seen), mib(driver));
        let pages = in_mib(2) * i64::try_from(blocks.len()).expect("few");
        assert!((exact - seen).abs() <= pages, "within pages of 2 MiB");
        assert!((exact - driver).abs() <= pages, "within pages of 2 MiB");
    }
    blocks.into_iter().for_each(give);
    println!("freed: Exact {}, NVML {}", mib(trace.data().used.get()), mib(nvml(0) - nvml_before));
    assert_eq!(trace.data().used.get(), 0);
    assert!((nvml(0) - nvml_before).abs() <= in_mib(2));
}

/// Two devices and a trace of each.
struct Two {
    contexts: [Context; 2],
    traces: [GpuMemTrace; 2],
    live: [i64; 2],
    wrong: Wrong,
}

impl Two {
    /// Says where the driver put it and where gpumem counts it.
    fn allocated(&mut self, what: &str, wanted: usize, bytes: i64, at: Option<u64>) {
        let driver = at.map(|at| cu::ordinal_of(at).map_or_else(|error| format!("{error:?}"), |at| at.to_string()));
        self.changed(&format!("{what} (the driver says device {})", driver.unwrap_or("?".to_owned())), wanted, bytes);
    }

    fn changed(&mut self, what: &str, on: usize, by: i64) {
        self.live[on] += by;
        let data = [0, 1].map(|device: usize| self.traces[device].data());
        let (used, missed) = (data.map(|data| data.used.get()), data.map(|data| data.lost + data.untracked));
        let said = format!("used on 0 and 1: {}, {}: {what}", mib(used[0]), mib(used[1]));
        println!("{said}");
        if (used, missed) != (self.live, [0, 0]) {
            self.wrong.note(Err(format!("{said}; expected {:?}, lost or untracked {missed:?}", self.live)));
            // Each is told once.
            self.traces.iter_mut().for_each(GpuMemTrace::reset);
            self.live = [0, 0];
        }
    }
}

#[test]
fn two_devices_are_told_apart() {
    let Some(_one) = device() else { return };
    if device_count() < 2 {
        println!("skipped: one device");
        return;
    }
    let contexts = [0, 1].map(|ordinal| Context::primary(ordinal).expect("two devices are there"));
    let mut two = Two { contexts, traces: [0, 1].map(exact_on), live: [0, 0], wrong: Wrong::default() };
    let size = |mib: usize| mib * MIB;

    two.contexts[0].make_current();
    let zero = take(Way::Plain, size(10));
    two.allocated("cuMemAlloc with 0 current", 0, in_mib(10), Some(zero.name()));
    two.contexts[1].make_current();
    let one = take(Way::Plain, size(20));
    two.allocated("cuMemAlloc with 1 current", 1, in_mib(20), Some(one.name()));
    let stream_one = cu::stream().expect("a stream of device 1");
    let pooled = take(Way::Async, size(3));
    two.allocated("cuMemAllocAsync with 1 current, null stream", 1, in_mib(3), Some(pooled.name()));
    give(pooled);
    two.changed("freed", 1, in_mib(-3));

    two.contexts[0].make_current();
    let stream_zero = cu::stream().expect("a stream of device 0");
    match cu::alloc_async(size(4), stream_one) {
        Ok(at) => {
            two.allocated("cuMemAllocAsync on a stream of 1 with 0 current", 1, in_mib(4), Some(at));
            cu::free_on(at, stream_one).expect("it was allocated");
            two.changed("cuMemFreeAsync on a stream of 1 with 0 current", 1, in_mib(-4));
        }
        Err(error) => println!("cuMemAllocAsync on a stream of 1 with 0 current is refused: {error:?}"),
    }

    let both = cu::can_access(0, 1).expect("both are there") && cu::can_access(1, 0).expect("both are there");
    println!("peer access: {both}");
    for (what, pool, own) in [
        ("a pool made on 1", cu::pool_create(1).expect("pools are supported"), true),
        ("the default pool of 1", cu::default_pool(1).expect("pools are supported"), false),
    ] {
        if both {
            cu::pool_access(pool, 0).expect("peers can");
        }
        match cu::alloc_from_pool(size(5), pool, stream_zero) {
            Ok(at) => {
                two.allocated(&format!("cuMemAllocFromPoolAsync from {what}, stream of 0"), 1, in_mib(5), Some(at));
                cu::free_on(at, stream_zero).expect("it was allocated");
                two.changed("cuMemFreeAsync on a stream of 0", 1, in_mib(-5));
            }
            Err(error) => println!("cuMemAllocFromPoolAsync from {what} on a stream of 0 is refused: {error:?}"),
        }
        cu::synchronize(stream_zero).expect("nothing failed on it");
        if own {
            cu::pool_destroy(pool).expect("it is empty");
        }
    }

    let bytes = cu::granularity(1).expect("it has one");
    let handle = cu::create(bytes, 1).expect("the device has room");
    let by = i64::try_from(bytes).expect("small");
    two.allocated("cuMemCreate located on 1 with 0 current", 1, by, None);
    cu::release(handle).expect("it was created");
    two.changed("cuMemRelease", 1, -by);

    if both {
        two.contexts[0].enable_peer(two.contexts[1]).expect("peers can");
        two.contexts[1].make_current();
        two.contexts[1].enable_peer(two.contexts[0]).expect("peers can");
        two.changed("peer access enabled", 1, 0);
    }
    two.contexts[0].make_current();
    cu::copy_peer((one.name(), two.contexts[1]), (zero.name(), two.contexts[0]), size(10)).expect("both are live");
    two.changed("cuMemcpyPeer", 1, 0);
    give(one);
    two.changed("cuMemFree of 1's with 0 current", 1, in_mib(-20));
    give(zero);
    two.changed("cuMemFree of 0's", 0, in_mib(-10));
    for (context, stream) in two.contexts.into_iter().zip([stream_zero, stream_one]) {
        context.make_current();
        cu::stream_destroy(stream).expect("nothing failed on it");
    }
    two.contexts[0].make_current();
    two.wrong.end();
}

/// Used on device 0 as `nvidia-smi` tells it, in MiB; none where the command is missing.
fn smi() -> Option<i64> {
    let args = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"];
    let output = Command::new("nvidia-smi").args(args).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

#[test]
fn nothing_is_left() {
    let Some(_one) = device() else { return };
    let before = (nvml(0), smi());
    run_child("nothing left");
    // A process that has ended gives its memory back a moment later.
    let mut after = (nvml(0), smi());
    for _ in 0..50 {
        if (after.0 - before.0).abs() <= in_mib(2) {
            break;
        }
        thread::sleep(Duration::from_millis(100));
        after = (nvml(0), smi());
    }
    println!("before and after a process: NVML used {}, {}", mib(before.0), mib(after.0));
    println!("before and after a process: nvidia-smi used {:?}, {:?} MiB", before.1, after.1);
    assert!((after.0 - before.0).abs() <= in_mib(2));
    if let (Some(before), Some(after)) = (before.1, after.1) {
        assert!(before.abs_diff(after) <= 2);
    }
}

fn random_run_leaves_nothing() {
    Context::primary(0).expect("there is a device").make_current();
    subscribe().expect("allocations can be heard");
    let mut random = Random::new(7);
    for way in Way::ALL {
        give(take(way, 8 * MIB));
    }
    let before = (gpu_mem_get_used_no_cache(), nvml(0));
    let trace = exact();
    let mut blocks: Vec<_> = (0..500).map(|_| take(any_way(&mut random), any_bytes(&mut random))).collect();
    let during = (trace.data().used.get(), nvml(0) - before.1);
    println!("used by 500 random blocks: Exact {} B, NVML {}", during.0, mib(during.1));
    while !blocks.is_empty() {
        give(blocks.swap_remove(random.below(blocks.len())));
    }
    check(&trace, "500 random blocks, all freed", 0, trace.data().peaked.get());
    let after = (gpu_mem_get_used_no_cache(), nvml(0));
    println!("used before and after by NVML: {}, {}; status: {}", before.0, after.0, status());
    assert!(status().live.is_empty(), "nothing is live");
    // The driver keeps pages of its own for small blocks.
    assert!((after.1 - before.1).abs() <= in_mib(32), "NVML agrees");
}

/// What gpumem and NVML say of a context's end.
struct Ending {
    trace: GpuMemTrace,
    nvml: i64,
}

impl Ending {
    fn begin() -> Self {
        subscribe().expect("allocations can be heard");
        Self { trace: exact(), nvml: nvml(0) }
    }

    fn say(&self, what: &str) -> Trace {
        let data = self.trace.data();
        println!(
            "used {}, untracked {}, lost {}, NVML {}: {what}",
            mib(data.used.get()),
            data.untracked,
            data.lost,
            mib(nvml(0) - self.nvml)
        );
        data
    }
}

/// Run in a process of its own, by the tests beside it.
#[test]
fn child() {
    match env::var("GPUMEM_CHILD").as_deref() {
        Ok("nothing left") => random_run_leaves_nothing(),
        Ok("context alone") => {
            cu::init().expect("there is a driver");
            let ending = Ending::begin();
            let context = Context::create(0).expect("there is a device");
            ending.say("a context was created");
            take(Way::Plain, 64 * MIB);
            take(Way::Array, 16 * MIB);
            assert_eq!(ending.say("64 MiB and an array of 16 MiB in it").used.get(), in_mib(80));
            context.destroy().expect("it is alive");
            let data = ending.say("the context was destroyed with both");
            assert_eq!(data.used.get(), 0);
        }
        Ok("context beside") => {
            let primary = Context::primary(0).expect("there is a device");
            primary.make_current();
            let ending = Ending::begin();
            let kept = take(Way::Plain, 32 * MIB);
            let context = Context::create(0).expect("there is a device");
            take(Way::Plain, 64 * MIB);
            assert_eq!(ending.say("32 MiB in the primary context, 64 MiB in another").used.get(), in_mib(96));
            context.destroy().expect("it is alive");
            let data = ending.say("the other was destroyed with its block");
            assert_eq!((data.used.get(), data.lost), (in_mib(32), 0));
            primary.make_current();
            give(kept);
            ending.say("the primary context's block was freed");
        }
        Ok(which @ ("primary released" | "primary reset")) => {
            let context = Context::primary(0).expect("there is a device");
            context.make_current();
            let ending = Ending::begin();
            take(Way::Plain, 64 * MIB);
            take(Way::Managed, 8 * MIB);
            let pool = in_mib(48);
            take(Way::Async, 48 * MIB);
            ending.say("64 MiB in the primary context, 8 MiB managed, 48 MiB in the pool");
            assert_eq!(ending.trace.data().used.get(), in_mib(64) + pool);
            if which == "primary reset" {
                cu::primary_reset(0).expect("it is active");
            } else {
                cu::primary_release(0).expect("it is retained once");
            }
            let data = ending.say(&format!("{which} with all of it but the pool's"));
            assert_eq!(data.used.get(), pool);
            println!("used: {}", status());
        }
        _ => {}
    }
}

fn run_child(what: &str) {
    let mut child = Command::new(env::current_exe().expect("a test has a path"));
    child.args(["--exact", "child", "--nocapture"]).env("GPUMEM_CHILD", what);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the test can be run again");
    // What it says fits into a pipe, so it can be waited for without reading.
    let begin = Instant::now();
    while child.try_wait().expect("it is our child").is_none() {
        if begin.elapsed() > Duration::from_secs(120) {
            println!("{what}: it does not end, and is killed");
            child.kill().expect("it is our child");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("it has ended");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("a process of its own, {what}:");
    for line in said.lines().filter(|line| line.contains("used") || line.contains("live ") || line.contains("events")) {
        println!("  {line}");
    }
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_context_that_is_destroyed_takes_its_blocks_along() {
    let Some(_one) = device() else { return };
    for what in ["context alone", "context beside"] {
        run_child(what);
    }
}

#[test]
fn a_primary_context_that_goes_takes_its_blocks_along() {
    let Some(_one) = device() else { return };
    for what in ["primary released", "primary reset"] {
        run_child(what);
    }
}

/// The raw calls: every result is checked, nothing is wrapped more than the tests need.
mod cu {
    use std::{
        collections::HashMap,
        ffi::c_void,
        ptr,
        sync::{Mutex, PoisonError},
    };

    use cudarc::driver::{DriverError, result, sys};

    type Result<T> = std::result::Result<T, DriverError>;

    /// A way to allocate.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Way {
        Plain,
        Pitched,
        Array,
        /// On the null stream.
        Async,
        Managed,
        Pinned,
        /// Created, mapped; unmapped and then released.
        Vmm,
        /// Created, mapped and released at once, so that the mapping alone holds it.
        VmmReleasedEarly,
    }

    impl Way {
        pub(crate) const ALL: [Self; 8] = [
            Self::Plain,
            Self::Pitched,
            Self::Array,
            Self::Async,
            Self::Managed,
            Self::Pinned,
            Self::Vmm,
            Self::VmmReleasedEarly,
        ];

        pub(crate) fn call(self) -> &'static str {
            match self {
                Self::Plain => "cuMemAlloc",
                Self::Pitched => "cuMemAllocPitch",
                Self::Array => "cuArrayCreate",
                Self::Async => "cuMemAllocAsync",
                Self::Managed => "cuMemAllocManaged",
                Self::Pinned => "cuMemAllocHost",
                Self::Vmm | Self::VmmReleasedEarly => "cuMemCreate",
            }
        }
    }

    /// What was allocated. Forgotten, not freed, when it is dropped, as where its context goes first.
    #[derive(Debug)]
    pub(crate) struct Block {
        way: Way,
        /// The address, the array or the handle.
        name: u64,
        bytes: usize,
        /// Where it is mapped.
        mapped: u64,
    }

    impl Block {
        pub(crate) fn name(&self) -> u64 {
            self.name
        }

        /// What a trace is to count of it.
        pub(crate) fn counted(&self) -> i64 {
            match self.way {
                Way::Managed | Way::Pinned => 0,
                _ => i64::try_from(self.bytes).expect("it fits into memory"),
            }
        }
    }

    pub(crate) fn take(way: Way, bytes: usize) -> Result<Block> {
        let plain = |name, bytes| Block { way, name, bytes, mapped: 0 };
        let mut at = 0;
        Ok(match way {
            Way::Plain => {
                // SAFETY: the out-parameter is live.
                unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes) }.result()?;
                plain(at, bytes)
            }
            Way::Pitched => {
                let (width, mut pitch) = (bytes.clamp(1, 1000), 0);
                let height = bytes.div_ceil(width);
                // SAFETY: both out-parameters are live.
                unsafe { sys::cuMemAllocPitch_v2(&raw mut at, &raw mut pitch, width, height, 4) }.result()?;
                plain(at, pitch * height)
            }
            Way::Array => {
                let floats = bytes.div_ceil(4);
                let width = floats.clamp(1, 1024);
                let height = floats.div_ceil(width);
                let descriptor = sys::CUDA_ARRAY_DESCRIPTOR {
                    Width: width,
                    Height: height,
                    Format: sys::CUarray_format::CU_AD_FORMAT_FLOAT,
                    NumChannels: 1,
                };
                let mut array = ptr::null_mut();
                // SAFETY: the out-parameter and the descriptor are live.
                unsafe { sys::cuArrayCreate_v2(&raw mut array, &raw const descriptor) }.result()?;
                plain(array as u64, width * height * 4)
            }
            Way::Async => plain(alloc_async(bytes, ptr::null_mut())?, bytes),
            Way::Managed => {
                const CU_MEM_ATTACH_GLOBAL: u32 = 1;
                // SAFETY: the out-parameter is live.
                unsafe { sys::cuMemAllocManaged(&raw mut at, bytes, CU_MEM_ATTACH_GLOBAL) }.result()?;
                plain(at, bytes)
            }
            Way::Pinned => {
                let mut host = ptr::null_mut();
                // SAFETY: the out-parameter is live.
                unsafe { sys::cuMemAllocHost_v2(&raw mut host, bytes) }.result()?;
                plain(host as u64, bytes)
            }
            Way::Vmm | Way::VmmReleasedEarly => {
                let bytes = bytes.next_multiple_of(granularity(0)?);
                let name = create(bytes, 0)?;
                let mapped = map(name, bytes).inspect_err(|_| {
                    let _ = release(name);
                })?;
                if way == Way::VmmReleasedEarly {
                    release(name)?;
                }
                Block { way, name, bytes, mapped }
            }
        })
    }

    #[expect(clippy::needless_pass_by_value, reason = "a block is given back once")]
    pub(crate) fn give(block: Block) -> Result<()> {
        let Block { way, name, bytes, mapped } = block;
        match way {
            Way::Plain | Way::Pitched | Way::Managed => free(name),
            Way::Async => free_async(name),
            Way::Pinned => free_host(name),
            // SAFETY: the array is live, since a block is given back once.
            Way::Array => unsafe { sys::cuArrayDestroy(address::<sys::CUarray_st>(name)) }.result(),
            Way::Vmm | Way::VmmReleasedEarly => {
                // SAFETY: the range is mapped and reserved, and nothing on the device uses it.
                unsafe { sys::cuMemUnmap(mapped, bytes) }.result()?;
                // SAFETY: as above; nothing is mapped there any more.
                unsafe { sys::cuMemAddressFree(mapped, bytes) }.result()?;
                if way == Way::Vmm { release(name) } else { Ok(()) }
            }
        }
    }

    fn address<T>(name: u64) -> *mut T {
        ptr::with_exposed_provenance_mut(usize::try_from(name).expect("64 bits"))
    }

    pub(crate) fn free(at: u64) -> Result<()> {
        // SAFETY: the driver refuses what is no block; nothing on the device uses those of the tests.
        unsafe { sys::cuMemFree_v2(at) }.result()
    }

    pub(crate) fn free_async(at: u64) -> Result<()> {
        free_on(at, ptr::null_mut())
    }

    pub(crate) fn free_host(at: u64) -> Result<()> {
        // SAFETY: the driver refuses what is no block; nobody uses those of the tests.
        unsafe { sys::cuMemFreeHost(address::<c_void>(at)) }.result()
    }

    pub(crate) fn alloc_async(bytes: usize, stream: sys::CUstream) -> Result<u64> {
        let mut at = 0;
        // SAFETY: the out-parameter is live, and the stream too, or it is the null stream.
        unsafe { sys::cuMemAllocAsync(&raw mut at, bytes, stream) }.result()?;
        Ok(at)
    }

    pub(crate) fn free_on(at: u64, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the stream is live or the null stream, and the driver refuses what is no block.
        unsafe { sys::cuMemFreeAsync(at, stream) }.result()
    }

    pub(crate) fn alloc_from_pool(bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream) -> Result<u64> {
        let mut at = 0;
        // SAFETY: the out-parameter, the pool and the stream are live.
        unsafe { sys::cuMemAllocFromPoolAsync(&raw mut at, bytes, pool, stream) }.result()?;
        Ok(at)
    }

    /// The front of `CUmemAllocationProp` and `CUmemPoolProps`, which cudarc spells differently for each CUDA version.
    #[repr(C)]
    struct Properties {
        kind: u32,
        handle_types: u32,
        location: u32,
        ordinal: i32,
        rest: [u64; 16],
    }

    impl Properties {
        fn on(ordinal: u32) -> Self {
            // Pinned, on a device.
            Self { kind: 1, handle_types: 0, location: 1, ordinal: number(ordinal), rest: [0; 16] }
        }
    }

    fn number(ordinal: u32) -> i32 {
        i32::try_from(ordinal).expect("few devices")
    }

    pub(crate) fn granularity(ordinal: u32) -> Result<usize> {
        let (properties, mut bytes) = (Properties::on(ordinal), 0);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the out-parameter is live, and the properties are at least as long as the driver reads.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, (&raw const properties).cast(), minimum) }
            .result()?;
        Ok(bytes)
    }

    pub(crate) fn create(bytes: usize, ordinal: u32) -> Result<u64> {
        let (properties, mut handle) = (Properties::on(ordinal), 0);
        // SAFETY: the out-parameter is live, and the properties are at least as long as the driver reads.
        unsafe { sys::cuMemCreate(&raw mut handle, bytes, (&raw const properties).cast(), 0) }.result()?;
        Ok(handle)
    }

    pub(crate) fn release(handle: u64) -> Result<()> {
        // SAFETY: the handle is held once by the caller.
        unsafe { sys::cuMemRelease(handle) }.result()
    }

    /// Maps a handle of device 0 for device 0.
    fn map(handle: u64, bytes: usize) -> Result<u64> {
        let mut at = 0;
        // SAFETY: the out-parameter is live.
        unsafe { sys::cuMemAddressReserve(&raw mut at, bytes, 0, 0, 0) }.result()?;
        // SAFETY: the range was just reserved, the handle is live and as large.
        unsafe { sys::cuMemMap(at, bytes, 0, handle, 0) }.result()?;
        // `CUmemAccessDesc`: a device, its ordinal, read and write.
        let access = [1_u32, 0, 3];
        // SAFETY: the range is mapped, and the description is live.
        unsafe { sys::cuMemSetAccess(at, bytes, access.as_ptr().cast(), 1) }.result()?;
        Ok(at)
    }

    pub(crate) fn register(host: &mut [u8]) -> Result<()> {
        // SAFETY: the memory is the caller's, who unregisters it before it is freed.
        unsafe { sys::cuMemHostRegister_v2(host.as_mut_ptr().cast(), host.len(), 0) }.result()
    }

    pub(crate) fn unregister(host: &mut [u8]) -> Result<()> {
        // SAFETY: the memory is live, and the driver refuses what is not registered.
        unsafe { sys::cuMemHostUnregister(host.as_mut_ptr().cast()) }.result()
    }

    /// Free bytes of the current context's device.
    pub(crate) fn free_memory() -> Result<i64> {
        result::mem_get_info().map(|(free, _)| i64::try_from(free).expect("it fits into memory"))
    }

    /// The device that the driver says an address is on.
    pub(crate) fn ordinal_of(at: u64) -> Result<u32> {
        let mut ordinal = 0_u32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: the attribute is an int, and the out-parameter is as wide.
        unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, at) }.result()?;
        Ok(ordinal)
    }

    pub(crate) fn stream() -> Result<sys::CUstream> {
        result::stream::create(result::stream::StreamKind::NonBlocking)
    }

    pub(crate) fn stream_destroy(stream: sys::CUstream) -> Result<()> {
        // SAFETY: the stream is live and not used again.
        unsafe { result::stream::destroy(stream) }
    }

    pub(crate) fn synchronize(stream: sys::CUstream) -> Result<()> {
        // SAFETY: the stream is live.
        unsafe { result::stream::synchronize(stream) }
    }

    pub(crate) fn default_pool(ordinal: u32) -> Result<sys::CUmemoryPool> {
        let device = result::device::get(number(ordinal))?;
        // SAFETY: the device came from the driver.
        unsafe { result::device::get_default_mem_pool(device) }
    }

    /// How much the default pool keeps when nothing of it is in use.
    pub(crate) fn keep_pool(ordinal: u32, mut bytes: u64) -> Result<()> {
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let pool = default_pool(ordinal)?;
        // SAFETY: the attribute is 64 bits wide, as what is passed is, and default pools are always there.
        unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result()?;
        // SAFETY: as above. What is in use stays.
        unsafe { sys::cuMemPoolTrimTo(pool, 0) }.result()
    }

    pub(crate) fn pool_create(ordinal: u32) -> Result<sys::CUmemoryPool> {
        let (properties, mut pool) = (Properties::on(ordinal), ptr::null_mut());
        // SAFETY: the out-parameter is live, and the properties are at least as long as the driver reads.
        unsafe { sys::cuMemPoolCreate(&raw mut pool, (&raw const properties).cast()) }.result()?;
        Ok(pool)
    }

    pub(crate) fn pool_destroy(pool: sys::CUmemoryPool) -> Result<()> {
        // SAFETY: the pool is live and not used again.
        unsafe { sys::cuMemPoolDestroy(pool) }.result()
    }

    /// Lets a device at a pool.
    pub(crate) fn pool_access(pool: sys::CUmemoryPool, ordinal: u32) -> Result<()> {
        let access = [1_u32, ordinal, 3];
        // SAFETY: the pool and the description are live.
        unsafe { sys::cuMemPoolSetAccess(pool, access.as_ptr().cast(), 1) }.result()
    }

    pub(crate) fn can_access(from: u32, to: u32) -> Result<bool> {
        let (from, to) = (result::device::get(number(from))?, result::device::get(number(to))?);
        let mut can = 0;
        // SAFETY: the devices came from the driver, and the out-parameter is live.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, from, to) }.result()?;
        Ok(can != 0)
    }

    pub(crate) fn copy_peer(to: (u64, Context), from: (u64, Context), bytes: usize) -> Result<()> {
        // SAFETY: both blocks are live in their contexts and at least so large.
        unsafe { sys::cuMemcpyPeer(to.0, to.1.raw(), from.0, from.1.raw(), bytes) }.result()
    }

    pub(crate) fn init() -> Result<()> {
        result::init()
    }

    /// Gives back the one reference that [`Context::primary`] took.
    pub(crate) fn primary_release(ordinal: u32) -> Result<()> {
        let device = result::device::get(number(ordinal))?;
        // SAFETY: the process, which is a test's, uses the context no more.
        unsafe { result::primary_ctx::release(device) }
    }

    pub(crate) fn primary_reset(ordinal: u32) -> Result<()> {
        let device = result::device::get(number(ordinal))?;
        // SAFETY: as above.
        unsafe { sys::cuDevicePrimaryCtxReset_v2(device) }.result()
    }

    /// A `CUcontext`, as a number: it may be used by any thread.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Context(u64);

    impl Context {
        fn raw(self) -> sys::CUcontext {
            address(self.0)
        }

        /// A device's primary context, retained once and for ever.
        pub(crate) fn primary(ordinal: u32) -> Result<Self> {
            static RETAINED: Mutex<Option<HashMap<u32, Context>>> = Mutex::new(None);
            let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
            let retained = retained.get_or_insert_default();
            if let Some(context) = retained.get(&ordinal) {
                return Ok(*context);
            }
            result::init()?;
            let device = result::device::get(number(ordinal))?;
            // SAFETY: the device came from the driver.
            let context = Self(unsafe { result::primary_ctx::retain(device) }? as u64);
            retained.insert(ordinal, context);
            Ok(context)
        }

        /// A context beside the primary one, current on this thread. Newer versions of the call have other arguments.
        pub(crate) fn create(ordinal: u32) -> Result<Self> {
            type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> sys::CUresult;
            let device = result::device::get(number(ordinal))?;
            // SAFETY: the driver is loaded already.
            let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("the driver is there");
            // SAFETY: that is the signature of version 2, which each driver has.
            let create = unsafe { driver.get::<Create>(b"cuCtxCreate_v2") }.expect("each driver has it");
            let mut context = ptr::null_mut();
            // SAFETY: the out-parameter is live.
            unsafe { create(&raw mut context, 0, device) }.result()?;
            Ok(Self(context as u64))
        }

        pub(crate) fn make_current(self) {
            // SAFETY: the context is alive: primary ones are retained for ever.
            unsafe { result::ctx::set_current(self.raw()) }.expect("a live context can be current");
        }

        /// Lets the current context at the memory of another.
        pub(crate) fn enable_peer(self, other: Self) -> Result<()> {
            self.make_current();
            // SAFETY: both are alive.
            unsafe { sys::cuCtxEnablePeerAccess(other.raw(), 0) }.result()
        }

        pub(crate) fn destroy(self) -> Result<()> {
            // SAFETY: the context was created by `create` and is not used again.
            unsafe { sys::cuCtxDestroy_v2(self.raw()) }.result()
        }
    }
}
