//! Compares random programs with a naive computation of their own logs.

use gpumem_tests::rule::{Counts, Rule};

use super::*;

/// An event of the log.
enum Entry {
    Alloc {
        thread: usize,
        block: u64,
        bytes: i64,
    },
    Free {
        thread: usize,
        block: u64,
    },
    Open {
        thread: usize,
        trace: u64,
        counts: Counts,
    },
    Reset {
        trace: u64,
    },
    Close {
        trace: u64,
    },
    /// The figures that a trace reported.
    Said {
        trace: u64,
        figures: (i64, u64),
    },
}

/// One lock protects everything, so that the order of the log is the order of the events.
#[derive(Default)]
struct World {
    log: Vec<Entry>,
    traces: Vec<(u64, GpuMemTrace)>,
    blocks: Vec<(Block, u64)>,
    /// The last number of a trace or of a block.
    last: u64,
    missed: u64,
}

impl World {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn allocate(&mut self, thread: usize, random: &mut Random) {
        let (taken, block) = (take(any_way(random), any_bytes(random)), self.next());
        self.log.push(Entry::Alloc { thread, block, bytes: taken.counted() });
        self.blocks.push((taken, block));
    }

    fn free(&mut self, thread: usize, random: &mut Random) {
        if !self.blocks.is_empty() {
            let (taken, block) = self.blocks.swap_remove(random.below(self.blocks.len()));
            self.log.push(Entry::Free { thread, block });
            give(taken);
        }
    }

    fn open(&mut self, thread: usize, counts: Counts) {
        let builder = GpuMemTrace::builder().gauge(Gauge::Exact).device(0).on_exit_report(false);
        let builder = match counts {
            Counts::All => builder.all_threads(),
            Counts::OwnAndUnscoped => builder,
            Counts::Own => builder.thread_local_only(),
        };
        let opened = builder.start().expect("allocations can be intercepted");
        let trace = self.next();
        self.traces.push((trace, opened));
        self.log.push(Entry::Open { thread, trace, counts });
    }

    fn read(&mut self, at: usize) {
        let (trace, opened) = &self.traces[at];
        let data = opened.data();
        self.missed += data.lost + data.untracked;
        self.log.push(Entry::Said { trace: *trace, figures: (data.used.get(), data.peaked.get()) });
    }

    fn reset(&mut self, at: usize) {
        let (trace, opened) = &mut self.traces[at];
        opened.reset();
        self.log.push(Entry::Reset { trace: *trace });
    }

    fn close(&mut self, at: usize) {
        self.read(at);
        let (trace, _) = self.traces.swap_remove(at);
        self.log.push(Entry::Close { trace });
    }

    /// Replays the log and compares the figures. Returns the number of comparisons.
    fn replay(&self) -> usize {
        let (mut rule, mut compared) = (Rule::default(), 0);
        for entry in &self.log {
            match *entry {
                Entry::Alloc { thread, block, bytes } => rule.alloc(thread as u64, block, bytes),
                Entry::Free { thread, block } => rule.free(thread as u64, block),
                Entry::Open { thread, trace, counts } => rule.open(thread as u64, trace, counts),
                Entry::Reset { trace } => rule.reset(trace),
                Entry::Close { trace } => _ = rule.close(trace),
                Entry::Said { trace, figures } => {
                    assert_eq!(figures, rule.read(trace), "trace {trace}");
                    compared += 1;
                }
            }
        }
        compared
    }

    fn end(&mut self, what: &str) {
        while let Some(at) = self.traces.len().checked_sub(1) {
            self.close(at);
        }
        while let Some((taken, _)) = self.blocks.pop() {
            give(taken);
        }
        let count = |is: fn(&Entry) -> bool| self.log.iter().filter(|entry| is(entry)).count();
        let changes = count(|entry| matches!(entry, Entry::Alloc { .. } | Entry::Free { .. }));
        let traces = count(|entry| matches!(entry, Entry::Open { .. }));
        let compared = self.replay();
        println!("{what}: {changes} allocations and frees, {traces} traces, {compared} readings equal to the replay");
        assert_eq!(self.missed, 0, "lost or untracked");
    }
}

