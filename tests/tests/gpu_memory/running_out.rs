//! Tests retries of allocations after a device has run out of memory.

use super::*;

fn free_memory() -> usize {
    result::mem_get_info().expect("a context is current").0
}

pub(super) fn take(bytes: usize) -> Result<u64, DriverError> {
    // SAFETY: a context is current. The memory is never read.
    unsafe { result::malloc_sync(bytes) }
}

pub(super) fn free_block(block: u64) {
    // SAFETY: the block came from `take` and is freed once.
    unsafe { result::free_sync(block) }.expect("it was allocated");
}

/// The default pool of device 0.
struct KeepingPool(sys::CUmemoryPool);

impl KeepingPool {
    /// Makes the pool keep its memory, as the pool of a busy program does.
    fn that_keeps() -> Self {
        let device = result::device::get(0).expect("there is a device");
        let mut all = u64::MAX;
        // SAFETY: the device came from the driver, and both the attribute and the value are 64 bits wide.
        unsafe {
            let pool = result::device::get_default_mem_pool(device).expect("the device has a pool");
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()).result().expect("it has a threshold");
            Self(pool)
        }
    }

    fn reserved(&self) -> Bytes {
        let (mut bytes, attribute) = (0_u64, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        // SAFETY: the pool is live, and both the attribute and the out-parameter are 64 bits wide.
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
    let (pool, mut wrong) = (KeepingPool::that_keeps(), Wrong::default());
    let most = free_memory() / 10 * 8 / (2 * MIB) * (2 * MIB);
    // SAFETY: the null stream belongs to the current context. The memory is never read.
    let take_async = || unsafe { result::malloc_async(stream, most) }.expect("so much is free");
    // SAFETY: each block came from `take_async` and is freed once.
    let free_block_async = |block| unsafe { result::free_async(block, stream) }.expect("it was allocated");

    // The driver's behaviour without gpumem differs from version to version, so it is measured first.
    free_block_async(take_async());
    println!("the pool keeps {}, and {} are wanted", pool.reserved(), Bytes::from(most));
    let alone = take(most);
    println!("without us: {alone:?}; the pool keeps {}", pool.reserved());
    let is_rejected = alone.is_err();
    alone.into_iter().for_each(free_block);
    let reported = REPORTED.load(Relaxed);
    wrong.unless(reported == usize::from(is_rejected), || format!("{reported} refusals are reported"));

    free_block_async(take_async());
    let mut attempts = 0;
    let got = retry_after_trim(|| {
        attempts += 1;
        println!("attempt {attempts}: the pool keeps {}", pool.reserved());
        take(most)
    });
    println!("kept by the pool: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 1 + usize::from(is_rejected);
    wrong.unless(right, || format!("kept by the pool: {got:?} after {attempts} attempts"));
    got.into_iter().for_each(free_block);

    // This cache frees its block when memory runs out. The pool keeps the block until it is trimmed.
    let mut cache = Some(take_async());
    let (mut attempts, mut kept) = (0, Bytes::ZERO);
    let got = retry_after_trim(|| {
        attempts += 1;
        kept = pool.reserved();
        println!("attempt {attempts}: the pool keeps {kept}");
        take(most).inspect_err(|_| cache.take().into_iter().for_each(free_block_async))
    });
    println!("in a cache: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 2 && kept < Bytes::mib(64);
    wrong.unless(right, || format!("in a cache: {got:?} after {attempts} attempts, with {kept} in the pool"));
    got.into_iter().for_each(free_block);
    wrong.unless(REPORTED.load(Relaxed) == reported, || "the first failure of a retry is reported".to_owned());
    wrong.end();
}
