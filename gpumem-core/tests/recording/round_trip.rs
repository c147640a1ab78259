//! What is written is read back.

use std::{io::Cursor, time::Duration};

use gpumem_core::{
    derive::Names,
    model::{
        Block, Bytes, CallsiteId, Counted, Device, EventKind, Family, Gauge, GpuMemory, GpuProcess, Key, Label,
        MemKind, PoolId, PoolUsage, ProcessKind, ScopeId, ScopeSpec, Source, StackId, ThreadId, ThreadName, Threads,
    },
    recording::{
        AllocatorAction, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents, AllocatorFigures,
        AllocatorSettings, BlockLabel, CallsiteDefinition, ClockPair, CodeAddress, ContextDefinition, DeviceDefinition,
        End, Finished, Interception, Item, ModuleDefinition, PartDefinition, PoolDefinition, Process, Reader,
        RecordedEvent, Request, RingDefinition, StackDefinition, Symbol, SymbolsDefinition, TensorClass, TensorGroup,
        TensorHolder, ThreadDefinition, Writer, items_of,
    },
    report::DeviceReading,
};

use crate::Random;

/// A type of which a random value can be made.
trait Any: Sized {
    fn any(random: &mut Random) -> Self;
}

macro_rules! values {
    ($($type:ty as $random:ident => $value:expr;)*) => {$(
        impl Any for $type {
            fn any($random: &mut Random) -> Self {
                $value
            }
        }
    )*};
}

macro_rules! structs {
    ($($type:ident { $($field:tt),* })*) => {$(
        impl Any for $type {
            fn any(random: &mut Random) -> Self {
                Self { $($field: Any::any(random)),* }
            }
        }
    )*};
}

/// The fields of each variant. Each variant comes equally often.
macro_rules! variants {
    ($type:ident { $($variant:ident { $($field:tt),* })* }) => {
        impl Any for $type {
            #[allow(unused_variables, reason = "some variants have no fields")]
            fn any(random: &mut Random) -> Self {
                let all: &[fn(&mut Random) -> Self] = &[$(|random| Self::$variant { $($field: Any::any(random)),* }),*];
                all[random.index(all.len())](random)
            }
        }
    };
}

impl<T: Any> Any for Option<T> {
    fn any(random: &mut Random) -> Self {
        random.option(T::any)
    }
}

impl<T: Any> Any for Vec<T> {
    fn any(random: &mut Random) -> Self {
        random.list(T::any)
    }
}

impl<T: Any> Any for Result<T, String> {
    fn any(random: &mut Random) -> Self {
        if random.is(2) { Ok(T::any(random)) } else { Err(random.text()) }
    }
}

values! {
    bool as random => random.is(2);
    u8 as random => (random.next() & 0xff) as u8;
    u32 as random => random.small();
    u64 as random => random.any();
    usize as random => usize::try_from(random.any()).unwrap_or(7);
    String as random => random.text();
    Duration as random => Duration::from_nanos(random.any());
    Bytes as random => Bytes::new(random.any());
    Key as random => Key::from_raw(random.any());
    MemKind as random => MemKind::ALL[random.index(MemKind::ALL.len())];
    GpuMemory as random => GpuMemory::new(Any::any(random), Any::any(random), Any::any(random), Any::any(random));
    GpuProcess as random => {
        let mut process = GpuProcess::new(Any::any(random), Any::any(random));
        (process.name, process.used) = (Any::any(random), Any::any(random));
        process
    };
    Finished as _random => Finished;
    ThreadName as random => ThreadName::new(random.text().as_bytes());
}

variants! { Family { Cuda {} Simulated {} Custom {} } }
variants! { Threads { Unscoped {} Named { 0 } } }
variants! { Counted { Process {} Thread { 0 } Task {} } }
variants! { Gauge { Exact {} Sampled {} Off {} } }
variants! { Source { Dispatch {} Cupti {} Simulation {} Sampling {} Custom {} Off {} } }
variants! { ProcessKind { Compute {} Graphics {} Both {} } }
variants! { TensorClass { Weights {} Activations {} Workspace {} } }
variants! { AllocatorAction { SegmentAlloc {} Alloc {} OutOfMemory {} } }

