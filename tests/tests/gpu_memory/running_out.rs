//! Tests a device that runs out of memory: the report, hooks, and second tries.

use super::*;

fn free_memory() -> usize {
    result::mem_get_info().expect("a context is current").0
}

/// Runs the code in a scope that reports nothing.
pub(super) fn quietly<R>(name: &str, code: impl FnOnce(&mut GpuMemTrace) -> R) -> R {
    GpuMemTrace::scope(name, |trace| {
        trace.set_silent(true);
        code(trace)
    })
}

/// Allocates all but half a GiB of the card. Returns the line and the blocks.
#[inline(never)]
fn hog(blocks: usize) -> (u32, usize, Vec<u64>) {
    let size = (free_memory() - GIB / 2) / blocks / (2 * MIB) * (2 * MIB);
    let mut taken = Vec::new();
    let mut place = 0;
    for _ in 0..blocks {
        // SAFETY: a context is current. The memory is never read.
        let (line, block) = (line!(), unsafe { result::malloc_sync(size) });
        taken.push(block.expect("so much was free"));
        place = line;
    }
    (place, size * blocks, taken)
}

pub(super) fn out_of_memory() {
    static REPORTED: Mutex<Vec<OutOfMemory>> = Mutex::new(Vec::new());
    let reported = || REPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let stream = context.default_stream().cu_stream();
    on_oom(move |oom| reported().push(oom.clone()));
    let mut wrong = Wrong::default();
    let before = quietly("innocent", |_| {
        // SAFETY: a context is current. The memory is never read.
        unsafe { result::malloc_sync(3 * MIB) }.expect("the device has room")
    });
    let (hogged_at, bytes, blocks) = quietly("hog", |_| hog(4));
    println!("the hog has {bytes} B by {} blocks, and {} B are free", blocks.len(), free_memory());

    // The lines of live blocks are looked up before the refusals, because there is little time then.
    gpumem::breakdown(0).expect("it can be read");
    let lines = quietly("victim", |_| {
        // SAFETY: a context is current, and the null stream is of it. Nothing is given out.
        let (plain_at, plain) = (line!(), unsafe { result::malloc_sync(GIB) });
        // SAFETY: as above.
        let (pooled_at, pooled) = (line!(), unsafe { result::malloc_async(stream, 3 * GIB) });
        println!("refused: {plain:?}, {pooled:?}");
        assert!(plain.is_err() && pooled.is_err(), "more than is free");
        [plain_at, pooled_at]
    });
    let reported = mem::take(&mut *reported());
    wrong.unless(reported.len() == 2, || format!("{} refusals were reported, not 2", reported.len()));
    for ((oom, line), (asked, kind)) in reported.iter().zip(lines).zip([(GIB, "device"), (3 * GIB, "pool")]) {
        println!("reported: requested {:?} {} in {:?} at {:?}", oom.requested, oom.kind, oom.path, oom.line);
        println!("  scopes {:?}\n  places {:?}", oom.scopes, oom.places);
        let what = (oom.device, oom.requested.get(), oom.kind.name(), oom.path.clone());
        wrong.unless(what == (0, asked as u64, kind, vec!["victim".to_owned()]), || format!("{what:?}"));
        let at = |place: &str, line: u32| place.contains(&format!("gpu_memory/running_out.rs:{line}:"));
        // The output of this test has the line, even if the report does not.
        println!("refused at gpu_memory/running_out.rs:{line}:");
        wrong
            .unless(oom.line.as_deref().is_none_or(|place| at(place, line)), || format!("line {line}: {:?}", oom.line));
        let scope = oom.scopes.first().map(|scope| (scope.name.as_str(), scope.blocks, scope.bytes.get()));
        wrong.unless(scope == Some(("hog", 4, bytes as u64)), || format!("{kind}: held by {scope:?}, not {bytes} B"));
        let place = oom.places.first();
        let right = place.is_some_and(|place| at(&place.name, hogged_at) && place.bytes.get() == bytes as u64);
        wrong.unless(right, || format!("{kind}: held at {place:?}, not line {hogged_at}"));
        match &oom.breakdown {
            Ok(Breakdown { parts, memory, .. }) => {
                let sum: Bytes = parts.iter().map(|part| part.bytes).sum();
                wrong.unless(sum == memory.used, || format!("{kind}: the parts are {sum}, not {}", memory.used));
                let hog = parts.iter().find(|part| part.kind == PartKind::Scope && part.name == "hog");
                let right = hog.is_some_and(|part| part.bytes.get() == bytes as u64);
                wrong.unless(right, || format!("{kind}: the breakdown has {hog:?}"));
            }
            Err(why) => wrong.unless(false, || format!("{kind}: no breakdown: {why}")),
        }
    }
    for block in blocks.into_iter().chain([before]) {
        // SAFETY: each came from `malloc_sync` and is given back once.
        unsafe { result::free_sync(block) }.expect("it was allocated");
    }
    // Less than what was refused, which would not be reported if it was obtained after all.
    // SAFETY: as above.
    let after = unsafe { result::malloc_sync(GIB / 2).and_then(|block| result::free_sync(block)) };
    wrong.unless(after.is_ok(), || format!("refused when all is free: {after:?}"));
    wrong.end();
}

