//! Tests that damaged and hostile files are read as far as they make sense, and do no harm. `fuzz/` searches for files that
//! do harm.

use std::{io::Cursor, time::Duration};

use crate::{CallsiteDefinition, End, Item, Process, Reader, RecordedEvent, Skipped, Writer, items_of};
use gpumem_core::model::{
    Block, Bytes, CallsiteId, Device, EventKind, Family, Gauge, GpuMemory, Key, MemKind, PoolId, ScopeId, ScopeSpec,
    StackId, ThreadId, ThreadName, Threads,
};

use crate::testing::{Random, items};

/// Returns a recording of the items, in records of at most `part` items.
fn written_in_parts(items: &[Item], part: usize) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for items in items.chunks(part) {
        for item in items {
            writer.write(item).unwrap();
        }
        writer.flush().unwrap();
    }
    writer.finish().unwrap()
}

/// Reads the whole file, and makes every report.
fn read(file: &[u8]) -> Option<Skipped> {
    let mut reader = Reader::new(Cursor::new(file)).ok()?;
    while reader.step().unwrap().is_some() {}
    for stats in reader.ledger().stats() {
        let _ = reader.device_peak(stats.device);
    }
    let _ = reader.summary().map(|summary| summary.to_string());
    assert!(reader.end().is_some());
    Some(reader.skipped())
}

#[test]
fn a_file_that_is_cut_is_readable_up_to_the_last_complete_record() {
    const PART: usize = 50;
    let items = items(&mut Random::new(1), 300);
    let file = written_in_parts(&items, PART);
    let mut random = Random::new(1);
    for _ in 0..300 {
        let at = random.index(file.len() + 1);
        match items_of(Cursor::new(&file[..at])) {
            Ok((read, end)) => {
                assert_eq!(read, items[..read.len()]);
                let is_at_end = read.len() % PART == 0 || read.len() == items.len();
                assert!(is_at_end, "whole records are read: {} items", read.len());
                match end {
                    End::Complete => {}
                    End::Cut { at: record } => {
                        assert!(record <= at as u64);
                        let whole = items_of(Cursor::new(&file[..usize::try_from(record).unwrap()])).unwrap();
                        assert_eq!(whole, (read, End::Complete), "nothing that is complete is left out");
                    }
                    other => panic!("{other:?}"),
                }
            }
            Err(error) => assert!(at < 16, "{at}: {error}"),
        }
        read(&file[..at]);
    }
}

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

pub(crate) fn event(number: u64, kind: EventKind) -> Item {
    Item::Event(RecordedEvent { number, ticks: number, time: Duration::ZERO, thread: ThreadId(1), kind })
}

fn block(bytes: u64) -> Block {
    Block { device: DEVICE, bytes: Bytes::new(bytes), kind: MemKind::Pool, context: 0, stack: StackId::NONE }
}

pub(crate) fn alloc(number: u64, key: u64, bytes: u64) -> Item {
    event(number, EventKind::Alloc { key: Key::from_raw(key), block: block(bytes) })
}

pub(crate) fn open(number: u64, scope: u64) -> Item {
    let spec = ScopeSpec { callsite: CallsiteId(2), at_peak: true, ..ScopeSpec::exact(DEVICE) };
    event(number, EventKind::Open { scope: ScopeId(scope), spec })
}

/// For example a loop that allocates and frees a part of a pool: the events differ only slightly in their times, and take
/// very little space.
#[test]
fn a_program_that_does_the_same_all_the_time_has_a_recording() {
    let (mut random, mut ticks) = (Random::new(4), 0);
    let mut writer = Writer::new(Vec::new()).unwrap();
    for number in 1..=1_600_000 {
        let is_alloc = number % 2 == 1;
        let key = Key::from_raw(512);
        let kind =
            if is_alloc { EventKind::Alloc { key, block: block(3) } } else { EventKind::Free { key, block: None } };
        ticks += 20 + random.index(8) as u64;
        writer.write_event(&RecordedEvent { number, ticks, time: Duration::ZERO, thread: ThreadId(1), kind }).unwrap();
    }
    let file = writer.finish().unwrap();
    let mut reader = Reader::new(Cursor::new(&file)).unwrap();
    while reader.step().unwrap().is_some() {}
    assert_eq!((reader.end(), reader.skipped().is_nothing()), (Some(&End::Complete), true), "{} bytes", file.len());
}