structs! {
    CallsiteId { 0 }
    PoolId { 0 }
    PoolDefinition { pool, name }
    ScopeId { 0 }
    StackId { 0 }
    ThreadId { 0 }
    Device { family, ordinal }
    Block { device, bytes, kind, context, stack }
    PoolUsage { pool, used, used_high, reserved, reserved_high }
    ScopeSpec { device, gauge, every, counts, callsite, source, at_peak }
    Label { name, shape, dtype }
    Process { pid, executable, arguments, folder, own_module, began, version, ran_before, cards }
    ClockPair { ticks, time }
    ThreadDefinition { thread, os_id, name }
    CallsiteDefinition { id, name, file, line, column, module_path }
    ModuleDefinition { id, path, build_id, base }
    CodeAddress { module, offset }
    StackDefinition { id, addresses }
    Symbol { function, file, line, column }
    SymbolsDefinition { address, symbols }
    DeviceDefinition { device, name, total, uuid }
    ContextDefinition { context, device }
    Interception { source, library }
    BlockLabel { key, number, label }
    DeviceReading { device, name, memory, processes, pool }
    PartDefinition { is_peaks, after }
    AllocatorDefinition { name, missing, devices, missing_modules, settings }
    AllocatorSettings { is_expandable, max_split, divisions }
    AllocatorDevice { device, older, known_from, said }
    AllocatorFigures { allocated, allocated_high, reserved, reserved_high }
    AllocatorEvents { device, events }
    AllocatorEvent { time, action, address, bytes, requested, stream, stack, group }
    TensorGroup { id, module, class }
    TensorHolder { device, address, holder }
    RingDefinition { segment, recording }
}

variants! {
    EventKind {
        Alloc { key, block }
        Free { key, block }
        LateLookup { block }
        Untracked {}
        FreeFailed {}
        Shrink { key, bytes }
        ContextDestroyed { context }
        Sample { device, memory }
        ReadFailed { device, gauge }
        Open { scope, spec }
        Enter { scope }
        Leave { scope }
        Read { scope }
        Reset { scope }
        ResetKeepingPeak { scope }
        Close { scope }
        ResetPeaks { device }
        Lost { count }
        Displaced { now, more }
        Refused { device, bytes, kind, stack }
        Mark { callsite }
        OnStream { frees, stream }
        Adopt { scope, threads }
        Named { name }
    }
}

variants! {
    Request {
        Report { scope, ctx, subctx, lines }
        Line { scope, number, source }
        Summary { not_intercepted }
        Breakdown { 0 }
        MemoryStats { device, intercepted_by, since, pool }
        LiveBlocks { scope }
        Leaks { is_intercepted }
        Peaks { is_intercepted }
        PeakHolders { scope }
        TrackerStarted { tracker, device }
        Tracked { tracker, time, file, line, column, ctx, used, is_intercepted }
        TrackerEnded { tracker }
        Refused { refusal, device, requested, kind, stack, path }
        OutOfMemory { refusal, reading }
    }
}

// Without events and requests, which come more often.
variants! {
    Item {
        Process { 0 }
        Clock { 0 }
        Thread { 0 }
        Callsite { 0 }
        Module { 0 }
        Stack { 0 }
        Symbols { 0 }
        Device { 0 }
        Context { 0 }
        Interception { 0 }
        Label { 0 }
        ThreadReused { 0 }
        PeakReleased { 0 }
        Missed { 0 }
        Part { 0 }
        Allocator { 0 }
        AllocatorEvents { 0 }
        TensorGroup { 0 }
        TensorHolder { 0 }
        Pool { 0 }
        Ring { 0 }
        Finished { 0 }
    }
}

/// Items of all sorts, with numbers of events that rise.
pub(crate) fn items(random: &mut Random, count: usize) -> Vec<Item> {
    let mut number = 0_u64;
    let item = |random: &mut Random| match random.below(10) {
        0 => Any::any(random),
        1 => Item::Request(Any::any(random)),
        _ => {
            number += if random.is(20) { 1 + random.below(1 << 40) } else { 1 };
            Item::Event(RecordedEvent {
                number,
                ticks: random.any(),
                time: Any::any(random),
                thread: Any::any(random),
                kind: Any::any(random),
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