/// A hook runs in the callback of the call that was refused. What it frees is counted, or `lost` is not 0.
pub(super) fn hook() {
    let _context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let trace = GpuMemTrace::builder().gauge(Gauge::Exact).silent(true).start().expect("allocations are intercepted");
    // SAFETY: a context is current. The memory is never read.
    let block = unsafe { result::malloc_sync(64 * MIB) }.expect("the device has room");
    let held = Mutex::new(Some(block));
    on_oom(move |_| {
        if let Some(block) = held.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // SAFETY: it came from `malloc_sync` and is given back once.
            unsafe { result::free_sync(block) }.expect("it was allocated");
        }
    });
    // SAFETY: a context is current. Nothing is given out.
    let refused = unsafe { result::malloc_sync(1 << 45) };
    let data = trace.data();
    println!("{refused:?}: used {} B, lost {}, untracked {}", data.used.get(), data.lost, data.untracked);
    let mut wrong = Wrong::default();
    wrong.unless(refused.is_err() && (data.used == 0 || data.lost > 0), || {
        "64 MiB are gone, and it was not said".to_owned()
    });
    wrong.end();
}

fn take(bytes: usize) -> Result<u64, DriverError> {
    // SAFETY: a context is current. The memory is never read.
    unsafe { result::malloc_sync(bytes) }
}

fn give(block: u64) {
    // SAFETY: it came from `take` and is given back once.
    unsafe { result::free_sync(block) }.expect("it was allocated");
}

/// The default pool of device 0.
struct Pool(sys::CUmemoryPool);

impl Pool {
    /// Makes the pool keep its memory, as the pool of a busy program does.
    fn that_keeps() -> Self {
        let device = result::device::get(0).expect("there is a device");
        let mut all = u64::MAX;
        // SAFETY: the device came from the driver, and the attribute is 64 bits wide, as what is passed is.
        unsafe {
            let pool = result::device::get_default_mem_pool(device).expect("the device has a pool");
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()).result().expect("it has a threshold");
            Self(pool)
        }
    }

    fn reserved(&self) -> Bytes {
        let (mut bytes, attribute) = (0_u64, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        // SAFETY: the pool is live, and the attribute is 64 bits wide, as the out-parameter is.
        unsafe { sys::cuMemPoolGetAttribute(self.0, attribute, (&raw mut bytes).cast()) }
            .result()
            .expect("it is known");
        Bytes::new(bytes)
    }
}

pub(super) fn retry() {
    static REPORTED: AtomicUsize = AtomicUsize::new(0);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let stream = context.default_stream().cu_stream();
    subscribe().expect("allocations can be intercepted");
    on_oom(|_| {
        REPORTED.fetch_add(1, Relaxed);
    });
    let (pool, mut wrong) = (Pool::that_keeps(), Wrong::default());
    let most = free_memory() / 10 * 8 / (2 * MIB) * (2 * MIB);
    // SAFETY: the null stream is of the current context. The memory is never read.
    let take_async = || unsafe { result::malloc_async(stream, most) }.expect("so much is free");
    // SAFETY: each block came from `take_async` and is given back once.
    let give_async = |block| unsafe { result::free_async(block, stream) }.expect("it was allocated");

    // The driver's own behaviour differs from version to version, so it is measured first.
    give_async(take_async());
    println!("the pool keeps {}, and {} are wanted", pool.reserved(), Bytes::from(most));
    let alone = take(most);
    println!("without us: {alone:?}; the pool keeps {}", pool.reserved());
    let is_refused = alone.is_err();
    alone.into_iter().for_each(give);
    let reported = REPORTED.load(Relaxed);
    wrong.unless(reported == usize::from(is_refused), || format!("{reported} refusals are reported"));

    give_async(take_async());
    let mut attempts = 0;
    let got = retry_after_trim(|| {
        attempts += 1;
        println!("attempt {attempts}: the pool keeps {}", pool.reserved());
        take(most)
    });
    println!("kept by the pool: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 1 + usize::from(is_refused);
    wrong.unless(right, || format!("kept by the pool: {got:?} after {attempts} attempts"));
    got.into_iter().for_each(give);

    // A cache that frees its block when memory runs out. The pool keeps the block until it is trimmed.
    let mut cache = Some(take_async());
    let (mut attempts, mut kept) = (0, Bytes::ZERO);
    let got = retry_after_trim(|| {
        attempts += 1;
        kept = pool.reserved();
        println!("attempt {attempts}: the pool keeps {kept}");
        take(most).inspect_err(|_| cache.take().into_iter().for_each(give_async))
    });
    println!("in a cache: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 2 && kept < Bytes::mib(64);
    wrong.unless(right, || format!("in a cache: {got:?} after {attempts} attempts, with {kept} in the pool"));
    got.into_iter().for_each(give);
    wrong.unless(REPORTED.load(Relaxed) == reported, || "the first failure of a retry is reported".to_owned());
    wrong.end();
}
