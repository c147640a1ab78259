//! Tests of pools: parts, and the driver blocks that contain them.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

#[test]
fn parts_count_in_the_place_of_the_pools_blocks() {
    check(
        "pool 1; open a
         alloc x 100 at 1000
         part 1 1000 10; part 1 1010 20
         read a = 30 0 driver=100/0 lost=0
         unpart 1 1010
         read a = 10 20 driver=100/0
         resize 1 1000 25
         close a = 25 5 driver=100/0
         pool 1 = 1 25 75",
    );
}

#[test]
fn growth_of_a_pool_is_no_peak_of_the_program() {
    check(
        "pool 1; open a
         alloc w 8 at 0; alloc x 100 at 1000; part 1 1000 10; read a = 18 0 driver=108/0
         alloc y 50 at 2000; reserved 1 150; read a = 18 0 driver=158/0
         pool 1 = 1 10 140
         free at 2000; reserved 1 100; close a = 18 0 driver=108/50",
    );
}

#[test]
fn of_several_new_blocks_the_pool_has_those_that_it_reports() {
    check(
        "pool 1; open a
         alloc x 64 at 1000; reserved 1 64; part 1 1000 1
         alloc v 2 at 0; alloc y 100 at 2000; alloc z 28 at 3000; alloc w 1 at 10; alloc u 1 at 20; reserved 1 192
         part 1 2000 5; part 1 3000 5; read a = 15 0 driver=196/0 lost=0
         pool 1 = 3 11 181",
    );
}

#[test]
fn other_threads_do_not_decide_unless_they_ask_or_change_memory() {
    check(
        "pool 1; open a
         alloc x 100 at 1000; pool 2 %2; sample 5 %2; named b %2; pool 3; reserved 1 100; part 1 1000 10; read a = 10 0 lost=0
         alloc y 50 at 2000; open b %2; part 1 2000 5; close a = 15 45 lost=0",
    );
}

#[test]
fn the_block_of_a_thread_that_does_nothing_more_is_in_the_peaks_of_other_threads() {
    // A pool grows on another thread.
    check(
        "pool 1; open a; alloc x 7 at 0; alloc y 32 at 1000 %2; reserved 1 32 %2; part 1 1000 2 %2; part 1 1010 20 %2
         unpart 1 1010 %2; close a = 9 20 lost=0; pool 1 = 1 2 30",
    );
    // The pool already had memory.
    let setup = "pool 1; alloc y 32 at 1000 %2; part 1 1000 5 %2; open a; alloc x 7 at 0";
    check(&format!("{setup}; part 1 1010 20 %2; unpart 1 1010 %2; close a = 7 20 lost=0"));
    check(&format!("{setup}; unpart 1 1000 %2; close a = 2 5 lost=0"));
    check(&format!("{setup}; empty 1 %2; close a = 2 5 lost=0"));
    check(&format!("{setup}; alloc z 20 at 1 %2; free at 1 %2; close a = 7 20 lost=0"));
}

#[test]
fn a_pool_with_blocks_that_were_not_seen_says_by_how_much_it_grows() {
    check(
        "pool 1; open a; reserved 1 500; part 1 100 30; alloc h 20 handle; reserved 1 520; part 1 700 10
         close a = 40 0 driver=20/0",
    );
}

#[test]
fn a_pool_takes_no_block_because_it_is_small_enough() {
    // The program has a block. Then the pool reports its future memory.
    check(
        "pool 1; open a; alloc p 4 at 0; reserved 1 8; alloc x 8 at 1000; part 1 1000 2; close a = 6 0 driver=12/0 lost=0
         pool 1 = 1 2 6",
    );
    // The driver rejects an allocation of the pool.
    check(
        "pool 1; open a; alloc x 12 at 0; reserved 1 12; part 1 0 1; reserved 1 20; alloc p 4 at 1000
         close a = 5 0 driver=16/0 lost=0",
    );
}

#[test]
fn a_block_without_an_address_is_the_pools_if_the_pool_says_so() {
    check(
        "pool 1; open a
         alloc h 20 handle; alloc i 20 handle; reserved 1 40
         part 1 500 30; read a = 30 0 driver=40/0 lost=0
         pool 1 = 1 30 10",
    );
}

#[test]
fn a_block_that_no_pool_takes_is_the_programs_in_its_own_scope() {
    let mut ledger = check(
        "pool 1; open a; alloc x 30 at 0; open b; alloc y 5 at 100; close b = 5 0 driver=5/0
         tree /a = 1 35 35 35 30 1
         tree /a/b = 1 5 5 35 5 1
         close a = 35 0 driver=35/0",
    );
    assert_eq!(ledger.sums().counts().events, 2);
}

