//! Tests that the history agrees with the ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use fastrand::Rng;
use gpumem_core::{
    derive,
    model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, PoolId, StackId},
};

use super::{History, Moment, sums_by};
use crate::{
    formats::frames::stack,
    recording_builder::{DEVICE, MIB, RecordingBuilder},
    report::overview::Overview,
};

const SECOND: Device = Device { family: Family::Cuda, ordinal: 1 };

fn history(made: RecordingBuilder) -> History {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, made.file()).unwrap();
    History::read(file.path()).unwrap()
}

/// Makes a recording with allocations and frees on two devices and several threads. Some frees fail, some are missed,
/// contexts end, and parts are freed.
fn random(seed: u64) -> RecordingBuilder {
    let mut random = Rng::with_seed(seed);
    let mut made = RecordingBuilder::new("random");
    // The blocks that were allocated since the last lost event.
    let mut live = BTreeSet::new();
    for _ in 0..2_000 {
        made.on_thread(1 + random.u32(..3));
        // There are few keys, so some are handed out while their block is live.
        let key = Key::from_raw(random.u64(..64) << 20);
        match random.u64(..20) {
            0..9 => {
                let device = if random.u64(..3) == 0 { SECOND } else { DEVICE };
                let kind = MemKind::ALL[random.usize(..6)];
                let context = 1 + random.u8(..3);
                let stack = StackId(random.u32(..7));
                // A session does this when it knows that it missed frees. Otherwise, no address is handed out twice.
                if random.u64(..2) == 0 {
                    live.clear();
                    live.insert(key.get());
                    made.event(EventKind::Lost { count: 1 });
                } else if !live.insert(key.get()) {
                    continue;
                }
                made.alloc_at(key, Block { device, bytes: Bytes::new(random.u64(..MIB)), kind, context, stack });
            }
            9..17 => {
                made.free(key);
                if random.u64(..8) == 0 {
                    made.event(EventKind::FreeFailed);
                }
            }
            17 => made.event(EventKind::Shrink { key, bytes: Bytes::new(random.u64(..64)) }),
            18 => {
                let scope = made.open(random.u32(..5));
                made.alloc(random.u64(..MIB), MemKind::Pool, 0);
                made.close(scope);
            }
            _ => {
                if random.u64(..20) == 0 {
                    made.event(EventKind::ContextDestroyed { context: 2 });
                }
            }
        }
    }
    made
}

#[test]
fn a_block_has_the_thread_that_allocated_it_whichever_thread_decides() {
    let mut made = RecordingBuilder::new("undecided");
    made.event(EventKind::PoolRegistered { pool: PoolId(1), device: DEVICE });
    made.on_thread(1);
    made.alloc(MIB, MemKind::Device, 0);
    made.on_thread(2);
    let block = made.alloc(MIB, MemKind::Device, 0);
    made.free(block);
    let history = history(made);
    let threads: Vec<_> = history.lives.changes().map(|change| (change.delta > 0, change.thread)).collect();
    assert_eq!(threads, [(true, 1), (true, 2), (false, 2)]);
}

/// Compares random parts of two pools with all live parts when they are allocated.
#[test]
fn each_part_that_overlaps_a_live_one_is_found() {
    for seed in 0..100 {
        let (mut random, mut made) = (Rng::with_seed(seed), RecordingBuilder::new("overlaps"));
        let pools = [1, 2].map(PoolId);
        for pool in pools {
            made.event(EventKind::PoolRegistered { pool, device: DEVICE });
        }
        let (mut live, mut expected) = (BTreeMap::<(PoolId, u64), u64>::new(), [0; 2]);
        for _ in 0..300 {
            let (at, address, bytes) = (random.usize(..2), random.u64(..600), random.u64(..12));
            let (pool, key) = (pools[at], Key::of_part(pools[at], address));
            match random.u64(..60) {
                0 => {
                    live.clear();
                    made.event(EventKind::Lost { count: 1 });
                }
                1..20 => {
                    live.remove(&(pool, address));
                    made.free(key);
                }
                _ => {
                    live.remove(&(pool, address));
                    let overlaps = |((of, other), length): (&(PoolId, u64), &u64)| {
                        *of == pool && *other < address + bytes && address < other + length
                    };
                    // A part of 0 bytes overlaps nothing.
                    if bytes > 0 {
                        expected[at] += u64::from(live.iter().any(overlaps));
                        live.insert((pool, address), bytes);
                    }
                    let block = Block::new(DEVICE, Bytes::new(bytes), MemKind::Part);
                    made.alloc_at(key, Block { context: pool.0, ..block });
                }
            }
        }
        let history = history(made);
        assert_eq!(pools.map(|pool| history.overlapping_parts.of(pool)), expected, "seed {seed}");
        let lost = history.counts().lost + expected.iter().sum::<u64>();
        assert_eq!(Overview::of(&history).missing.lost_events, lost, "seed {seed}");
    }
}

