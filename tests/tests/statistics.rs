//! The allocator's statistics under PyTorch's names: on the simulated device and on the stand-in driver, always against what
//! the program adds up by itself.

use gpumem::{AllocStats, Bytes, GpuMemTrace, sim::SimGpu};
use gpumem_tests::{Outcome, Random, Standin};

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

fn sums(told: &AllocStats) -> (Sums, Sums) {
    let AllocStats { bytes, blocks } = told;
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
                    gpumem::reset_peak_memory_stats(id).expect("it is heard");
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
            let stats = gpumem::memory_stats(id).expect("it is heard");
            let told = [&stats.all, &stats.kinds.device, &stats.kinds.pool].map(sums);
            assert_eq!(told, expected, "seed {seed}, step {step}");
            assert_eq!(gpumem::memory_allocated(id).map(Bytes::get), Ok(expected[0].0.0[0]));
            assert_eq!(gpumem::max_memory_allocated(id).map(Bytes::get), Ok(expected[0].0.0[1]));
            assert!(gpumem::memory_reserved(id).expect("it is heard").get() >= expected[0].0.0[0]);
        }
        assert_eq!(trace.data().peak_over_start().get(), most, "a reset of these peaks is no trace's");
    }
}

/// Devices are told apart, and nobody has device 5000.
#[test]
fn a_device_is_a_number_or_the_current_one() {
    let (quiet, busy) = (SimGpu::install(Bytes::gib(1)).unwrap(), SimGpu::install(Bytes::gib(1)).unwrap());
    assert_eq!(gpumem::memory_allocated(busy.ordinal()), Ok(Bytes::ZERO));
    let _block = busy.alloc(Bytes::new(77)).unwrap();
    assert_eq!(gpumem::memory_allocated(quiet.ordinal()), Ok(Bytes::ZERO));
    busy.make_current();
    assert_eq!(gpumem::memory_allocated(None), Ok(Bytes::new(77)));
    assert_eq!(gpumem::memory_stats(None).unwrap().device, busy.ordinal());
    assert!(gpumem::memory_stats(5000).is_err_and(|error| error.is_unknown_device()));
    assert!(gpumem::reset_peak_memory_stats(5000).is_err_and(|error| error.is_unknown_device()));
}

/// A device that cannot be read still has its allocations.
#[test]
fn a_pool_that_cannot_be_read_is_said() {
    let gpu = SimGpu::install(Bytes::gib(1)).unwrap();
    let id = gpu.ordinal();
    assert_eq!(gpumem::memory_reserved(id), Ok(Bytes::ZERO));
    let block = gpu.alloc(Bytes::mib(3)).unwrap();
    gpu.set_lost(true);
    assert_eq!(gpumem::memory_allocated(id), Ok(Bytes::mib(3)));
    assert!(gpumem::memory_reserved(id).is_err() && gpumem::max_memory_reserved(id).is_err());
    assert_eq!(gpumem::memory_stats(id).unwrap().reserved, None);
    // All or nothing begins anew.
    drop(block);
    assert!(gpumem::reset_peak_memory_stats(id).is_err());
    assert_eq!(gpumem::max_memory_allocated(id), Ok(Bytes::mib(3)));
}