#[track_caller]
fn check(what: &str, items: &[Item], is_left_out: impl Fn(Skipped) -> bool) {
    // Each item is in a separate record, because numbers cannot decrease within a record.
    let part = if items.len() < 10 { 1 } else { items.len() };
    let skipped = read(&written_in_parts(items, part)).expect("it is a recording");
    assert!(is_left_out(skipped), "{what}: {skipped:?}");
}

/// The events are of every kind.
#[test]
fn what_a_session_writes_is_never_left_out() {
    let (scope, key, device, pool) = (ScopeId(9), Key::from_raw(512), DEVICE, PoolId(1));
    let (older, stack, bytes) = (Key::from_raw(1024), StackId(3), Bytes::new(4));
    let Item::Event(RecordedEvent { kind: start, .. }) = open(1, scope.0) else { unreachable!() };
    let memory = GpuMemory::new(Bytes::mib(3), Bytes::mib(2), Bytes::mib(1), None);
    let kinds = [
        start,
        EventKind::Adopt { scope, threads: Threads::Unscoped },
        EventKind::Named { name: ThreadName::new(b"worker") },
        EventKind::Alloc { key, block: block(8) },
        EventKind::Shrink { key, bytes },
        EventKind::Free { key, block: None },
        EventKind::FreeFailed,
        // The free of this block was missed.
        EventKind::Alloc { key, block: block(8) },
        EventKind::Free { key: older, block: Some(block(8)) },
        EventKind::Free { key: older, block: None },
        EventKind::LateLookup { block: block(8) },
        EventKind::Untracked,
        EventKind::Mark { callsite: CallsiteId(2) },
        EventKind::Sample { device, memory },
        EventKind::ReadFailed { device, gauge: Gauge::Sampled },
        EventKind::Rejected { device: None, bytes, kind: MemKind::Pool, stack },
        EventKind::ResetPeaks { device },
        EventKind::PoolRegistered { pool, device },
        EventKind::PoolReserved { pool, bytes },
        EventKind::PoolEmptied { pool },
        EventKind::PoolsQueried,
        EventKind::ResetSummary,
        EventKind::Displaced { now: 1, more: 1 },
        EventKind::Displaced { now: 0, more: 0 },
        EventKind::Lost { count: 2 },
        EventKind::ContextDestroyed { context: 0 },
        EventKind::Enter { scope },
        EventKind::Leave { scope },
        EventKind::Read { scope },
        EventKind::Reset { scope },
        EventKind::ResetKeepingPeak { scope },
        EventKind::Close { scope },
    ];
    let mut items: Vec<_> = (1..).zip(kinds).map(|(number, kind)| event(number, kind)).collect();
    items.extend([Item::ThreadReused(ThreadId(1)), open(99, 10)]);
    check("all kinds of events", &items, |skipped| skipped.is_nothing());
}

#[test]
fn what_contradicts_itself_is_left_out_and_counted() {
    let contradicts = |count: u64| move |skipped: Skipped| skipped.contradictions == count && skipped.above_limits == 0;
    let close = |number, scope| event(number, EventKind::Close { scope: ScopeId(scope) });
    let read_of = |number, scope| event(number, EventKind::Read { scope: ScopeId(scope) });
    check("scopes that nobody opened", &[close(1, 9), read_of(2, 9)], contradicts(2));
    let late = Item::Process(Process { ran_before: Some(Duration::from_secs(1)), ..Process::default() });
    check("scopes that are older than the recording", &[late, close(1, 9), read_of(2, 9)], contradicts(0));
    check("a scope that is opened twice", &[open(1, 9), open(2, 9), close(3, 9), close(4, 9)], contradicts(2));
    check(
        "numbers that fall",
        &[alloc(5, 512, 1), alloc(5, 1024, 1), alloc(4, 2048, 1), alloc(6, 512, 1)],
        contradicts(2),
    );
    let free = event(1, EventKind::Free { key: Key::from_raw(512), block: None });
    check("a free of an unknown block is what happens at the start of a session", &[free], contradicts(0));
    check("the key of no block", &[alloc(1, u64::MAX, 1)], contradicts(1));
    let shrink = event(2, EventKind::Shrink { key: Key::from_raw(512), bytes: Bytes::new(9) });
    check("a block that grows", &[alloc(1, 512, 8), shrink], contradicts(1));
    check("more functions than were taken", &[event(1, EventKind::Displaced { now: 3, more: 2 })], contradicts(1));
    let registered = event(2, EventKind::PoolRegistered { pool: PoolId::NONE, device: DEVICE });
    let free = event(3, EventKind::Free { key: Key::from_raw(512), block: None });
    check("a pool with the id of none", &[alloc(1, 512, 8), registered, free], contradicts(1));
    let named = |name: &str| {
        let (id, file) = (CallsiteId(2), String::new());
        let name = Some(name.to_owned());
        Item::Callsite(CallsiteDefinition { id, name, file, line: 1, column: 1, module_path: None })
    };
    check("two names of one scope", &[named("a"), named("b"), named("a")], contradicts(1));
}

