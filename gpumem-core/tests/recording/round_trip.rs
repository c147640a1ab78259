//! What is written is read back.

use std::{io::Cursor, time::Duration};

use gpumem_core::{
    derive::Names,
    model::{
        Block, Bytes, CallsiteId, Device, EventKind, Family, Gauge, GpuMemory, GpuProcess, Key, Label, MemKind,
        PoolUsage, ProcessKind, ScopeId, ScopeSpec, Source, StackId, ThreadId,
    },
    recording::{
        AllocatorAction, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents, AllocatorFigures,
        BlockLabel, CallsiteDefinition, ClockPair, CodeAddress, ContextDefinition, DeviceDefinition, DeviceReading,
        End, Finished, Interception, Item, ModuleDefinition, Process, Reader, RecordedEvent, Request, RingDefinition,
        StackDefinition, Symbol, SymbolsDefinition, ThreadDefinition, Writer, items_of,
    },
};

use crate::Random;

fn bytes(random: &mut Random) -> Bytes {
    Bytes::new(random.any())
}

fn device(random: &mut Random) -> Device {
    let family = if random.is(2) { Family::Cuda } else { Family::Simulated };
    Device { family, ordinal: random.small() }
}

fn key(random: &mut Random) -> Key {
    Key::from_raw(random.any())
}

fn kind(random: &mut Random) -> MemKind {
    MemKind::ALL[random.index(MemKind::ALL.len())]
}

fn gauge(random: &mut Random) -> Gauge {
    [Gauge::Exact, Gauge::Sampled, Gauge::Off][random.index(3)]
}

fn source(random: &mut Random) -> Source {
    let all = [Source::Dispatch, Source::Cupti, Source::Simulation, Source::Sampling, Source::Off];
    all[random.index(all.len())]
}

fn block(random: &mut Random) -> Block {
    Block {
        device: device(random),
        bytes: bytes(random),
        kind: kind(random),
        context: (random.next() & 0xff) as u8,
        stack: StackId(random.small()),
    }
}

fn memory(random: &mut Random) -> GpuMemory {
    GpuMemory::new(bytes(random), bytes(random), bytes(random), random.option(bytes))
}

fn usage(random: &mut Random) -> PoolUsage {
    PoolUsage {
        pool: random.any(),
        used: bytes(random),
        used_high: bytes(random),
        reserved: bytes(random),
        reserved_high: bytes(random),
    }
}

fn reading(random: &mut Random) -> DeviceReading {
    let process = |random: &mut Random| {
        let kinds = [ProcessKind::Compute, ProcessKind::Graphics, ProcessKind::Both];
        let mut process = GpuProcess::new(random.small(), kinds[random.index(3)]);
        (process.name, process.used) = (random.option(Random::text), random.option(bytes));
        process
    };
    DeviceReading {
        device: device(random),
        name: random.option(Random::text),
        memory: memory(random),
        processes: random.option(|random| random.list(process)),
        pool: random.option(usage),
    }
}

fn event_kind(random: &mut Random) -> EventKind {
    let scope = ScopeId(random.any());
    match random.below(20) {
        0 => EventKind::Free { key: key(random), block: random.option(block) },
        1 => EventKind::LateLookup { block: block(random) },
        2 => EventKind::Untracked,
        3 => EventKind::FreeFailed,
        4 => EventKind::Shrink { key: key(random), bytes: bytes(random) },
        5 => EventKind::ContextDestroyed { context: (random.next() & 0xff) as u8 },
        6 => EventKind::Sample { device: device(random), memory: memory(random) },
        7 => EventKind::ReadFailed { device: device(random), gauge: gauge(random) },
        8 => {
            let spec = ScopeSpec {
                device: device(random),
                gauge: gauge(random),
                every: Duration::from_nanos(random.any()),
                thread: random.option(|random| ThreadId(random.small())),
                callsite: CallsiteId(random.small()),
                source: source(random),
                at_peak: random.is(2),
            };
            EventKind::Open { scope, spec }
        }
        9 => EventKind::Enter { scope },
        10 => EventKind::Leave { scope },
        11 => EventKind::Read { scope },
        12 => EventKind::Reset { scope },
        13 => EventKind::ResetKeepingPeak { scope },
        14 => EventKind::Close { scope },
        15 => EventKind::ResetPeaks { device: device(random) },
        16 => EventKind::Lost { count: random.any() },
        17 => EventKind::Displaced { now: random.any(), more: random.any() },
        18 => {
            let Block { bytes, kind, stack, .. } = block(random);
            EventKind::Refused { device: random.option(device), bytes, kind, stack }
        }
        _ => EventKind::Alloc { key: key(random), block: block(random) },
    }
}