#[test]
fn a_block_that_is_taken_late_leaves_its_peak_and_says_so() {
    check(
        "pool 1; open a; alloc x 100 at 1000; read a = 100 0; read a = 100 0 lost=0
         part 1 1000 10; read a = 10 90 driver=100/0 lost=1
         pool 1 = 1 10 90 late=1",
    );
    // The block is older than the pool, so its owner could not be known.
    check("open a; alloc x 100 at 1000; pool 1; part 1 1000 10; read a = 10 90 driver=100/0 lost=0");
}

#[test]
fn a_block_that_another_thread_reads_before_its_first_part_is_no_wrong_call() {
    // Without a query, the peak is right: it does not include the block.
    check("pool 1; open a %2; alloc x 100 at 1000; part 1 1000 10; close a %2 = 10 0 driver=100/0 lost=0");
    for query in ["read a %2 = 100 0", "open b %2", "reset a %2 = 100 0", "queried %3"] {
        check(&format!(
            "pool 1; open a %2; alloc x 100 at 1000; {query}; part 1 1000 10
             pool 1 = 1 10 90 early=1"
        ));
    }
    // The sums of allocations are those of the program's view, even after a reset.
    check("pool 1; open a; alloc x 100 at 1000; queried %2; part 1 1000 10; tree /a = 1 10 100 100 10 1");
    check(
        "pool 1; open a; alloc x 100 at 1000; queried %2; reset-summary; alloc y 5 at 0; part 1 1000 10
         tree /a = 1 15 100 100 15 2",
    );
    // The next event of the block's own thread gives the block to the program, so the results are right.
    check("pool 1; open a %2; alloc x 100 at 1000; read a %2 = 100 0; alloc y 5 at 0; close a %2 = 105 0 lost=0");
}

#[test]
fn wrong_calls_are_counted_and_lost() {
    check(
        "pool 1; pool 2; open a; alloc x 100 at 1000
         part 1 1000 10; part 1 1000 20; read a = 20 0 lost=1
         unpart 1 1500; read a = 20 0 lost=2
         unpart 2 1000; read a = 20 0 lost=3
         part 1 1090 20; part 2 1050 1; part 1 5000 1; close a = 42 0 lost=6
         pool 1 = 3 41 59 unknown=1 doubled=1 outside=2
         pool 2 = 1 1 ? unknown=1 outside=1",
    );
}

/// A pool may report after the free of its block that its parts are freed, but not after the driver has reused the addresses.
#[test]
fn parts_end_with_the_addresses_of_their_block() {
    let setup = "pool 1; open a; alloc x 100 at 1000; part 1 1000 10; part 1 1050 5; alloc y 50 at 2000; part 1 2000 3";
    check(&format!("{setup}; free at 1000; unpart 1 1000; unpart 1 1050; alloc z 100 at 1000; close a = 103 0 lost=0"));
    check(&format!("{setup}; free at 1000; empty 1; alloc z 100 at 1000; close a = 100 0 lost=0"));
    check(&format!(
        "{setup}; free at 1000; free_failed; part 1 1020 2; read a = 20 0; free at 2000; close a = 20 0 lost=0"
    ));
    // The only part of the pool is the event before the free.
    check(
        "pool 1; open a; alloc x 100 at 1000; part 1 1000 10; free at 1000; alloc z 100 at 1000; close a = 100 0 lost=1",
    );
    let freed = format!("{setup}; free at 1000; read a = 18 0 lost=0");
    for (script, used, lost) in [
        // The new block belongs to the program, the pool or another pool, or overlaps a part of the freed block.
        ("alloc z 100 at 1000", 103, 2),
        ("alloc z 100 at 1000; part 1 1000 7", 10, 2),
        ("pool 2; alloc z 100 at 1000; part 2 1000 7", 10, 2),
        ("alloc z 200 at 900", 203, 2),
        ("alloc z 10 at 1090", 13, 2),
        ("unpart 1 1050; alloc z 100 at 1000 %2", 103, 1),
        // The new block is elsewhere.
        ("alloc z 10 at 1100", 28, 0),
        ("alloc z 10 at 990", 28, 0),
        ("alloc z 0 at 1010", 18, 0),
    ] {
        check(&format!("{freed}; {script}; sample 1 %3; read a = {used} {} lost={lost}", 18_u32.saturating_sub(used)));
    }
    // The addresses of the blocks are reused one after the other.
    check(&format!(
        "{freed}; free at 2000; alloc z 10 at 2000; read a = 25 0 lost=1; alloc w 1 at 1000; read a = 11 14 lost=3"
    ));
    check(&format!("{setup}; free at 1000; lost 1; alloc z 100 at 1000; read a = 103 0 lost=1; pool 1 = 1 3 47"));
}

