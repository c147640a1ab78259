//! Many threads that allocate and free at random under many traces, whose figures are compared with a log of what was
//! done.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;

use gpumem::{Gauge, GpuMemTrace};
use gpumem_tests::Random;

use crate::Trouble;
use crate::raw::{Names, invoke};

/// A device with a context and a stream in it.
struct Place {
    ordinal: u32,
    context: u64,
    stream: u64,
}

/// A way to allocate.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    Pooled,
    Pitched,
    Physical,
    Array,
}

#[derive(Clone, Copy)]
struct Block {
    place: usize,
    /// Its address or handle.
    name: u64,
    bytes: u64,
    kind: Kind,
}

fn places(devices: u32) -> Result<Vec<Place>, Trouble> {
    let names = Names::default();
    let place = |ordinal: u32| {
        for call in [
            format!("cuDevicePrimaryCtxRetain &context {ordinal}"),
            "cuCtxSetCurrent context".to_owned(),
            "cuStreamCreate &stream 0".to_owned(),
        ] {
            done(names.call(&call)?)?;
        }
        Ok(Place { ordinal, context: names.get("context"), stream: names.get("stream") })
    };
    // The streams are created while allocations are intercepted, so their devices are known.
    gpumem::intercept::subscribe()?;
    (0..devices).map(place).collect()
}

fn done(code: i32) -> Result<(), Trouble> {
    if code == 0 { Ok(()) } else { Err(format!("a call failed with {code}").into()) }
}

/// Allocates up to a few MiB in one of the places; in a pool, or by properties, while another place's context is current,
/// as a library would that was handed a stream.
fn alloc(places: &[Place], random: &mut Random) -> Result<Block, Trouble> {
    let pick = |random: &mut Random| random.below(places.len());
    let (place, other) = (pick(random), pick(random));
    // Half of them of one size, so that an address that one thread gives back is soon another's.
    let bytes = if random.below(2) == 0 { 4096 } else { 1 + random.below(3 << 20) };
    let mut name = 0_u64;
    let out = &raw mut name as u64;
    let mut pitch = 0_u64;
    let pitch = &raw mut pitch as u64;
    let (kind, current, function, arguments, bytes) = match random.below(10) {
        0..4 => (Kind::Plain, place, "cuMemAlloc_v2", [out, bytes, 0, 0, 0, 0], bytes),
        4..7 => (Kind::Pooled, other, "cuMemAllocAsync", [out, bytes, places[place].stream, 0, 0, 0], bytes),
        7 => {
            let rows = [out, pitch, 1 + bytes % 512, 8, 4, 0];
            (Kind::Pitched, place, "cuMemAllocPitch_v2", rows, 512 * 8)
        }
        8 => {
            let pages = (1 + bytes % 3) << 21;
            let properties = [1_u64, 1 | u64::from(places[place].ordinal) << 32, 0, 0];
            let arguments = [out, pages, properties.as_ptr() as u64, 0, 0, 0];
            return called(places, other, "cuMemCreate", arguments).map(|()| Block {
                place,
                name,
                bytes: pages,
                kind: Kind::Physical,
            });
        }
        _ => {
            let shape = [bytes, 2, 0x10 | 4 << 32];
            return called(places, place, "cuArrayCreate_v2", [out, shape.as_ptr() as u64, 0, 0, 0, 0])
                .map(|()| Block { place, name, bytes: bytes * 2 * 2 * 4, kind: Kind::Array });
        }
    };
    called(places, current, function, arguments)?;
    Ok(Block { place, name, bytes, kind })
}

/// Calls a function of the driver while that place's context is current.
fn called(places: &[Place], current: usize, function: &str, arguments: [u64; 6]) -> Result<(), Trouble> {
    done(invoke("cuCtxSetCurrent", [places[current].context, 0, 0, 0, 0, 0])?)?;
    done(invoke(function, arguments)?)
}

fn free(places: &[Place], block: Block, random: &mut Random) -> Result<(), Trouble> {
    let function = match block.kind {
        Kind::Pooled if random.below(4) > 0 => "cuMemFreeAsync",
        Kind::Plain | Kind::Pooled | Kind::Pitched => "cuMemFree_v2",
        Kind::Physical => "cuMemRelease",
        Kind::Array => "cuArrayDestroy",
    };
    called(places, block.place, function, [block.name, places[block.place].stream, 0, 0, 0, 0])
}

/// What is in use, moment by moment.
struct Log(Vec<u64>);

impl Log {
    fn now(&self) -> u64 {
        self.0.last().copied().unwrap_or(0)
    }
}

/// A trace, where it looks, and when it began by the log.
struct Traced {
    trace: GpuMemTrace,
    place: usize,
    began: usize,
}