fn request(random: &mut Random) -> Request {
    let (scope, device) = (ScopeId(random.any()), device(random));
    let (tracker, refusal) = (random.any(), random.any());
    match random.below(14) {
        0 => Request::Report {
            scope,
            ctx: random.option(Random::text),
            subctx: random.option(Random::text),
            lines: random.option(Random::small),
        },
        1 => Request::Line { scope, number: random.small(), source: random.text() },
        2 => Request::Summary { not_intercepted: random.option(Random::text) },
        3 => Request::Breakdown(reading(random)),
        4 => Request::MemoryStats {
            device,
            intercepted_by: random.text(),
            since: Duration::from_nanos(random.any()),
            pool: random.option(|random| random.option(usage)),
        },
        5 => Request::LiveBlocks { scope: random.option(|_| scope) },
        6 => Request::Leaks { is_intercepted: random.is(2) },
        7 => Request::Peaks { is_intercepted: random.is(2) },
        8 => Request::PeakHolders { scope },
        9 => Request::TrackerStarted { tracker, device },
        10 => Request::Tracked {
            tracker,
            time: Duration::from_nanos(random.any()),
            file: random.text(),
            line: random.small(),
            column: random.small(),
            ctx: random.option(Random::text),
            used: random.option(bytes),
            is_intercepted: random.is(2),
        },
        11 => Request::TrackerEnded { tracker },
        12 => Request::Refused {
            refusal,
            device,
            requested: bytes(random),
            kind: kind(random),
            stack: StackId(random.small()),
            path: random.list(Random::text),
        },
        _ => Request::OutOfMemory {
            refusal,
            reading: if random.is(2) { Ok(reading(random)) } else { Err(random.text()) },
        },
    }
}

fn address(random: &mut Random) -> CodeAddress {
    CodeAddress { module: random.small(), offset: random.any() }
}

