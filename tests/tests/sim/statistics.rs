//! The allocator's statistics under PyTorch's names, compared with what the program adds up by itself.

use gpumem::{Bytes, GpuMemTrace, report::AllocStats, sim::SimGpu};
use gpumem_tests::Random;

/// Now, at most, allocated, freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums([u64; 4]);

impl Sums {
    fn add(&mut self, by: u64) {
        self.0[0] += by;
        self.0[1] = self.0[1].max(self.0[0]);
        self.0[2] += by;
    }

    fn take(&mut self, by: u64) {
        self.0[0] -= by;
        self.0[3] += by;
    }

    fn reset(&mut self) {
        self.0[1] = self.0[0];
    }
}

fn sums(reported: &AllocStats) -> (Sums, Sums) {
    let AllocStats { bytes, blocks, .. } = reported;
    let bytes = [bytes.current, bytes.peak, bytes.allocated, bytes.freed].map(Bytes::get);
    (Sums(bytes), Sums([blocks.current, blocks.peak, blocks.allocated, blocks.freed]))
}

/// Random histories, each on a device of its own, with a trace around it that no reset may disturb.
#[test]
fn every_figure_is_what_the_program_adds_up() {
    for seed in 1..=40 {
        let gpu = SimGpu::install(Bytes::gib(4)).expect("a simulated device");
        let id = gpu.ordinal();
        let trace = GpuMemTrace::builder().device(id).silent(true).start().expect("an exact trace");
        let mut random = Random::new(seed);
        // All, device, pool: bytes and blocks.
        let mut expected = [(Sums::default(), Sums::default()); 3];
        let (mut blocks, mut most) = (Vec::new(), 0);
        for step in 0..300 {
            match random.below(12) {
                0 => {
                    gpumem::torch::reset_peak_memory_stats(id).expect("it is intercepted");
                    for (bytes, blocks) in &mut expected {
                        bytes.reset();
                        blocks.reset();
                    }
                }
                1..6 if !blocks.is_empty() => {
                    let at = random.below(blocks.len());
                    let (kind, block): (usize, gpumem::sim::SimBlock) = blocks.swap_remove(at);
                    for of in [0, kind] {
                        expected[of].0.take(block.bytes().get());
                        expected[of].1.take(1);
                    }
                }
                _ => {
                    let asked = Bytes::new(1 + random.below(20 << 20));
                    let kind = 1 + random.below(2_usize);
                    let block = if kind == 1 { gpu.alloc(asked) } else { gpu.alloc_async(asked) };
                    blocks.push((kind, block.expect("it fits")));
                    for of in [0, kind] {
                        expected[of].0.add(asked.get());
                        expected[of].1.add(1);
                    }
                }
            }
            most = most.max(expected[0].0.0[0]);
            let stats = gpumem::torch::memory_stats(id).expect("it is intercepted");
            let reported = [&stats.all, &stats.kinds.device, &stats.kinds.pool].map(sums);
            assert_eq!(reported, expected, "seed {seed}, step {step}");
            assert_eq!(gpumem::torch::memory_allocated(id).map(Bytes::get), Ok(expected[0].0.0[0]));
            assert_eq!(gpumem::torch::max_memory_allocated(id).map(Bytes::get), Ok(expected[0].0.0[1]));
            assert!(gpumem::torch::memory_reserved(id).expect("it is intercepted").get() >= expected[0].0.0[0]);
        }
        assert_eq!(trace.data().peak_over_start().get(), most, "a reset of these peaks is no trace's");
    }
}

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

/// A device that cannot be read still has its allocations.
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
    // All or nothing begins anew.
    drop(block);
    assert!(gpumem::torch::reset_peak_memory_stats(id).is_err());
    assert_eq!(gpumem::torch::max_memory_allocated(id), Ok(Bytes::mib(3)));
}

/// Every live block and no other, with where it comes from.
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