impl Traced {
    /// How the trace differs from the log of its place, if it does.
    fn differs(&self, log: &Log) -> Option<String> {
        let seen = &log.0[self.began..];
        let (start, end) = (seen[0], log.now());
        let most = seen.iter().max().copied().unwrap_or(start);
        let expected = (end.cast_signed() - start.cast_signed(), most - start.max(end));
        let data = self.trace.data();
        let found = (data.used.get(), data.peaked.get());
        let sound = data.gauge == Gauge::Exact && data.lost == 0 && data.untracked == 0;
        (found != expected || !sound).then(|| format!("(used, peaked) is {expected:?} by the log, and {data:?}"))
    }
}

/// What came of a run: traces that were compared, and what was wrong with them.
#[derive(Default)]
struct Verdict {
    traces: usize,
    wrong: Vec<String>,
}

impl Verdict {
    fn take(&mut self, traced: &Traced, log: &Log) {
        self.traces += 1;
        self.wrong.extend(traced.differs(log));
    }

    fn reported(mut self) -> Result<String, Trouble> {
        match self.wrong.pop() {
            None => Ok(format!("{} traces equal the log", self.traces)),
            Some(wrong) => Err(format!("{} of {} traces are wrong: {wrong}", self.wrong.len() + 1, self.traces).into()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start(place: &Place, of_thread: bool) -> Result<GpuMemTrace, Trouble> {
    // Those of all threads count them also if traces of other threads overlap, as the log does.
    let builder = GpuMemTrace::builder().device(place.ordinal).silent(true).at_peak(!of_thread);
    Ok(if of_thread { builder.thread_local_only() } else { builder }.start()?)
}

/// All threads at once, under traces of the whole process. They either all allocate or all free, so what was in use in
/// between never exceeds both ends, in whatever order the calls came; traces begin and end in between, on any thread.
/// The first thread that finds a block frees it.
pub(crate) fn together(threads: u64, phases: u64, devices: u32) -> Result<String, Trouble> {
    let places = places(devices)?;
    let blocks = Mutex::new(Vec::new());
    let logs: Vec<_> = places.iter().map(|_| Mutex::new(Log(vec![0]))).collect();
    let verdict = Mutex::new(Verdict::default());
    let barrier = Barrier::new(usize::try_from(threads)?);
    let failed = Mutex::new(None);
    let work = |mut random: Random| {
        let mut traced: Vec<Traced> = Vec::new();
        for phase in 0..phases {
            for (at, place) in places.iter().enumerate() {
                let began = lock(&logs[at]).0.len() - 1;
                if phase == 0 || random.below(2) == 0 {
                    match start(place, false) {
                        Ok(trace) => traced.push(Traced { trace, place: at, began }),
                        Err(trouble) => *lock(&failed) = Some(trouble.to_string()),
                    }
                }
            }
            barrier.wait();
            let outcome = (0..random.below(24)).try_for_each(|_| {
                if phase % 2 == 0 {
                    let block = alloc(&places, &mut random)?;
                    lock(&blocks).push(block);
                    return Ok::<_, Trouble>(());
                }
                let block = {
                    let mut blocks = lock(&blocks);
                    let count = blocks.len() as u64;
                    (count > 0).then(|| blocks.swap_remove(usize::try_from(random.below(count)).unwrap_or(0)))
                };
                block.map_or(Ok(()), |block| free(&places, block, &mut random))
            });
            if let Err(trouble) = outcome {
                *lock(&failed) = Some(trouble.to_string());
            }
            if barrier.wait().is_leader() {
                for (at, log) in logs.iter().enumerate() {
                    let blocks = lock(&blocks);
                    let of_place = blocks.iter().filter(|block: &&Block| block.place == at);
                    let in_use = of_place.map(|block| block.bytes).sum();
                    lock(log).0.push(in_use);
                }
            }
            barrier.wait();
            for ended in traced.extract_if(.., |_| random.below(3) == 0) {
                lock(&verdict).take(&ended, &lock(&logs[ended.place]));
            }
        }
        for ended in traced {
            lock(&verdict).take(&ended, &lock(&logs[ended.place]));
        }
    };
    thread::scope(|scope| {
        for seed in 1..=threads {
            let work = &work;
            scope.spawn(move || work(Random::new(seed)));
        }
    });
    if let Some(trouble) = lock(&failed).take() {
        return Err(trouble.into());
    }
    verdict.into_inner().unwrap_or_else(PoisonError::into_inner).reported()
}

/// Each thread for itself, under nested and overlapping traces of its own: what the others do must not show.
pub(crate) fn alone(threads: u64, steps: u64, devices: u32) -> Result<String, Trouble> {
    let places = places(devices)?;
    let work = |mut random: Random| -> Result<Verdict, Trouble> {
        let mut verdict = Verdict::default();
        let mut logs: Vec<_> = places.iter().map(|_| Log(vec![0])).collect();
        let (mut traced, mut blocks): (Vec<Traced>, Vec<Block>) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            match random.below(8) {
                0..3 => {
                    let block = alloc(&places, &mut random)?;
                    let in_use = logs[block.place].now() + block.bytes;
                    logs[block.place].0.push(in_use);
                    blocks.push(block);
                }
                3..6 if !blocks.is_empty() => {
                    let block = blocks.swap_remove(random.below(blocks.len()));
                    let in_use = logs[block.place].now() - block.bytes;
                    logs[block.place].0.push(in_use);
                    free(&places, block, &mut random)?;
                }
                6 if !traced.is_empty() => {
                    let ended = traced.swap_remove(random.below(traced.len()));
                    verdict.take(&ended, &logs[ended.place]);
                }
                _ => {
                    let place = random.below(places.len());
                    let trace = start(&places[place], true)?;
                    traced.push(Traced { trace, place, began: logs[place].0.len() - 1 });
                }
            }
        }
        for ended in traced {
            verdict.take(&ended, &logs[ended.place]);
        }
        for block in blocks {
            free(&places, block, &mut random)?;
        }
        Ok(verdict)
    };
    let verdicts: Vec<Result<Verdict, String>> = thread::scope(|scope| {
        let spawn = |seed: u64| {
            let work = &work;
            scope.spawn(move || work(Random::new(seed)).map_err(|trouble| trouble.to_string()))
        };
        let running: Vec<_> = (1..=threads).map(spawn).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("panicked".to_owned()))).collect()
    });
    let mut all = Verdict::default();
    for verdict in verdicts {
        let verdict = verdict?;
        all.traces += verdict.traces;
        all.wrong.extend(verdict.wrong);
    }
    all.reported()
}

/// Threads that allocate and free while the subscription ends and begins, so many times.
pub(crate) fn toggling(threads: u64, rounds: u64) -> Result<String, Trouble> {
    let places = places(1)?;
    let going = AtomicBool::new(true);
    let work = |mut random: Random| -> Result<(), String> {
        while going.load(Ordering::Relaxed) {
            let block = alloc(&places, &mut random).map_err(|trouble| trouble.to_string())?;
            free(&places, block, &mut random).map_err(|trouble| trouble.to_string())?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (1..=threads).map(|seed| scope.spawn(move || work(Random::new(seed)))).collect();
        let outcome = (0..rounds).try_for_each(|_| {
            gpumem::intercept::unsubscribe();
            gpumem::intercept::subscribe()
        });
        going.store(false, Ordering::Relaxed);
        for thread in running {
            thread.join().map_err(|_| "panicked")??;
        }
        outcome?;
        Ok("done".to_owned())
    })
}

/// Threads that allocate and free until the process ends, also while it does.
pub(crate) fn go_on(threads: u64) -> Result<String, Trouble> {
    let places: &'static [Place] = places(1)?.leak();
    for seed in 1..=threads {
        thread::spawn(move || {
            let mut random = Random::new(seed);
            while let Ok(block) = alloc(places, &mut random) {
                _ = free(places, block, &mut random);
            }
        });
    }
    Ok("going on".to_owned())
}

/// Threads that all start the first trace at the same moment, and allocate under it.
pub(crate) fn rush(threads: u64) -> Result<String, Trouble> {
    done(invoke("cuInit", [0; 6])?)?;
    let names = Names::default();
    done(names.call("cuDevicePrimaryCtxRetain &context 0")?)?;
    let (context, barrier) = (names.get("context"), Barrier::new(usize::try_from(threads)?));
    let work = || -> Result<(), String> {
        barrier.wait();
        let trace =
            GpuMemTrace::builder().gauge(Gauge::Exact).silent(true).start().map_err(|error| error.to_string())?;
        let mut address = 0_u64;
        for (function, first) in [("cuCtxSetCurrent", context), ("cuMemAlloc_v2", &raw mut address as u64)] {
            let code = invoke(function, [first, 1000, 0, 0, 0, 0]).map_err(|trouble| trouble.to_string())?;
            done(code).map_err(|trouble| trouble.to_string())?;
        }
        barrier.wait();
        let used = trace.data().used.get();
        if (1000..=1000 * threads.cast_signed()).contains(&used) { Ok(()) } else { Err(format!("used {used}")) }
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in running {
            thread.join().map_err(|_| "panicked")??;
        }
        Ok("done".to_owned())
    })
}