fn definition(random: &mut Random) -> Item {
    let symbol = |random: &mut Random| Symbol {
        function: random.option(Random::text),
        file: random.option(Random::text),
        line: random.option(Random::small),
        column: random.option(Random::small),
    };
    match random.below(18) {
        0 => Item::Process(Process {
            pid: random.small(),
            executable: random.text(),
            arguments: random.list(Random::text),
            folder: random.text(),
            own_module: random.option(Random::text),
            began: Duration::from_nanos(random.any()),
            version: random.text(),
            ran_before: random.option(|random| Duration::from_nanos(random.any())),
        }),
        1 => Item::Clock(ClockPair { ticks: random.any(), time: Duration::from_nanos(random.any()) }),
        2 => Item::Thread(ThreadDefinition {
            thread: ThreadId(random.small()),
            os_id: random.any(),
            name: random.option(Random::text),
        }),
        3 => Item::Callsite(CallsiteDefinition {
            id: CallsiteId(random.small()),
            name: random.option(Random::text),
            file: random.text(),
            line: random.small(),
            column: random.small(),
            module_path: random.option(Random::text),
        }),
        4 => Item::Module(ModuleDefinition {
            id: random.small(),
            path: random.text(),
            build_id: random.list(|random| (random.next() & 0xff) as u8),
            base: random.any(),
        }),
        5 => Item::Stack(StackDefinition { id: StackId(random.small()), addresses: random.list(address) }),
        6 => Item::Symbols(SymbolsDefinition { address: address(random), symbols: random.list(symbol) }),
        7 => Item::Device(DeviceDefinition {
            device: device(random),
            name: random.option(Random::text),
            total: random.option(bytes),
            uuid: random.option(Random::text),
        }),
        8 => Item::Context(ContextDefinition { context: (random.next() & 0xff) as u8, device: device(random) }),
        9 => Item::Interception(Interception { source: source(random), library: random.text() }),
        10 => {
            let shape = random.list(|random| usize::try_from(random.any()).unwrap_or(7));
            let label = Label { name: random.text(), shape, dtype: random.text() };
            Item::Label(BlockLabel { key: key(random), number: random.any(), label })
        }
        11 => Item::ThreadReused(ThreadId(random.small())),
        12 => Item::PeakReleased(ScopeId(random.any())),
        13 => Item::Allocator(AllocatorDefinition {
            name: random.text(),
            missing: random.option(Random::text),
            devices: random.list(|random| AllocatorDevice {
                device: device(random),
                older: random.any(),
                known_from: random.option(|random| Duration::from_nanos(random.any())),
                said: random.option(|random| AllocatorFigures {
                    allocated: bytes(random),
                    allocated_high: bytes(random),
                    reserved: bytes(random),
                    reserved_high: bytes(random),
                }),
            }),
        }),
        14 => Item::AllocatorEvents(AllocatorEvents {
            device: device(random),
            events: random.list(|random| AllocatorEvent {
                time: Duration::from_nanos(random.any()),
                action: [AllocatorAction::SegmentAlloc, AllocatorAction::Alloc, AllocatorAction::OutOfMemory]
                    [usize::try_from(random.below(3)).unwrap_or(0)],
                address: random.any(),
                bytes: bytes(random),
                requested: bytes(random),
                stream: random.any(),
                stack: StackId(random.small()),
            }),
        }),
        15 => Item::Ring(RingDefinition { segment: random.option(Random::any), recording: random.any() }),
        16 => Item::Finished(Finished),
        _ => Item::Missed(random.any()),
    }
}

/// Items of all sorts, with numbers of events that rise.
pub(crate) fn items(random: &mut Random, count: usize) -> Vec<Item> {
    let mut number = 0_u64;
    let item = |random: &mut Random| match random.below(10) {
        0 => definition(random),
        1 => Item::Request(request(random)),
        _ => {
            number += if random.is(20) { 1 + random.below(1 << 40) } else { 1 };
            Item::Event(RecordedEvent {
                number,
                ticks: random.any(),
                time: Duration::from_nanos(random.any()),
                thread: ThreadId(random.small()),
                kind: event_kind(random),
            })
        }
    };
    std::iter::repeat_with(|| ()).take(count).scan(item, |item, ()| Some(item(random))).collect()
}

pub(crate) fn written(items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for item in items {
        match item {
            Item::Event(event) => writer.write_event(event).unwrap(),
            item => writer.write(item).unwrap(),
        }
    }
    writer.finish().unwrap()
}

#[test]
fn random_items_are_read_back() {
    for seed in 1..=30 {
        let items = items(&mut Random::new(seed), 3_000);
        let file = written(&items);
        let (read, end) = items_of(Cursor::new(file)).unwrap();
        assert_eq!(end, End::Complete);
        assert_eq!(read.len(), items.len());
        for (read, item) in read.iter().zip(&items) {
            assert_eq!(read, item, "seed {seed}");
        }
    }
}