#[test]
fn a_call_that_lost_events_may_explain_is_not_wrong() {
    check(
        "pool 1; open a; alloc x 100 at 1000; part 1 1000 10; alloc y 8 at 0; reserved 1 100
         lost 3
         unpart 1 1050; part 1 1000 20; part 1 5000 1; part 1 0 1; close a = 22 7 lost=3
         pool 1 = 3 22 78",
    );
    // Nothing was lost since the part came, or since the pool was registered.
    check(
        "open a; alloc x 100 at 1000; lost 1; pool 1; part 1 1000 10
         part 1 1000 20; unpart 1 1050; alloc y 8 at 0; read a = 28 72; part 1 0 1; close a = 21 79 lost=4
         pool 1 = 2 21 87 unknown=1 doubled=1 late=1",
    );
    // While functions of the driver are displaced, more is lost.
    check(
        "pool 1; displaced 1 1; unpart 1 10; displaced 0 0; unpart 1 10; pool 2; unpart 2 10; pool 1 = 0 0 0; pool 2 = 0 0 0 unknown=1",
    );
}

/// The pool makes no wrong calls, but several consecutive events are lost.
#[test]
fn lost_events_make_no_call_wrong() {
    for seed in 1..=if cfg!(miri) { 3 } else { 1_000 } {
        let mut random = numbers(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed));
        let (mut blocks, mut parts) = (BTreeSet::new(), BTreeSet::new());
        let mut lines = Vec::new();
        for _ in 0..60 {
            let (at, thread) = (random(6), 1 + random(3));
            let (block, part) = (at * 100, at * 100 + random(10) * 10);
            let is_used = parts.range(block..block + 100).next().is_some();
            if blocks.insert(block) {
                lines.push(format!("alloc x 100 at {block} %{thread}; reserved 1 {} %{thread}", blocks.len() * 100));
            } else if parts.remove(&part) {
                lines.push(format!("unpart 1 {part} %{thread}"));
            } else if is_used || random(2) == 0 {
                parts.insert(part);
                lines.push(format!("part 1 {part} {} %{thread}", 1 + random(10)));
            } else {
                blocks.remove(&block);
                lines.push(format!("free at {block} %{thread}; reserved 1 {} %{thread}", blocks.len() * 100));
            }
            lines.push(format!("alloc y 1 at {} %{thread}", 10_000 + lines.len()));
        }
        let from = usize::try_from(random(100)).unwrap();
        let to = from + usize::try_from(random(20)).unwrap();
        lines.splice(from..to, [format!("lost {}", to - from)]);
        let script = lines.join("; ");
        let mut ledger = check(&format!("pool 1; {script}"));
        assert_eq!(
            (ledger.pools()[0].wrong, ledger.sums().counts().lost),
            (WrongCalls::default(), (to - from) as u64),
            "{script}"
        );
    }
}

/// A recording that started after a pool was registered contains its parts, but not its registration.
#[test]
fn parts_of_an_unknown_pool_do_not_count() {
    check(
        "alloc x 100 at 1000; open a; part 1 1000 10; part 1 1000 20; unpart 1 1000; unpart 1 1500
         pool 2; alloc y 50 at 2000; part 2 2000 5; part 1 2010 5; close a = 5 0 driver=50/0 lost=0",
    );
}

#[test]
fn a_part_larger_than_any_device_is_a_wrong_call_and_does_not_count() {
    for mib in [(1 << 26) + 1, (1 << 43) - 1, 1 << 43, u64::MAX >> 20] {
        check(&format!(
            "pool 1; open a; alloc x 100 at 1000; part 1 1000 10
             part 1 1020 {mib}; part 1 1000 {mib}; part 1 5 {mib}; read a = 10 0 driver=100/0 lost=3
             unpart 1 1020; close a = 10 0 driver=100/0 lost=4
             pool 1 = 1 10 90 unknown=1 outside=3"
        ));
    }
}

#[test]
fn a_pool_that_reports_more_than_any_device_has_is_not_believed() {
    check(
        "pool 1; open a; alloc x 100; reserved 1 100; reserved 1 67108864; close a = 0 0 driver=100/0 lost=1
         pool 1 = 0 0 100 outside=1",
    );
}

