//! Tests the allocator's statistics under PyTorch's names. `gpu_exact` compares the statistics with the sums of a random program.

use gpumem::{Bytes, GpuMemTrace, sim::SimGpu};

/// Each device is counted separately, and there is no device 5000.
#[test]
fn a_device_is_a_number_or_the_current_one() {
    let (quiet, busy) = (SimGpu::install(Bytes::gib(1)).unwrap(), SimGpu::install(Bytes::gib(1)).unwrap());
    assert_eq!(gpumem::torch::memory_allocated(busy.ordinal()), Ok(Bytes::ZERO));
    let _block = busy.alloc(Bytes::new(77)).unwrap();
    assert_eq!(gpumem::torch::memory_allocated(quiet.ordinal()), Ok(Bytes::ZERO));
    busy.make_current();
    assert_eq!(gpumem::torch::memory_allocated(None), Ok(Bytes::new(77)));
    assert_eq!(gpumem::torch::memory_stats(None).unwrap().device, busy.ordinal());
    assert!(gpumem::torch::memory_stats(5000).is_err_and(|error| error.is_unknown_device()));
    assert!(gpumem::torch::reset_peak_memory_stats(5000).is_err_and(|error| error.is_unknown_device()));
}

/// A device that cannot be read still reports its allocations.
#[test]
fn a_pool_that_cannot_be_read_is_reported() {
    let gpu = SimGpu::install(Bytes::gib(1)).unwrap();
    let id = gpu.ordinal();
    assert_eq!(gpumem::torch::memory_reserved(id), Ok(Bytes::ZERO));
    let block = gpu.alloc(Bytes::mib(3)).unwrap();
    gpu.set_lost(true);
    assert_eq!(gpumem::torch::memory_allocated(id), Ok(Bytes::mib(3)));
    assert!(gpumem::torch::memory_reserved(id).is_err() && gpumem::torch::max_memory_reserved(id).is_err());
    assert_eq!(gpumem::torch::memory_stats(id).unwrap().reserved, None);
    // If one of the peaks cannot be reset, none of them is reset.
    drop(block);
    assert!(gpumem::torch::reset_peak_memory_stats(id).is_err());
    assert_eq!(gpumem::torch::max_memory_allocated(id), Ok(Bytes::mib(3)));
}

/// The snapshot contains every live block with its scope, and no freed block.
#[test]
fn a_snapshot_has_every_live_block() {
    let gpu = SimGpu::install(Bytes::gib(1)).unwrap();
    let of_device = || {
        let mut blocks = gpumem::torch::memory_snapshot().unwrap();
        blocks.retain(|block| block.device == gpu.ordinal());
        blocks
    };
    assert!(of_device().is_empty());
    let before = gpu.alloc(Bytes::new(5_000)).unwrap();
    let trace = GpuMemTrace::builder().device(gpu.ordinal()).ctx("load").silent(true).start().unwrap();
    let inside = gpu.alloc_async(Bytes::new(7_000)).unwrap();
    drop(gpu.alloc(Bytes::new(9_000)).unwrap());
    drop(trace);
    let blocks = of_device();
    let found: Vec<_> = blocks.iter().map(|block| (block.bytes, block.kind.name(), block.path.join(" > "))).collect();
    assert_eq!(found, [(inside.bytes(), "pool", "load".to_owned()), (before.bytes(), "device", String::new())]);
    assert!(blocks.iter().all(|block| block.simulated && block.thread > 0));
    assert_ne!(blocks[0].id, blocks[1].id);
    drop((before, inside));
    assert!(of_device().is_empty());
}