/// Whatever comes before them, and wherever a record ends.
#[test]
fn each_flush_makes_a_record_that_can_be_read_by_itself() {
    let items = items(&mut Random::new(7), 500);
    let mut writer = Writer::new(Vec::new()).unwrap();
    for item in &items {
        writer.write(item).unwrap();
        writer.flush().unwrap();
    }
    assert_eq!(writer.written().records, 500);
    let (read, end) = items_of(Cursor::new(writer.finish().unwrap())).unwrap();
    assert_eq!((read, end), (items, End::Complete));
}

#[test]
fn an_item_that_is_too_long_is_left_out_and_counted() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    let arguments = vec!["x".repeat(10_000); 1_000];
    let long = Item::Process(Process { arguments, ..Process::default() });
    let short = Item::Missed(1);
    for item in [&short, &long, &short] {
        writer.write(item).unwrap();
    }
    assert_eq!((writer.written().items, writer.written().left_out), (2, 1));
    let (read, _) = items_of(Cursor::new(writer.finish().unwrap())).unwrap();
    assert_eq!(read, [short.clone(), short]);
}

/// What a training loop does, about: blocks of a few sizes, by some threads, in a few places.
#[test]
fn an_event_takes_less_than_twelve_bytes() {
    const EVENTS: u64 = 200_000;
    let mut random = Random::new(3);
    let mut writer = Writer::new(Vec::new()).unwrap();
    let (mut live, mut ticks) = (Vec::new(), 1 << 40);
    for number in 1..=EVENTS {
        ticks += 500 + random.below(4_000);
        let kind = if live.len() > 100 || !live.is_empty() && random.is(2) {
            EventKind::Free { key: live.swap_remove(random.index(live.len())), block: None }
        } else {
            let key = Key::from_raw(0x7f12_3400_0000 + random.below(1 << 20) * 512);
            let bytes = Bytes::new([512, 4_096, 1 << 20, 37_748_736][random.index(4)] * (1 + random.below(16)));
            let device = Device { family: Family::Cuda, ordinal: 0 };
            let stack = StackId(u32::try_from(random.below(40)).unwrap());
            live.push(key);
            EventKind::Alloc { key, block: Block { device, bytes, kind: MemKind::Pool, context: 1, stack } }
        };
        let thread = ThreadId(1 + u32::try_from(random.below(16)).unwrap());
        writer.write_event(&RecordedEvent { number, ticks, time: Duration::ZERO, thread, kind }).unwrap();
    }
    writer.flush().unwrap();
    let bytes = writer.written().bytes;
    assert!(bytes < 12 * EVENTS, "{bytes} bytes for {EVENTS} events");
}

/// A reader knows when a text is not the program's.
#[test]
fn texts_that_are_cut_end_in_a_mark_and_are_counted() {
    let name = |length: usize| "△".repeat(length / 3) + &"x".repeat(length % 3);
    let longest = 1 << 14;
    for (length, is_cut) in [(longest - 1, false), (longest, false), (longest + 1, true), (3 * longest, true)] {
        let callsite = CallsiteDefinition {
            id: CallsiteId(2),
            name: Some(name(length)),
            file: "a.rs".to_owned(),
            line: 1,
            column: 1,
            module_path: None,
        };
        let mut writer = Writer::new(Vec::new()).unwrap();
        writer.write(&Item::Callsite(callsite)).unwrap();
        let file = writer.finish().unwrap();
        let mut reader = Reader::new(Cursor::new(&file)).unwrap();
        reader.replay(|_| {}).unwrap();
        let read = reader.definitions().callsite(CallsiteId(2)).name.unwrap();
        assert_eq!(reader.skipped().cut_texts, u64::from(is_cut), "{length}");
        assert_eq!(reader.skipped().is_nothing(), !is_cut);
        let text = read.strip_suffix("… (cut)");
        assert_eq!(text.is_some(), is_cut, "{length}");
        assert!(name(length).starts_with(text.unwrap_or(&read)) && read.len() <= longest, "{length}");
        assert!(is_cut || read.len() == length);
    }
}
