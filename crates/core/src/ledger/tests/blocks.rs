//! Tests of allocations and frees: kinds, failed frees, unknown blocks, lost events, statistics.

use std::mem::offset_of;

use super::*;

/// `standin/calls.rs` tests frees of unknown blocks with each function of the driver.
#[test]
fn a_late_lookup_after_an_untracked_free() {
    check("open t; alloc a 4; free x 10; alloc b 8; close t = 2 2");
    check("open t; free x; untracked; free y; found 10; read t = -10 0 untracked=1; open u; close u = 0 0 untracked=0");
}

/// The driver frees the block after the lookup, so the block is live when the scope opens.
#[test]
fn a_scope_that_opens_during_a_late_lookup_starts_before_the_free() {
    check("free x; open t; found 10; free y; untracked; close t = -10 0 untracked=1");
    check("free x; open t; untracked; close t = 0 0 untracked=1");
    check("free x; open t %2; free_failed; free y; untracked; close t = 0 0 untracked=1");
    check("free x; untracked; open t; free_failed; free y; untracked; close t = 0 0 untracked=1");
    check(
        "open o; free x; untracked; open t; reset t = 0 0 untracked=0; free_failed; close t = 0 0 untracked=0; close o = 0 0 untracked=0",
    );
}

#[test]
fn failed_frees_are_not_counted_as_events() {
    for (script, events) in [
        ("alloc a 1; free a", 2),
        ("alloc a 1; free a; free_failed", 1),
        ("alloc a 1; open t; free a; open u; free_failed; open v; free a", 2),
        ("free x; free_failed", 0),
        ("free x; untracked; free_failed", 0),
        ("free x; untracked", 1),
        ("free x 10; free_failed; free y; found 7; free_failed", 0),
    ] {
        assert_eq!(check(script).sums().counts().events, events, "{script}");
    }
}

#[test]
fn a_displaced_function_is_reported_once_by_each_scope() {
    check("open o; displaced 1 1; open t; open u; close u = 0 0 lost=1; close t = 0 0 lost=1; close o = 0 0 lost=1");
    check("displaced 2 2; open t; displaced 3 1; close t = 0 0 lost=3; displaced 0 0; open u; close u = 0 0 lost=0");
    check("open t; displaced 1 1; reset t = 0 0 lost=1; displaced 0 0; close t = 0 0 lost=1");
    check("displaced 1 1; displaced 0 0; lost 1; open u; close u = 0 0 lost=0");
    check("lost 5; displaced 1 1; displaced 0 0; displaced 1 1; open t; displaced 1 1; close t = 0 0 lost=2");
}

#[test]
fn managed_and_pinned_memory_is_counted_separately() {
    check("open t; alloc a 1; alloc b 2 pool; alloc c 4 vmm; alloc d 8 managed; alloc e 16 pinned; close t = 7 0");
    let mut ledger = check("alloc a 8 managed; alloc b 16 pinned; alloc c 1; alloc d 2; free a; free c");
    let kinds = ledger.sums().stats()[0].kinds;
    let [device, pool, managed, pinned, vmm, graph, ..] =
        kinds.map(|kind| (kind.blocks.current, kind.bytes.current >> 20));
    assert_eq!((device, pool, managed, pinned, vmm, graph), ((1, 2), (0, 0), (0, 0), (1, 16), (0, 0), (0, 0)));
}

#[test]
fn a_block_that_shrinks_keeps_its_attribution() {
    let ledger = check(
        "open t; alloc a 8 graph; shrink a 3; read t = 3 5; open u; shrink a 1; close u = -2 0; free a; close t = 0 8; shrink a 1",
    );
    let mut ledger = ledger;
    let graph = ledger.sums().stats()[0].kinds[MemKind::Graph as usize];
    assert_eq!(
        (graph.blocks.peak, graph.bytes.peak >> 20, graph.bytes.allocated >> 20, graph.bytes.freed() >> 20),
        (1, 8, 8, 8)
    );
}

/// It is read once when the blocks are read in parts.
#[test]
fn a_block_that_shrinks_keeps_its_place() {
    let mut runner = Runner::default();
    (1..2000).for_each(|block| runner.line(&format!("alloc {block} 2 graph")));
    let mut blocks = runner.ledger.blocks(0, None);
    (1..2000).rev().for_each(|block| runner.line(&format!("shrink {block} 1")));
    blocks.extend((1..BLOCK_PARTS).flat_map(|part| runner.ledger.blocks(part, None)));
    blocks.sort_by_key(|block| block.number);
    assert!(blocks.iter().map(|block| block.number).eq(1..2000), "each once");
}

#[test]
fn the_blocks_of_a_destroyed_context_are_removed() {
    check(
        "open t; alloc a 10 in 1; alloc b 20 in 2; alloc c 5 vmm; gone 1; free a; untracked; read t = 25 10 untracked=1; gone 3",
    );
    let mut ledger = check("open t @1; alloc a 10 in 1; alloc b 1 in 1; alloc d @1 40 in 2; gone 1; close t = 40 0");
    assert_eq!(ledger.sums().counts().removed_with_context, 2);
}