#[test]
fn what_is_above_a_limit_is_left_out_and_counted() {
    let above = |count: u64| move |skipped: Skipped| skipped.above_limits == count;
    let of_thread = |thread| {
        let Item::Event(event) = alloc(1, 512, 1) else { unreachable!() };
        Item::Event(RecordedEvent { thread: ThreadId(thread), ..event })
    };
    check("a thread of that number", &[of_thread(u32::MAX)], above(1));
    check("a thread of that number, again", &[Item::ThreadReused(ThreadId(u32::MAX))], above(1));
    check("an event of that number", &[alloc(1 << 48, 512, 1)], above(1));
    check("a block of that size", &[alloc(1, 512, 1 << 60)], above(1));
    let lost = |number, count| event(number, EventKind::Lost { count });
    check("so many lost events", &[lost(1, u64::MAX), lost(2, 1), Item::Missed(u64::MAX)], above(2));
    let memory = GpuMemory::new(Bytes::ZERO, Bytes::new(1 << 63), Bytes::ZERO, None);
    check("a reading of so much", &[event(1, EventKind::Sample { device: DEVICE, memory })], above(1));
    let device = Device { family: Family::Cuda, ordinal: 1 << 31 };
    check("a device of that number", &[event(1, EventKind::ResetPeaks { device })], above(1));
    check("a scope of the reader's", &[open(1, 1 << 63)], above(1));
    let deep: Vec<_> = (1..20_000).map(|number| open(number, number)).collect();
    check("a thread in so many scopes", &deep, |skipped| skipped.above_limits > 1_000);
}

/// Addresses that all have the same slot of a hash table would make the cost of each event proportional to the number of
/// blocks.
#[test]
fn keys_that_collide_are_left_out() {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut inverse = 1_u64;
    for _ in 0..6 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(GOLDEN.wrapping_mul(inverse)));
    }
    assert_eq!(GOLDEN.wrapping_mul(inverse), 1);
    let colliding: Vec<_> = (1..=10_000).map(|at| alloc(at, inverse.wrapping_mul(7 << 32 | at), 1)).collect();
    check("keys that collide", &colliding, |skipped| skipped.above_limits > 5_000);
    let usual: Vec<_> = (1..=10_000).map(|at| alloc(at, at << 21, 1)).collect();
    check("addresses", &usual, |skipped| skipped.is_nothing());
}

/// The names are long, and their paths are nested. The texts of all paths would fill the memory.
#[test]
fn reports_that_would_be_too_large_are_left_out() {
    let name = |id| CallsiteDefinition {
        id: CallsiteId(id),
        name: Some("x".repeat(16_000)),
        file: String::new(),
        line: 1,
        column: 1,
        module_path: None,
    };
    let mut items: Vec<_> = (2..66).map(|id| Item::Callsite(name(id))).collect();
    let mut number = 0;
    let mut next = || {
        number += 1;
        number
    };
    for tree in 0..200_u64 {
        for depth in 0..60 {
            let (at, scope) = (next(), tree * 100 + depth);
            let Item::Event(RecordedEvent { kind: EventKind::Open { spec, .. }, .. }) = open(at, scope) else {
                unreachable!()
            };
            let callsite =
                CallsiteId(2 + u32::try_from(if depth == 0 { tree % 64 } else { (tree * depth) % 64 }).unwrap());
            items.push(event(
                at,
                EventKind::Open { scope: ScopeId(scope), spec: ScopeSpec { callsite, at_peak: false, ..spec } },
            ));
        }
        for depth in (0..60).rev() {
            items.push(event(next(), EventKind::Close { scope: ScopeId(tree * 100 + depth) }));
        }
    }
    items.push(alloc(next(), 512, 1));
    let mut reader = Reader::new(Cursor::new(written_in_parts(&items, items.len()))).unwrap();
    while reader.step().unwrap().is_some() {}
    assert!(reader.skipped().is_nothing() && reader.summary().is_none(), "a summary of gigabytes");
}