#[test]
fn a_pool_has_at_most_its_blocks() {
    check(
        "alloc y 8; pool 1; alloc x 16 at 1000; reserved 1 32768; part 1 1000 10; pool 1 = 1 10 6 reported=32768
         reserved 1 16; pool 1 = 1 10 6; free at 1000; pool 1 = 1 10 ? reported=16",
    );
    // The other blocks belong to the program or another pool.
    check(
        "pool 1; pool 2; alloc p 496 at 0; alloc x 16 at 1000; reserved 1 16; alloc z 32 at 2000; part 2 2000 1
         part 1 1000 5; reserved 1 512; pool 1 = 1 5 11 reported=512; pool 2 = 1 1 31",
    );
}

#[test]
fn a_pool_that_reports_less_than_its_parts_is_wrong() {
    check(
        "pool 1; open a; alloc x 100 at 1000; part 1 1000 10; part 1 1010 20; reserved 1 30; pool 1 = 2 30 0
         reserved 1 29; read a = 30 0 lost=1; pool 1 = 2 30 70 below=1 reported=29
         unpart 1 1000; pool 1 = 1 20 9 below=1; reserved 1 5; empty 1; pool 1 = 0 0 100 below=2",
    );
    // Frees of parts may be among the lost events. A later part does not make an earlier call wrong.
    check("pool 1; alloc x 100 at 1000; part 1 1000 10; lost 1; reserved 1 5; pool 1 = 1 10 90 reported=5");
    check("pool 1; alloc x 100 at 1000; reserved 1 9; part 1 1000 10; pool 1 = 1 10 90 reported=9");
}

#[test]
fn an_emptied_pool_has_no_parts_and_keeps_its_blocks() {
    check(
        "pool 1; open a; alloc x 100 at 1000; part 1 1000 10; part 1 1020 20 %2
         empty 1; read a = 0 30 driver=100/0 lost=0
         pool 1 = 0 0 100
         free at 1000; pool 1 = 0 0 0; close a = 0 30 driver=0/100",
    );
}

#[test]
fn a_free_that_failed_gives_the_block_back_to_its_pool() {
    check(
        "pool 1; open a; alloc x 100 at 1000; part 1 1000 10; free at 1000; free_failed
         part 1 1010 10; read a = 20 0 driver=100/0 lost=0",
    );
}

#[test]
fn scopes_of_one_thread_and_scopes_beside_others_count_parts() {
    check(
        "pool 1; open a of own %2; open b %2
         alloc x 100 at 1000; part 1 1000 10; alloc y 50 at 2000 %2; part 1 2000 5 %2
         read a = 5 0; read b = 15 0
         unpart 1 2000; close a = 0 5; close b %2 = 10 5",
    );
}

#[test]
fn a_budget_notices_parts_and_blocks_of_no_pool() {
    check(
        "pool 1; watch 1 others; alloc x 100 at 1000 %2; noticed = nothing
         part 1 1000 10 %2; noticed = alloc 10 @0
         alloc y 3 at 0 %2; unpart 1 1000 %3; noticed = free 10 @0",
    );
}

/// The owner of a driver block.
#[derive(Clone, Copy, Debug, PartialEq)]
enum BlockOwner {
    Program,
    Pool(u8),
    Undecided(u32),
}

#[derive(Clone, Copy, Debug)]
struct PlainBlock {
    device: usize,
    bytes: i64,
    number: u64,
    owner: BlockOwner,
    is_handle: bool,
    was_early: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct PlainPool {
    device: usize,
    since: u64,
    reserved: Option<i64>,
    has_handles: bool,
    wrong: WrongCalls,
    read_early: u64,
}

/// The bytes in use on each device, in the program's view and in the driver's.
type Levels = [[i64; 2]; 2];

/// The simple implementation: lists that are searched, and all levels so far.
#[derive(Default)]
struct Plain {
    /// The blocks by address or handle, in the order of their allocation.
    blocks: Vec<(u64, PlainBlock)>,
    /// The pool and the addresses of blocks of pools that were freed when the pool had parts.
    left: Vec<(u8, u64, u64)>,
    /// The device and the bytes of each part, by pool and address.
    parts: BTreeMap<(u8, u64), (usize, i64)>,
    pools: BTreeMap<u8, PlainPool>,
    history: Vec<Levels>,
    /// The highest level of the program on each device, and the bytes of each pool's parts and blocks then.
    records: [(i64, Vec<[i64; 2]>); 2],
    lost: u64,
}

impl Plain {
    fn changed(&mut self) {
        let mut now = Levels::default();
        for (_, block) in &self.blocks {
            now[block.device][1] += block.bytes;
            if block.owner == BlockOwner::Program {
                now[block.device][0] += block.bytes;
            }
        }
        for (device, bytes) in self.parts.values() {
            now[*device][0] += bytes;
        }
        self.history.push(now);
        let of_pools = (0..4).map(|pool| [self.part_bytes(pool), self.block_bytes(pool)]).collect::<Vec<_>>();
        for (record, now) in self.records.iter_mut().zip(now).filter(|(record, now)| record.0 < now[0]) {
            *record = (now[0], of_pools.clone());
        }
    }