#[test]
fn a_hundred_nested_traces_equal_the_replayed_log() {
    let Some(_one) = device() else { return };
    let (mut world, mut random) = (World::default(), Random::new(1));
    for depth in 0..100 {
        world.open(0, if depth % 10 == 9 { Counts::Own } else { Counts::OwnAndUnscoped });
        for _ in 0..5 {
            world.allocate(0, &mut random);
        }
        for _ in 0..random.below(6) {
            world.free(0, &mut random);
        }
    }
    for at in 0..100 {
        world.read(at);
    }
    while let Some(innermost) = world.traces.len().checked_sub(1) {
        for _ in 0..3 {
            world.free(0, &mut random);
        }
        world.allocate(0, &mut random);
        world.close(innermost);
    }
    world.end("100 nested traces");
}

/// PyTorch's statistics equal what the program adds up, and the high-water marks of a real pool are reset.
#[test]
fn the_statistics_equal_what_is_added_up() {
    let Some(_one) = device() else { return };
    let (mut random, mut blocks, mut wrong) = (Random::new(7), Vec::new(), Wrong::default());
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
            give(block);
        } else {
            let block = take(any_way(&mut random), any_bytes(&mut random));
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
            wrong.note(Err(format!(
                "step {step}: {reported:?}, reserved {reserved}, not {current}, {peak}, {allocated}"
            )));
        }
    }
    assert_eq!(trace.data().peak_over_start().get(), most - start, "a reset of these peaks is no trace's");
    println!("2000 steps: {current} B allocated, {allocated} B in all, {} wrong", wrong.count());
    blocks.into_iter().for_each(give);
    let pooled = take(Way::Async, 40 * MIB);
    give(pooled);
    let high = max_memory_reserved(0).expect("the pool can be read");
    empty_cache().expect("nothing is captured");
    reset_peak_memory_stats(0).expect("it is intercepted, and the pool can be reset");
    let (now, most) = (memory_reserved(0), max_memory_reserved(0));
    println!("reserved: {high} at most, {now:?} after a trim, {most:?} after a reset of the peaks");
    if high.at_least < Bytes::mib(40) || most.map(|most| most.at_least) != now {
        wrong.note(Err("the pool's mark".to_owned()));
    }
    println!("{}", memory_summary(0).expect("it is intercepted"));
    wrong.end();
}

const THREADS: usize = 16;

#[test]
fn sixteen_threads_with_overlapping_traces_equal_the_replayed_log() {
    let Some(_one) = device() else { return };
    let world = Mutex::new(World::default());
    let steps = |me: usize| {
        Context::primary(0).make_current();
        let mut random = Random::new(100 + me as u64);
        for _ in 0..300 {
            let mut world = world.lock().expect("no thread panicked");
            let open = world.traces.len();
            match random.below(12) {
                0..=4 => world.allocate(me, &mut random),
                5..=8 => world.free(me, &mut random),
                9 if open < 50 => {
                    let counts = [Counts::OwnAndUnscoped, Counts::OwnAndUnscoped, Counts::Own, Counts::All];
                    world.open(me, counts[random.below(4)]);
                }
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

/// Threads allocate and free at the same time. Returns an error if the figures differ from the sum of the blocks that the threads kept.
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
    let events = status().events - before.events;
    kept.into_iter().for_each(give);
    let end = trace.data();
    let said = format!(
        "16 threads at once by {ways:?}: {events} events, used {} where {expected} B were kept, {} when all was freed, \
         peaked {}, lost {}, untracked {}",
        data.used.get(),
        end.used.get(),
        data.peaked,
        end.lost,
        end.untracked
    );
    println!("{said}");
    let right = data.used.get() == expected && end.used == 0 && (end.lost, end.untracked) == (0, 0);
    // The peak is not higher than the sum of all allocations.
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