#[test]
fn what_is_live_is_what_the_ledger_says() {
    for seed in 0..20 {
        let history = history(random(seed));
        assert!(
            history.incomplete().is_none() && !history.disagrees(),
            "seed {seed}: {:?} {:?}",
            history.devices,
            history.reader.ledger().stats()
        );
        let last = history.lives.last_change();
        let mut live: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        for block in derive::live_blocks(history.reader.ledger(), history.reader.definitions(), None) {
            *live.entry((block.id, u64::from(block.device))).or_default() += block.bytes.get();
        }
        let mut noted: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        let devices = history.devices.len();
        for (block, bytes) in history.live_blocks(&vec![last; devices]) {
            let device = history.devices[usize::from(block.device)].device;
            *noted.entry((block.key, u64::from(device.ordinal))).or_default() += bytes;
        }
        assert_eq!(noted, live, "seed {seed}");
        // The sum of all changes is the live memory at the end.
        let [held, between] =
            [history.held_after(&vec![last; devices]), history.held_between(&vec![(None, last); devices])]
                .map(|held| sums_by(&held.concat(), |origin| format!("{} {}", origin.kind, origin.scope())));
        assert_eq!(held, between.into_iter().filter(|sum| (sum.bytes, sum.blocks) != (0, 0)).collect::<Vec<_>>());
    }
}

#[test]
fn the_peak_is_that_of_the_ledger_and_its_moment_has_it() {
    for seed in 0..20 {
        let mut history = history(random(seed));
        let overview = Overview::of(&history);
        assert_eq!(overview.devices.len(), 2);
        for device in &overview.devices {
            let known = history.devices.iter().find(|known| known.device.ordinal == device.device).unwrap().device;
            let of_ledger = history.reader().device_peak(known).expect("something was allocated");
            assert_eq!(device.peak_bytes, Some(of_ledger.bytes.get()), "seed {seed}");
            let sum: i64 = device.peak_by_place.iter().map(|sum| sum.bytes).sum();
            assert_eq!(Some(sum.unsigned_abs()), device.peak_bytes, "seed {seed}");
        }
    }
}

#[test]
fn times_are_those_of_the_counter_of_the_processor() {
    // For stream-ordered memory, the ledger uses the time of an earlier event.
    let mut made = RecordingBuilder::new("times");
    let key = made.alloc(MIB, MemKind::Pool, 0);
    made.wait(90);
    made.free(key);
    let history = history(made);
    assert_eq!(history.lives.changes().map(|change| change.time).collect::<Vec<_>>(), [1_000, 92_000]);
}

#[test]
fn driver_blocks_of_a_backward_pass_are_on_the_line_that_started_it() {
    let mut made = RecordingBuilder::new("train");
    made.python();
    let [mm, add] = ["MmBackward0", "AddBackward0"].map(|operation| {
        let apply = format!("torch::autograd::generated::{operation}::apply(std::vector<at::Tensor>&&)");
        let engine = "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)";
        made.stack(&[(3, "at::empty_cuda()", "", 0), (3, &apply, "", 0), (3, engine, "", 0)])
    });
    let [first, second] = [31, 35].map(|line| {
        let graph = "/venv/lib/python3.12/site-packages/torch/autograd/graph.py";
        let train = "/home/ada/train/train.py";
        made.stack(&[(0, "_engine_run_backward", graph, 860), (0, "step", train, line), (0, "<module>", train, 40)])
    });
    // Driver blocks, and PyTorch's stacks for them. Blocks of one operation come from two lines.
    let mut steps = Vec::new();
    for (stack, of_pytorch) in [(mm, first), (mm, first), (add, first), (add, second)] {
        let key = Key::from_raw((steps.len() as u64 + 1) << 30);
        let bytes = Bytes::mib(20);
        made.alloc_at(key, Block { device: DEVICE, bytes, kind: MemKind::Device, context: 1, stack });
        steps.push((key.get(), bytes, of_pytorch));
    }
    made.segments(&steps);
    let history = history(made);
    let sums = sums_by(&history.held_after(&history.changes_at(Moment::End))[0], |origin| {
        let folded: Vec<_> =
            stack(&history, origin, true).iter().map(|frame| frame.in_words("/home/ada/train")).collect();
        format!("{}: {}", origin.place(), folded.join(";"))
    });
    let line = "train.py:31 (backward pass): <module> (train.py:40);step (train.py:31)";
    assert_eq!(
        sums.iter().map(|sum| sum.name.as_str()).collect::<Vec<_>>(),
        [
            "AddBackward0 (backward pass): PyTorch (backward pass);AddBackward0",
            &format!("{line};PyTorch (backward pass);MmBackward0"),
        ]
    );
}
