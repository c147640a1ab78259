//! Tests how the events of PyTorch's allocator become parts of a pool, as in `gpumem-tch` and in Python.

use gpumem::{Bytes, GpuMemTrace, pool::Pool, report::RegisteredPool, sim::SimGpu, summary};
use gpumem_recording::{
    AllocatorSettings, AllocatorTracker,
    Held::{self, Awaiting, Block, Expandable, Segment},
    TrackedEvent::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap},
};
use gpumem_tests::simulated_gpu;

type Tracker = AllocatorTracker<Pool>;

const MIB: u64 = 1 << 20;

fn tracker(gpu: &SimGpu, held: &[(Held, u64, u64)]) -> Tracker {
    let tracker = Tracker::new(AllocatorSettings::default());
    tracker.start();
    settle(gpu, &tracker, held, 0);
    tracker
}

fn settle(gpu: &SimGpu, tracker: &Tracker, held: &[(Held, u64, u64)], segment_events: u64) {
    tracker.settle(held, segment_events, || Pool::register("PyTorch", gpu.ordinal())).unwrap();
}

fn trace(gpu: &SimGpu) -> GpuMemTrace {
    GpuMemTrace::builder().device(gpu.ordinal()).silent(true).start().unwrap()
}

/// Returns the pool if it is listed. An empty pool is not listed.
fn listed(gpu: &SimGpu) -> Option<RegisteredPool> {
    summary().pools.into_iter().find(|pool| pool.device == gpu.ordinal())
}

fn pool(gpu: &SimGpu) -> RegisteredPool {
    listed(gpu).unwrap()
}

#[test]
fn a_tensor_counts_as_in_memory_allocated() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    let tracker = tracker(&gpu, &[]);
    settle(&gpu, &tracker, &[], 0);
    let trace = trace(&gpu);
    let used = || trace.data().used.get().unsigned_abs();
    let block = gpu.alloc(Bytes::mib(20)).unwrap();
    let base = block.address();
    tracker.event(SegmentAlloc, base, 20 * MIB);
    tracker.event(Alloc, base, 10 * MIB + 1);
    assert_eq!(used(), 10 * MIB + 512);
    // Less than 1 MiB is left of the segment, so it counts for the tensor.
    tracker.event(Alloc, base + 10 * MIB + 512, 9 * MIB - 511);
    assert_eq!(used(), 20 * MIB);
    // Another stream still uses the memory.
    tracker.event(FreeRequested, base, 10 * MIB + 1);
    assert_eq!(used(), 10 * MIB - 512);
    tracker.event(FreeCompleted, base, 10 * MIB + 1);
    tracker.event(Alloc, base, 10 * MIB);
    assert_eq!(used(), 20 * MIB);
    assert_eq!((pool(&gpu).reserved, pool(&gpu).unused()), (Bytes::mib(20), Some(Bytes::ZERO)));
    tracker.event(FreeRequested, base, 10 * MIB);
    tracker.event(FreeCompleted, base, 10 * MIB);
    tracker.event(FreeRequested, base + 10 * MIB + 512, 9 * MIB - 511);
    tracker.event(FreeCompleted, base + 10 * MIB + 512, 9 * MIB - 511);
    tracker.event(SegmentFree, base, 20 * MIB);
    drop(block);
    let data = trace.data();
    assert_eq!((data.used.get(), data.peaked.mb(), data.lost), (0, 20, 0));
    assert_eq!(listed(&gpu), None);
}

#[test]
fn blocks_of_expandable_segments_have_what_was_asked_for() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    let tracker = tracker(&gpu, &[]);
    let trace = trace(&gpu);
    let block = gpu.alloc(Bytes::mib(40)).unwrap();
    tracker.event(SegmentMap, block.address(), 40 * MIB);
    settle(&gpu, &tracker, &[(Expandable, block.address(), 40 * MIB)], 1);
    tracker.event(Alloc, block.address(), 19 * MIB + 700);
    assert_eq!(trace.data().used.get().unsigned_abs(), 19 * MIB + 1024);
    tracker.event(FreeRequested, block.address(), 19 * MIB + 700);
    tracker.event(FreeCompleted, block.address(), 19 * MIB + 700);
    tracker.event(SegmentUnmap, block.address(), 20 * MIB);
    let pool = pool(&gpu);
    assert_eq!((pool.unused(), pool.wrong_calls()), (Some(Bytes::mib(20)), 0));
}