/// Every live block and no other, with where it comes from.
#[test]
fn a_snapshot_has_every_live_block() {
    let gpu = SimGpu::install(Bytes::gib(1)).unwrap();
    let of_device = || {
        let mut blocks = gpumem::memory_snapshot().unwrap();
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
    let told: Vec<_> = blocks.iter().map(|block| (block.bytes, block.kind, block.path.join(" > "))).collect();
    assert_eq!(told, [(inside.bytes(), "pool", "load".to_owned()), (before.bytes(), "device", String::new())]);
    assert!(blocks.iter().all(|block| block.simulated && block.thread > 0));
    assert_ne!(blocks[0].key, blocks[1].key);
    drop((before, inside));
    assert!(of_device().is_empty());
}

/// A machine with libcupti.
fn heard() -> Standin {
    Standin::new().cupti()
}

const CONTEXT: &str = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx";

/// Each command of the script has to answer what stands behind its ` = `; a `call` without that has to succeed.
#[track_caller]
fn check(machine: &Standin, script: &str) -> Outcome {
    let steps: Vec<_> =
        script.split(';').map(str::trim).map(|step| step.split_once(" = ").unwrap_or((step, ""))).collect();
    let commands: Vec<_> = steps.iter().map(|(command, _)| *command).collect();
    let outcome = machine.run(&commands.join("; "));
    assert!(outcome.is_clean(), "panicked or did not end well\n{outcome}");
    let mut seen = std::collections::HashMap::new();
    for (command, expected) in steps {
        let nth = seen.entry(command).or_insert(0);
        let answer =
            *outcome.answers(command).get(*nth).unwrap_or_else(|| panic!("`{command}` got no answer\n{outcome}"));
        *nth += 1;
        let expected = if expected.is_empty() && command.starts_with("call ") { "0" } else { expected };
        assert!(expected.is_empty() || answer == expected, "`{command}` is not `{expected}` but `{answer}`\n{outcome}");
    }
    outcome
}

#[test]
fn on_a_driver_they_are_what_the_program_adds_up() {
    for (steps, devices) in [(400, 1), (300, 3)] {
        let outcome = heard().devices(devices).run(&format!("call cuInit 0; adding_up {steps} {devices}"));
        let answer = outcome.answer(&format!("adding_up {steps} {devices}")).to_owned();
        assert_eq!(answer, "equal to what was added up", "{outcome}");
        assert!(outcome.is_clean(), "{outcome}");
    }
}

#[test]
fn kinds_are_told_apart() {
    check(
        &heard(),
        &format!(
            "memory_allocated = 0; {CONTEXT}; call cuMemAlloc_v2 &a 1000; call cuMemAllocAsync &b 70 0; \
             call cuMemCreate &h 2097152 on:0 0; call cuMemAllocManaged &m 50 1; call cuMemAllocHost_v2 &p 60; \
             call cuMemFree_v2 a; memory_stats = all=2097222/2098222/2098222/1000,2/3/3/1 device=0/1000/1000/1000,0/1/1/1 \
             pool=70/70/70/0,1/1/1/0 vmm=2097152/2097152/2097152/0,1/1/1/0 managed=50/50/50/0,1/1/1/0 \
             pinned_host=60/60/60/0,1/1/1/0 untracked=0 lost=0; \
             memory_snapshot = 2097152 vmm, 70 pool, 60 pinned host, 50 managed; \
             reset_peaks = done; max_memory_allocated = 2097222; memory_allocated = 2097222"
        ),
    );
}

/// The pool takes 32 MiB at a time; the program asked for less.
#[test]
fn what_the_driver_gave_is_more() {
    check(
        &heard(),
        &format!(
            "memory_reserved = 0; {CONTEXT}; call cuMemAllocAsync &a 40000000 0; memory_allocated = 40000000; memory_reserved = 67108864; \
             max_memory_reserved = 67108864 to 67108864; call cuMemFreeAsync a 0; memory_allocated = 0; memory_reserved = 67108864; \
             empty_cache; memory_reserved = 0; call cuMemAlloc_v2 &b 1000; memory_reserved = 1000; \
             max_memory_reserved = 67108864 to 67109864; reset_peaks = done; max_memory_reserved = 1000 to 1000; \
             call cuMemPoolCreate &p on:0; call cuMemAllocFromPoolAsync &c 5000 p 0; memory_reserved = 6000"
        ),
    );
    check(
        &heard().set("pools=0"),
        &format!("{CONTEXT}; memory_allocated = 0; call cuMemAlloc_v2 &a 10; memory_reserved = 10; reset_peaks = done"),
    );
    let broken =
        heard().fail("cuMemPoolGetAttribute=999").run(&format!("{CONTEXT}; memory_reserved; memory_allocated"));
    assert!(broken.answer("memory_reserved").starts_with("error["), "{broken}");
    assert_eq!(broken.answer("memory_allocated"), "0", "{broken}");
}

const ALL: [&str; 7] = [
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peaks",
    "memory_stats",
    "memory_snapshot",
];

/// Nobody hears allocations: every one of them is an error that says why, and none is zero.
#[test]
fn where_nothing_is_heard_nothing_is_zero() {
    for (machine, first, says) in [
        (Standin::new(), "count", "cannot load libcupti"),
        (heard().env("GPUMEM_GAUGE", "sampled"), "count", "GPUMEM_GAUGE says sampled"),
        (heard().env("GPUMEM_GAUGE", "pool"), "count", "GPUMEM_GAUGE says pool"),
        (heard().env("GPUMEM_GAUGE", "off"), "count", "GPUMEM_GAUGE says off"),
        (heard().env("GPUMEM_GAUGE", "nonsense"), "count", "`nonsense` is not a gauge"),
        (heard(), "unsubscribe", "gpumem::unsubscribe() was called"),
    ] {
        let outcome = machine.run(&format!("{first}; {}", ALL.join("; ")));
        for command in ALL {
            let answer = outcome.answer(command);
            assert!(
                answer.starts_with("error[") && answer.contains(says),
                "`{command}` does not say `{says}`\n{outcome}"
            );
        }
        assert!(outcome.is_clean(), "{outcome}");
    }
    // Who subscribes by hand has the figures, whatever traces are told to do.
    check(
        &heard().env("GPUMEM_GAUGE", "sampled"),
        &format!("subscribe = done; {CONTEXT}; call cuMemAlloc_v2 &a 10; memory_allocated = 10"),
    );
}

/// Blocks from before are not known: neither are they counted, nor does their free take anything off.
#[test]
fn counting_begins_with_the_first_call() {
    check(
        &heard(),
        &format!(
            "{CONTEXT}; call cuMemAlloc_v2 &old 1000; memory_allocated = 0; call cuMemAlloc_v2 &new 10; call cuMemFree_v2 old; \
             memory_stats = all=10/10/10/0,1/1/1/0 device=10/10/10/0,1/1/1/0 untracked=0 lost=0"
        ),
    );
}