    fn program_gets(&mut self, is_decided: impl Fn(u32, u64) -> bool) {
        for at in 0..self.blocks.len() {
            if let (address, PlainBlock { owner: BlockOwner::Undecided(by), .. }) = self.blocks[at]
                && is_decided(by, address)
            {
                self.blocks[at].1.owner = BlockOwner::Program;
                self.changed();
            }
        }
    }

    /// Gives the undecided blocks of other threads to the program, on one device or all.
    fn others_get(&mut self, thread: u32, device: Option<usize>) {
        for at in 0..self.blocks.len() {
            let block = &mut self.blocks[at].1;
            let is_others = matches!(block.owner, BlockOwner::Undecided(by) if by != thread);
            if is_others && device.is_none_or(|device| block.device == device) {
                block.was_early = !block.is_handle;
                block.owner = BlockOwner::Program;
                self.changed();
            }
        }
    }

    fn read(&mut self, reader: u32) {
        self.others_get(reader, None);
        self.program_gets(|_, _| true);
    }

    fn part_bytes(&self, pool: u8) -> i64 {
        self.parts.range((pool, 0)..(pool + 1, 0)).map(|(_, (_, bytes))| bytes).sum()
    }

    fn block_bytes(&self, pool: u8) -> i64 {
        self.blocks
            .iter()
            .filter(|(_, block)| block.owner == BlockOwner::Pool(pool))
            .map(|(_, block)| block.bytes)
            .sum()
    }

    fn alloc(&mut self, address: u64, block: PlainBlock, thread: u32) {
        let undecided = |(_, block): &&(u64, PlainBlock)| matches!(block.owner, BlockOwner::Undecided(_));
        if self.blocks.iter().filter(undecided).count() >= 16 {
            self.program_gets(|by, _| by == thread);
        }
        self.others_get(thread, Some(block.device));
        let has_pool = self.pools.values().any(|pool| pool.device == block.device);
        let owner = if has_pool { BlockOwner::Undecided(thread) } else { BlockOwner::Program };
        self.blocks.push((address, PlainBlock { owner, ..block }));
        self.changed();
        if has_pool && !block.is_handle {
            self.end_left_parts(address, address + block.bytes.unsigned_abs());
        }
    }

    /// Frees a block.
    fn free(&mut self, at: usize) {
        let (address, block) = self.blocks.remove(at);
        self.changed();
        if let BlockOwner::Pool(pool) = block.owner
            && !block.is_handle
            && block.bytes > 0
            && self.parts.keys().any(|(of, _)| *of == pool)
        {
            self.left.push((pool, address, address + block.bytes.unsigned_abs()));
        }
    }

    /// Frees the left parts at the addresses of a new driver block.
    fn end_left_parts(&mut self, start: u64, end: u64) {
        let is_over = |(_, from, to): &(u8, u64, u64)| start < end && *from < end && start < *to;
        if !self.left.iter().any(is_over) {
            return;
        }
        let (over, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.left).into_iter().partition(is_over);
        for (pool, from, to) in over {
            let ended: Vec<_> = self.parts.range((pool, from)..(pool, to)).map(|(key, _)| *key).collect();
            for key in ended {
                self.parts.remove(&key);
                self.pools.get_mut(&pool).unwrap().wrong.doubled += 1;
                self.lost += 1;
            }
        }
        self.changed();
        let has_parts =
            |(pool, from, to): &(u8, u64, u64)| self.parts.range((*pool, *from)..(*pool, *to)).next().is_some();
        self.left = rest.into_iter().filter(has_parts).collect();
    }