#[test]
fn what_was_there_before_the_first_event_counts_once() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    let before = trace(&gpu);
    let (block, unused) = (gpu.alloc(Bytes::mib(20)).unwrap(), gpu.alloc(Bytes::mib(2)).unwrap());
    let at = |mib: u64| block.address() + mib * MIB;
    let segments = [(Segment, at(0), 20 * MIB), (Segment, unused.address(), 2 * MIB)];
    let held = [(Block, at(0), 4 * MIB), (Block, at(4), 4 * MIB), (Awaiting, at(8), 4 * MIB), (Block, at(12), 4 * MIB)];
    let held = [&segments[..], &held].concat();
    let tracker = tracker(&gpu, &held);
    // Between the first event and the snapshot, one tensor is freed, one is freed and replaced by another one, and one is
    // allocated that is freed after the snapshot.
    tracker.event(FreeRequested, at(0), 4 * MIB);
    tracker.event(FreeRequested, at(4), 4 * MIB);
    tracker.event(FreeCompleted, at(4), 4 * MIB);
    tracker.event(Alloc, at(4), 3 * MIB);
    tracker.event(Alloc, at(16), 2 * MIB);
    let snapshot = [&held[..], &[(Block, at(16), 2 * MIB)]].concat();
    tracker.event(FreeRequested, at(16), 2 * MIB);
    tracker.event(FreeCompleted, at(16), 2 * MIB);
    settle(&gpu, &tracker, &snapshot, 1);
    assert_eq!(tracker.segment_events(), Some(0), "the snapshot is older than an event about a segment");
    settle(&gpu, &tracker, &snapshot, 0);
    assert_eq!(tracker.segment_events(), None);
    tracker.start();
    settle(&gpu, &tracker, &[], 0);
    // The tensor at 4 has all MiB up to 8, because the rest is too small to be split off.
    let pool_now = pool(&gpu);
    assert_eq!((pool_now.parts, pool_now.used, pool_now.reserved), (2, Bytes::mib(8), Bytes::mib(22)), "{pool_now}");
    assert_eq!(before.data().driver.unwrap().used.mb(), 22);
    tracker.event(FreeCompleted, at(8), 4 * MIB);
    // The memory up to 12 is free.
    tracker.event(Alloc, at(8), 3 * MIB + 1);
    assert_eq!(pool(&gpu).used, Bytes::mib(12));
    for mib in [4, 8, 12] {
        tracker.event(FreeRequested, at(mib), 4 * MIB);
    }
    let data = before.data();
    assert_eq!((data.used.get(), data.lost, pool(&gpu).wrong_calls()), (0, 0, 0));
}

#[test]
fn other_threads_allocate_while_the_tracker_starts() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    let trace = trace(&gpu);
    let tracker = Tracker::new(AllocatorSettings::default());
    // Without `start()`, the tracker ignores events.
    tracker.event(Alloc, 1 << 40, MIB);
    tracker.start();
    let (first, second) = (gpu.alloc(Bytes::mib(20)).unwrap(), gpu.alloc(Bytes::mib(20)).unwrap());
    tracker.event(SegmentAlloc, first.address(), 20 * MIB);
    tracker.event(Alloc, first.address(), 10 * MIB);
    // The snapshot is older than the next two events, and the second segment has its events after the pool is registered.
    let snapshot = [(Segment, first.address(), 20 * MIB), (Block, first.address(), 10 * MIB)];
    tracker.event(Alloc, first.address() + 10 * MIB, 4 * MIB);
    tracker.event(FreeRequested, first.address(), 10 * MIB);
    settle(&gpu, &tracker, &snapshot, 1);
    tracker.event(SegmentAlloc, second.address(), 20 * MIB);
    // Less than 1 MiB is left of the segment, so it counts for the tensor.
    tracker.event(Alloc, second.address(), 20 * MIB - 1000);
    // One of the older segments is free again. This tensor gets the memory up to the next tensor.
    tracker.event(FreeCompleted, first.address(), 10 * MIB);
    tracker.event(Alloc, first.address(), 9 * MIB + 512);
    let later = [
        (Segment, first.address(), 20 * MIB),
        (Block, first.address(), 10 * MIB),
        (Block, first.address() + 10 * MIB, 4 * MIB),
        (Segment, second.address(), 20 * MIB),
        (Block, second.address(), 20 * MIB),
    ];
    settle(&gpu, &tracker, &later, 1);
    let now = pool(&gpu);
    assert_eq!((now.used, now.reserved, now.wrong_calls()), (Bytes::mib(34), Bytes::mib(40), 0), "{now}");
    assert_eq!(trace.data().used.mb(), 34);
    tracker.stop();
    assert_eq!(trace.data().used.mb(), 0, "the pool is gone, and its blocks stay its own");
}
