//! Generates random items of all kinds. Ids are often equal, and event numbers increase, so that a reader accepts most items.

use std::time::Duration;

use crate::{
    AllocatorAction, AllocatorContradiction, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents,
    AllocatorFigures, AllocatorSettings, BlockLabel, CallsiteDefinition, ClockPair, CodeAddress, ContextDefinition,
    DeviceDefinition, DevicePeak, Finished, Interception, Item, ModuleDefinition, PartDefinition, PoolBlock,
    PoolDefinition, Process, ProcessEnd, RecordedEvent, RingDefinition, StackDefinition, Symbol, SymbolsDefinition,
    TensorClass, TensorGroup, TensorHolder, ThreadDefinition, Totals, Waiting, Writer,
};
use gpumem_core::model::{
    Block, Bytes, CallsiteId, Counted, Device, EventKind, Family, Gauge, GpuMemory, Key, Label, MemKind, PoolId,
    ScopeId, ScopeSpec, Source, StackId, ThreadId, ThreadName, Threads,
};

use super::Random;

/// A type with random values.
pub(super) trait Any: Sized {
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

/// The fields of each variant. All variants are equally frequent.
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

values! {
    bool as random => random.is(2);
    u8 as random => (random.any() & 0xff) as u8;
    CallsiteId as random => CallsiteId(random.few());
    ScopeId as random => ScopeId(random.few().into());
    StackId as random => StackId(random.few());
    ThreadId as random => ThreadId(random.few());
    Device as random => Device { family: Any::any(random), ordinal: random.few() };
    u32 as random => random.small();
    u64 as random => random.any();
    usize as random => usize::try_from(random.any()).unwrap_or(7);
    String as random => random.text();
    Duration as random => Duration::from_nanos(random.any());
    Bytes as random => Bytes::new(random.any());
    Key as random => Key::from_raw(if random.is(4) { random.any() } else { random.below(40) << 20 });
    MemKind as random => MemKind::ALL[random.index(MemKind::ALL.len())];
    GpuMemory as random => GpuMemory::new(Any::any(random), Any::any(random), Any::any(random), Any::any(random));
    AllocatorEvents as random => AllocatorEvents {
        device: Any::any(random),
        events: (0..random.below(50)).map(|_| Any::any(random)).collect(),
    };
    AllocatorEvent as random => {
        // A reader rejects the whole list if one block or one stack id is too large.
        let [bytes, requested] = [(); 2].map(|()| Bytes::new(random.any() >> 20));
        AllocatorEvent {
            time: Any::any(random),
            action: Any::any(random),
            address: random.below(30) << 20,
            bytes,
            requested,
            stream: random.any(),
            stack: StackId(random.small() % 8),
            group: random.few(),
        }
    };
    ThreadName as random => ThreadName::new(random.text().as_bytes());
}

variants! { Family { Cuda {} Simulated {} Custom {} } }
variants! { Threads { Unscoped {} Named { 0 } } }
variants! { Counted { AllThreads {} OwnAndUnscoped {} Own {} Task {} } }
variants! { Gauge { Exact {} Sampled {} Off {} } }
variants! { Source { Dispatch {} Cupti {} Simulation {} Sampling {} Custom {} Off {} } }
variants! { TensorClass { Weights {} Activations {} Workspace {} } }
variants! { AllocatorAction { SegmentAlloc {} SegmentFree {} Alloc {} FreeRequested {} FreeCompleted {} OutOfMemory {} } }

structs! {
    PoolId { 0 }
    PoolDefinition { pool, name }
    PoolBlock { number, pool }
    Block { device, bytes, kind, context, stack }
    ScopeSpec { device, gauge, every, counts, callsite, source, at_peak }
    Label { name, shape, dtype }
    Process { pid, executable, arguments, folder, own_module, began, version, ran_before, cards, host, rank }
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
    PartDefinition { is_peaks, after }
    AllocatorDefinition { name, missing, devices, missing_modules, settings, contradictions }
    AllocatorContradiction { device, words }
    AllocatorSettings { is_expandable, max_split, divisions }
    AllocatorDevice { device, older, known_from, said }
    AllocatorFigures { allocated, allocated_high, reserved, reserved_high }
    TensorGroup { id, module, class }
    TensorHolder { device, address, holder }
    RingDefinition { segment, recording }
    Finished { ended }
    ProcessEnd { latest, within }
    Totals { allocations, frees, refused, obtained, lost, peaks, waiting, driver_peaks }
    DevicePeak { device, bytes, time }
    Waiting { thread, device, bytes, kind, since }
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
        ResetSummary {}
        Lost { count }
        Displaced { now, more }
        Refused { device, bytes, kind, stack }
        Mark { callsite }
        OnStream { frees, stream }
        Adopt { scope, threads }
        Named { name }
    }
}

// All items except events, which are more frequent.
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
        Missed { 0 }
        Part { 0 }
        Allocator { 0 }
        AllocatorEvents { 0 }
        TensorGroup { 0 }
        TensorHolder { 0 }
        Pool { 0 }
        Ring { 0 }
        Finished { 0 }
        Totals { 0 }
        Inside { 0 }
    }
}

/// Returns items of all kinds, with increasing event numbers.
pub fn items(random: &mut Random, count: usize) -> Vec<Item> {
    let mut number = 0_u64;
    let item = |random: &mut Random| match random.below(10) {
        0 => Any::any(random),
        2 if random.is(4) => Item::AllocatorEvents(Any::any(random)),
        _ => {
            number += if random.is(20) { 1 + random.below(1 << 40) } else { 1 };
            Item::Event(RecordedEvent {
                number,
                ticks: random.any(),
                time: Any::any(random),
                thread: Any::any(random),
                // Most events are allocations and frees.
                kind: match random.below(3) {
                    0 => EventKind::Alloc { key: Any::any(random), block: Any::any(random) },
                    1 => EventKind::Free { key: Any::any(random), block: None },
                    _ => Any::any(random),
                },
            })
        }
    };
    std::iter::repeat_with(|| ()).take(count).scan(item, |item, ()| Some(item(random))).collect()
}

/// Returns a recording of these items.
///
/// # Panics
/// Panics if an item cannot be written.
pub fn written(items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for item in items {
        match item {
            Item::Event(event) => writer.write_event(event).unwrap(),
            item => writer.write(item).unwrap(),
        }
    }
    writer.finish().unwrap()
}