    fn part(&mut self, pool: u8, address: u64, bytes: i64, thread: u32) {
        let of = self.pools.get_mut(&pool).unwrap();
        let (device, since, has_handles) = (of.device, of.since, of.has_handles);
        let inside = |(start, block): &&mut (u64, PlainBlock)| {
            !block.is_handle
                && *start <= address
                && address + bytes.unsigned_abs() <= *start + block.bytes.unsigned_abs()
        };
        let mut is_wrong = None;
        match self.blocks.iter_mut().find(inside).filter(|(start, block)| address < start + block.bytes.unsigned_abs())
        {
            Some((_, block)) if block.owner == BlockOwner::Pool(pool) => {}
            Some((_, block)) if !matches!(block.owner, BlockOwner::Pool(_)) => {
                if block.owner == BlockOwner::Program && block.number > since {
                    is_wrong = Some(if block.was_early { "early" } else { "late" });
                }
                block.owner = BlockOwner::Pool(pool);
            }
            _ if has_handles => {}
            _ => is_wrong = Some("outside"),
        }
        self.changed();
        let of = self.pools.get_mut(&pool).unwrap();
        let wrong = &mut of.wrong;
        match is_wrong {
            Some("early") => of.read_early += 1,
            Some("late") => wrong.late += 1,
            Some(_) => wrong.outside += 1,
            None => {}
        }
        self.lost += u64::from(is_wrong.is_some_and(|wrong| wrong != "early"));
        self.others_get(thread, Some(device));
        self.program_gets(|by, _| by == thread);
        let wrong = &mut self.pools.get_mut(&pool).unwrap().wrong;
        if self.parts.remove(&(pool, address)).is_some() {
            wrong.doubled += 1;
            self.lost += 1;
            self.changed();
        }
        self.parts.insert((pool, address), (device, bytes));
        self.changed();
    }

