//! Many threads allocate and free while the subscription or the process starts or ends. `tests/gpu_exact/replay.rs`, which also
//! runs on the stand-in driver, compares the results of many threads with their sum.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use gpumem::{Gauge, GpuMemTrace};
use gpumem_tests::Random;

use crate::Trouble;
use crate::raw::{Names, invoke};

/// A context of device 0 and a stream in it.
#[derive(Clone, Copy)]
struct Place {
    context: u64,
    stream: u64,
}

impl Place {
    fn make() -> Result<Self, Trouble> {
        let names = Names::default();
        // The stream is created while allocations are intercepted, so its device is known.
        gpumem::intercept::subscribe()?;
        for call in ["cuDevicePrimaryCtxRetain &context 0", "cuCtxSetCurrent context", "cuStreamCreate &stream 0"] {
            done(names.call(call)?)?;
        }
        Ok(Self { context: names.get("context"), stream: names.get("stream") })
    }

    /// Allocates up to a few MiB, and frees them.
    fn alloc_and_free(self, random: &mut Random) -> Result<(), Trouble> {
        let Self { context, stream } = self;
        // Half of the blocks have the same size, so the address that one thread frees is soon allocated by another thread.
        let bytes = if random.below(2) == 0 { 4096 } else { 1 + random.below(3 << 20) };
        let (mut name, mut pitch) = (0_u64, 0_u64);
        let (out, pitch) = (&raw mut name as u64, &raw mut pitch as u64);
        let (properties, shape) = ([1_u64, 1, 0, 0], [bytes, 2, 0x10 | 4 << 32]);
        let (alloc, arguments, free) = match random.below(10) {
            0..4 => ("cuMemAlloc_v2", [out, bytes, 0, 0, 0, 0], "cuMemFree_v2"),
            4 => ("cuMemAllocAsync", [out, bytes, stream, 0, 0, 0], "cuMemFree_v2"),
            5..7 => ("cuMemAllocAsync", [out, bytes, stream, 0, 0, 0], "cuMemFreeAsync"),
            7 => ("cuMemAllocPitch_v2", [out, pitch, 1 + bytes % 512, 8, 4, 0], "cuMemFree_v2"),
            8 => {
                let pages = (1 + bytes % 3) << 21;
                ("cuMemCreate", [out, pages, properties.as_ptr() as u64, 0, 0, 0], "cuMemRelease")
            }
            _ => ("cuArrayCreate_v2", [out, shape.as_ptr() as u64, 0, 0, 0, 0], "cuArrayDestroy"),
        };
        done(invoke("cuCtxSetCurrent", [context, 0, 0, 0, 0, 0])?)?;
        done(invoke(alloc, arguments)?)?;
        done(invoke(free, [std::hint::black_box(name), stream, 0, 0, 0, 0])?)
    }
}

fn done(code: i32) -> Result<(), Trouble> {
    if code == 0 { Ok(()) } else { Err(format!("a call failed with {code}").into()) }
}

/// Runs threads that allocate and free while the subscription ends and starts this number of times.
pub(crate) fn toggling(threads: u64, rounds: u64) -> Result<String, Trouble> {
    let place = Place::make()?;
    let going = AtomicBool::new(true);
    let work = |mut random: Random| -> Result<(), String> {
        while going.load(Ordering::Relaxed) {
            place.alloc_and_free(&mut random).map_err(|trouble| trouble.to_string())?;
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

/// Runs threads that allocate and free until the process ends, even while it ends.
pub(crate) fn go_on(threads: u64) -> Result<String, Trouble> {
    let place = Place::make()?;
    for seed in 1..=threads {
        thread::spawn(move || {
            let mut random = Random::new(seed);
            while place.alloc_and_free(&mut random).is_ok() {}
        });
    }
    Ok("going on".to_owned())
}

/// Runs threads that all start the first trace at the same moment, and allocate under it.
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