#[test]
fn after_a_failed_free_the_block_still_belongs_to_its_thread() {
    check("open t of own %2; alloc a 10 %2; free a %3; free_failed %3; read t = 10 0; free a; close t = 0 10");
    check("open t of own %3; alloc a 10 %2; free a %3; free_failed %3; close t = 0 0");
    check(
        "open t; alloc a 1; alloc b 2; free a %2; free b %3; free_failed %2; read t = 1 2; free_failed %2; free_failed; close t = 1 2",
    );
    check("open t; free x 10; free_failed; read t = 0 0; free y; found 7; free_failed; close t = 0 0 untracked=0");
    check("open t; free x; free_failed; free x; untracked; free_failed; close t = 0 0 untracked=0");
}

#[test]
fn an_address_that_is_reused_without_a_free() {
    check("open t; alloc a 10; alloc a 30; read t = 30 0; free a; close t = 0 30");
}

#[test]
fn a_total_above_the_largest_number() {
    let mut runner = Runner::default();
    for _ in 0..40 {
        // The size is 2^60 bytes.
        runner.lines("alloc x 1099511627776; free x");
        assert!(!runner.ledger.nodes().is_empty());
    }
    let stat = runner.ledger.sums().stats()[0].on_device;
    assert_eq!((stat.bytes.allocated, stat.bytes.freed(), stat.blocks.allocated), (u64::MAX, u64::MAX, 40));
    // The same script, without a query in between.
    (0..40).for_each(|_| runner.lines("alloc x 1099511627776; free x"));
}

#[test]
fn statistics_are_those_of_an_allocator() {
    let mut ledger =
        check("alloc a 4; alloc b 8 pool; free a; alloc c 2; alloc d 16 managed; reset-peaks; free b; alloc e 1 pool");
    let [stats] = ledger.sums().stats()[..] else { panic!("one device") };
    let stat_values = |stat: Stat| {
        let of = |count: Count, unit: u64| {
            (count.current / unit, count.peak / unit, count.allocated / unit, count.freed() / unit)
        };
        (of(stat.bytes, 1 << 20), of(stat.blocks, 1))
    };
    assert_eq!(stat_values(stats.on_device), ((3, 10, 15, 12), (2, 2, 4, 2)));
    assert_eq!(stat_values(stats.kinds[MemKind::Device as usize]), ((2, 2, 6, 4), (1, 1, 2, 1)));
    assert_eq!(stat_values(stats.kinds[MemKind::Pool as usize]), ((1, 8, 9, 8), (1, 1, 2, 1)));
    assert_eq!(stat_values(stats.kinds[MemKind::Managed as usize]), ((16, 16, 16, 0), (1, 1, 1, 0)));
}

/// A loss makes insertions slower only while blocks from before it are live. Displaced functions make them slower as long as
/// they are displaced.
#[test]
fn frees_may_be_missing_until_old_blocks_are_gone() {
    let may_be_missing = |script: &str| check(script).live.frees_may_be_missing();
    assert!(!may_be_missing("alloc a 1"));
    assert!(!may_be_missing("lost 1; alloc a 1"));
    assert!(may_be_missing("alloc a 1; lost 1; alloc b 1"));
    assert!(!may_be_missing("alloc a 1; lost 1; alloc b 1; free a"));
    assert!(!may_be_missing("alloc a 1; lost 1; alloc a 2; alloc b 1"));
    assert!(may_be_missing("alloc a 1; displaced 1 1; alloc a 2; lost 0"));
    assert!(may_be_missing("alloc a 1; displaced 1 1; displaced 0 0"));
    assert!(!may_be_missing("alloc a 1; displaced 1 1; displaced 0 0; free a; alloc b 1"));
}

/// Large event numbers and large sizes keep all their bits.
#[test]
fn numbers_and_sizes_are_not_truncated() {
    for before in [0, (1 << 32) - 8, 1 << 33, (1 << 48) - 64] {
        let mut runner = Runner { number: before, ..Runner::default() };
        runner.lines("open o; alloc a 1; open t; alloc b 2; inside t = 2; inside o = 1 2");
        runner.number += 16;
        runner.lines("open late; alloc c 4; inside late = 4; inside t = 2 4; inside o = 1 2 4");
        let key = runner.key("c");
        let block = runner.ledger.block(key).expect("it is live");
        assert_eq!(block.number, runner.number);
    }
    for bits in [32, 48, 50, 62] {
        let mut runner = Runner::default();
        let huge = Bytes::new((1 << bits) + 1);
        let key = runner.key("x");
        runner.line("open t");
        let alloc = runner.alloc("x", Device { family: Family::Cuda, ordinal: 0 }, huge, MemKind::Device);
        runner.post(&alloc, ThreadId(1));
        assert_eq!(runner.ledger.block(key).map(|block| block.bytes), Some(huge));
        // A loss moves the block from the front cache to its shard.
        runner.line("lost 1");
        assert_eq!(runner.ledger.block(key).map(|block| block.bytes), Some(huge));
        assert_eq!(runner.ledger.groups()[0].bytes, huge);
        runner.line("free x");
        let close = EventKind::Close { scope: ScopeId(runner.id("t")) };
        let trace = runner.post(&close, ThreadId(1)).expect("it is open");
        assert_eq!((trace.used.get(), trace.peaked), (0, huge));
    }
}

#[test]
fn what_each_event_reads_is_in_one_cache_line() {
    // The inbox puts the ledger 16 bytes after the start of a line. `places` ends with the list of threads.
    let ends = [offset_of!(Ledger, fast_path) - size_of::<Vec<()>>(), offset_of!(Ledger, live) + 15];
    let [first, last] = ends.map(|offset| (16 + offset) / 64);
    assert_eq!(first, last);
}