    fn reserved(&mut self, pool: u8, bytes: i64, thread: u32) {
        let of = self.pools.get_mut(&pool).unwrap();
        let before = of.reserved.replace(bytes);
        let device = of.device;
        if bytes < self.part_bytes(pool) {
            self.pools.get_mut(&pool).unwrap().wrong.below += 1;
            self.lost += 1;
        }
        let mine = |at: &usize| {
            let block = self.blocks[*at].1;
            block.owner == BlockOwner::Undecided(thread) && block.device == device
        };
        let mine: Vec<_> = (0..self.blocks.len()).rev().filter(mine).collect();
        let rows = || (0..mine.len()).flat_map(|from| (from + 1..=mine.len()).map(move |to| from..to));
        let sum = |row: &[usize]| row.iter().map(|at| self.blocks[*at].1.bytes).sum::<i64>();
        let exactly = |known: i64| rows().map(|row| &mine[row]).find(|row| sum(row) == (bytes - known).max(0));
        let Some(exact) = exactly(self.block_bytes(pool)).or_else(|| exactly(before?)) else { return };
        for at in exact.iter().copied() {
            let block = &mut self.blocks[at].1;
            block.owner = BlockOwner::Pool(pool);
            self.pools.get_mut(&pool).unwrap().has_handles |= block.is_handle;
            self.changed();
        }
        self.program_gets(|by, _| by == thread);
    }
}

#[derive(Default)]
struct Sums {
    live: HashMap<u64, (u32, i64)>,
}

impl Observer for Sums {
    fn changed(&mut self, change: BlockChange) {
        if change.kind == BlockChangeKind::TakenByPool {
            self.live.remove(&change.number);
        } else if change.group.is_in_program() {
            let after = change.after.get().cast_signed();
            self.live.insert(change.number, (change.device.ordinal, after));
        }
        if change.after.get() == 0 && change.kind != BlockChangeKind::Shrunk {
            self.live.remove(&change.number);
        }
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "it is a list of possible events")]
fn both_views_agree_with_the_simple_way() {
    const SLOT: u64 = 128;
    let histories: u64 = if cfg!(miri) { 3 } else { 4_000 };
    for seed in 1..=histories {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: u64| numbers(below);
        let devices = [0, 1].map(|ordinal| Device { family: Family::Cuda, ordinal });
        let (mut ledger, mut plain, mut sums) = (Ledger::default(), Plain::default(), Sums::default());
        plain.changed();
        let mut scopes: BTreeMap<u64, (usize, usize, u64)> = BTreeMap::new();
        for number in 1..50 {
            let thread = u32::try_from(random(3)).unwrap() + 1;
            let device = usize::try_from(random(2)).unwrap();
            let pool = u8::try_from(random(3)).unwrap() + 1;
            let pool_device = usize::from(pool == 3);
            let is_registered = plain.pools.contains_key(&pool);
            let slot = |device: usize, slot: u64| ((device as u64 + 1) << 40) + slot * SLOT;
            let kind = match random(16) {
                0..4 => {
                    let is_handle = random(6) == 0;
                    let kind = if is_handle { MemKind::Vmm } else { MemKind::Device };
                    let address = if is_handle { number } else { slot(device, random(12)) };
                    if plain.blocks.iter().any(|(known, _)| *known == address) {
                        continue;
                    }
                    let bytes = random(SLOT + 1);
                    let space = if is_handle { Space::Handle } else { Space::Address };
                    let block = PlainBlock {
                        device,
                        bytes: bytes.cast_signed(),
                        number,
                        owner: BlockOwner::Program,
                        is_handle,
                        was_early: false,
                    };
                    plain.alloc(address, block, thread);
                    let block = Block::new(devices[device], Bytes::new(bytes), kind);
                    EventKind::Alloc { key: Key::new(space, address), block }
                }
                4..6 if !plain.blocks.is_empty() => {
                    let at = usize::try_from(random(plain.blocks.len() as u64)).unwrap();
                    let (address, block) = plain.blocks[at];
                    plain.others_get(thread, Some(block.device));
                    plain.program_gets(|by, undecided| by == thread || undecided == address);
                    plain.free(at);
                    let space = if block.is_handle { Space::Handle } else { Space::Address };
                    EventKind::Free { key: Key::new(space, address), block: None }
                }
                6..10 if is_registered => {
                    // Parts are mostly inside a slot, and sometimes cross its end.
                    let address = slot(pool_device, random(12)) + random(4) * 32;
                    let bytes = random(40);
                    plain.part(pool, address, bytes.cast_signed(), thread);
                    let part = Block::new(devices[pool_device], Bytes::new(bytes), MemKind::Part);
                    EventKind::Alloc {
                        key: Key::of_part(PoolId(pool), address),
                        block: Block { context: pool, ..part },
                    }
                }
                10..12 if is_registered => {
                    let known: Vec<_> = plain.parts.keys().copied().collect();
                    let is_known = !known.is_empty() && random(8) > 0;
                    let (of, address) =
                        if is_known { known[usize::try_from(random(known.len() as u64)).unwrap()] } else { (pool, 77) };
                    if let Some((device, _)) = plain.parts.get(&(of, address)) {
                        plain.others_get(thread, Some(*device));
                    }
                    plain.program_gets(|by, _| by == thread);
                    if plain.parts.remove(&(of, address)).is_some() {
                        plain.changed();
                    } else {
                        plain.pools.get_mut(&of).unwrap().wrong.unknown += 1;
                        plain.lost += 1;
                    }
                    EventKind::Free { key: Key::of_part(PoolId(of), address), block: None }
                }
                12 if is_registered => {
                    let known = if random(4) == 0 { plain.part_bytes(pool) } else { plain.block_bytes(pool) };
                    let bytes = known + random(200).cast_signed() - 20;
                    let bytes = bytes.max(0);
                    plain.reserved(pool, bytes, thread);
                    EventKind::PoolReserved { pool: PoolId(pool), bytes: Bytes::new(bytes.unsigned_abs()) }
                }
                rare => {
                    match rare {
                        14 => plain.read(thread),
                        15 => plain.read(1),
                        _ => {}
                    }
                    match rare {
                        13 if !is_registered => {
                            let device = pool_device;
                            plain.pools.insert(pool, PlainPool { device, since: number, ..PlainPool::default() });
                            EventKind::PoolRegistered { pool: PoolId(pool), device: devices[device] }
                        }
                        13 if random(3) == 0 => {
                            // This thread is not part of the history.
                            plain.others_get(0, Some(pool_device));
                            plain.parts.retain(|(of, _), _| *of != pool);
                            let of = plain.pools.get_mut(&pool).unwrap();
                            of.reserved = None;
                            plain.changed();
                            EventKind::PoolEmptied { pool: PoolId(pool) }
                        }
                        14 if !plain.parts.is_empty() => {
                            let at = usize::try_from(random(plain.parts.len() as u64)).unwrap();
                            let ((of, address), (_, bytes)) = plain.parts.iter_mut().nth(at).unwrap();
                            let now = random(60);
                            *bytes = now.cast_signed();
                            let key = Key::of_part(PoolId(*of), *address);
                            plain.changed();
                            EventKind::Shrink { key, bytes: Bytes::new(now) }
                        }
                        15 if !scopes.is_empty() && random(2) == 0 => {
                            let (scope, _) = scopes.pop_first().unwrap();
                            EventKind::Close { scope: ScopeId(scope) }
                        }
                        15 => {
                            scopes.insert(number, (device, plain.history.len() - 1, plain.lost));
                            EventKind::Open { scope: ScopeId(number), spec: ScopeSpec::exact(devices[device]) }
                        }
                        _ => {
                            plain.read(thread);
                            EventKind::PoolsQueried
                        }
                    }
                }
            };
            // One thread opens all scopes, so that all of them count everything.
            let by = if matches!(kind, EventKind::Open { .. } | EventKind::Close { .. }) { 1 } else { thread };
            let time = Duration::from_millis(number);
            ledger.apply_observed(&Event { number, time, thread: ThreadId(by), kind: &kind }, &mut sums);
            let now = *plain.history.last().unwrap();
            ledger.sums.flush();
            for (id, (device, started, lost)) in &scopes {
                let scope = ledger.places.trace(ScopeId(*id), &ledger.sums).expect("it is open");
                let of = |view: usize| {
                    let levels = plain.history[*started..].iter().map(|levels| levels[*device][view]);
                    let start = plain.history[*started][*device][view];
                    let end = now[*device][view];
                    (end - start, levels.max().unwrap() - start.max(end))
                };
                let result = (scope.used.get(), scope.peaked.get().cast_signed());
                assert_eq!(result, of(0), "seed {seed}, event {number}: {kind:?}");
                let has_pool = plain.pools.values().any(|pool| pool.device == *device);
                let driver = scope.driver.map(|driver| (driver.used.get(), driver.peaked.get().cast_signed()));
                assert_eq!(driver, has_pool.then(|| of(1)), "seed {seed}, event {number}: {kind:?}");
                assert_eq!(scope.lost, plain.lost - lost, "seed {seed}, event {number}: {kind:?}");
            }
        }
        let mut by_groups = [0; 2];
        for GroupUsage { device, bytes, .. } in ledger.groups() {
            by_groups[device.ordinal as usize] += bytes.get().cast_signed();
        }
        let mut counted = [0; 2];
        sums.live.values().for_each(|(device, bytes)| counted[*device as usize] += bytes);
        let now = plain.history.last().unwrap().map(|[program, _]| program);
        assert_eq!((by_groups, counted), (now, now), "seed {seed}");
        for known in ledger.pools() {
            let KnownPool { pool, parts, part_bytes, reserved, reported, block_bytes, wrong, read_early, .. } = known;
            let of = plain.pools[&pool.0];
            let expected: Vec<_> =
                plain.parts.range((pool.0, 0)..(pool.0 + 1, 0)).map(|(_, (_, bytes))| bytes).collect();
            let bytes = expected.iter().copied().sum::<i64>().unsigned_abs();
            assert_eq!((parts, part_bytes.get()), (expected.len() as u64, bytes), "seed {seed}");
            let blocks = plain.block_bytes(pool.0);
            assert_eq!(block_bytes.get().cast_signed(), blocks, "seed {seed}");
            let [reserved, reported] = [reserved, reported].map(|bytes| bytes.get().cast_signed());
            let expected = of.reserved.unwrap_or(blocks);
            let parts = plain.part_bytes(pool.0);
            let believed = if (parts..=blocks).contains(&expected) { expected } else { blocks };
            assert_eq!((reserved, reported), (believed, expected), "seed {seed}");
            assert_eq!((wrong, read_early), (of.wrong, of.read_early), "seed {seed}");
        }
        let under = ScopeId(u64::MAX);
        for (device, (record, expected)) in devices.into_iter().zip(&plain.records).filter(|(_, of)| of.0 > 0) {
            ledger.sums().keep_device_peak(device, under, false).expect("something was allocated");
            let mut at_peak = [[0; 2]; 4];
            let mut program = 0;
            for GroupAtPeak { group, bytes } in (0..).map_while(|part| ledger.sums().peak_part(under, part)).flatten() {
                if let Some(pool) = at_peak.get_mut(usize::from(group.pool.0)).filter(|_| group.pool != PoolId::NONE) {
                    pool[usize::from(group.kind != MemKind::Part)] += bytes.get();
                }
                program += if group.is_in_program() { bytes.get() } else { 0 };
            }
            ledger.sums().release_peak(under);
            let pools = (1..4).filter(|pool| plain.pools.get(pool).is_some_and(|of| devices[of.device] == device));
            for pool in pools.map(usize::from) {
                assert_eq!(at_peak[pool], expected[pool], "seed {seed}, pool {pool}");
            }
            assert_eq!(program, *record, "seed {seed}");
        }
        for (number, device) in devices.into_iter().enumerate() {
            let expected = plain.history.last().unwrap()[number][1];
            assert!(ledger.driver_in_use(device).is_none_or(|in_use| in_use == expected), "seed {seed}");
        }
    }
}
