//! Writes and reads events in a file. There may be millions of allocations and frees, so they have their own form: a byte of
//! flags marks the values that equal the previous event's. All other events are rare and are written without flags.

use std::{collections::HashMap, time::Duration};

use super::{
    bytes::{Input, Malformed, Result, put_difference, put_number},
    wire::{Wire, nanoseconds},
};
use gpumem_core::model::{
    Block, Bytes, CallsiteId, Device, DriverGauge, EventKind, Gauge, GpuMemory, Key, MemKind, PoolId, ScopeId,
    ScopeSpec, StackId, ThreadId, ThreadName, Threads, Time,
};

/// An event as recorded by the inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedEvent {
    /// The number, which increases with each event. A gap means that events were not recorded.
    pub number: u64,
    /// The time by the counter of the processor; [`ClockPair`](super::ClockPair) gives its meaning.
    pub ticks: u64,
    /// The time that the ledger uses for the event. It is earlier than the event itself if the clock was not read for this
    /// event.
    pub time: Time,
    /// The thread that posted the event.
    pub thread: ThreadId,
    /// The kind of the event.
    pub kind: EventKind,
}

/// The first byte of an allocation or a free.
mod flag {
    pub(super) const SHORT: u8 = 0x80;
    pub(super) const FREE: u8 = 0x40;
    /// The thread differs from the previous event's.
    pub(super) const THREAD: u8 = 0x20;
    /// There is a gap in the event numbers.
    pub(super) const GAP: u8 = 0x10;
    /// The ledger's time differs from the previous event's.
    pub(super) const TIME: u8 = 0x08;
    /// The difference of keys is in bytes, not in steps of 256.
    pub(super) const FINE: u8 = 0x04;
    /// An allocation has the size of the previous allocation.
    pub(super) const SAME_BYTES: u8 = 0x02;
    /// The source described the block of a free.
    pub(super) const WITH_BLOCK: u8 = 0x02;
    /// An allocation has the device, kind, context and stack of the previous allocation.
    pub(super) const SAME_SORT: u8 = 0x01;
    /// A free has the key of the previous event.
    pub(super) const SAME_KEY: u8 = 0x01;
}

/// Returns whether an item that starts with this byte is an allocation or a free.
pub(super) const fn is_short(first: u8) -> bool {
    first & flag::SHORT != 0
}

const STEP: u64 = 256;

/// Returns the block without its size, which is equal for all blocks of one sort.
fn sort_of(block: &Block) -> Block {
    Block { bytes: Bytes::ZERO, ..*block }
}

/// The values of the previous event. Each record starts with new ones, so that it can be read on its own.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    number: u64,
    ticks: u64,
    time: u64,
    thread: u32,
    key: u64,
    bytes: u64,
    sort: usize,
}

/// Writes the events of one record.
#[derive(Debug, Default)]
pub(super) struct EventWriter {
    before: Before,
    sorts: HashMap<(Device, u8, u8, u32), usize>,
}

/// Reads the events of one record.
#[derive(Debug, Default)]
pub(super) struct EventReader {
    before: Before,
    sorts: Vec<Block>,
}

impl EventWriter {
    /// Starts a record with the next event.
    pub(super) fn start_record(&mut self) {
        self.before = Before::default();
        self.sorts.clear();
    }

    /// Writes an allocation or a free. Returns false if it is neither.
    pub(super) fn put_short(&mut self, event: &RecordedEvent, to: &mut Vec<u8>) -> bool {
        let (key, block) = match &event.kind {
            EventKind::Alloc { key, block } => (key.get(), Some(block)),
            EventKind::Free { key, block } => (key.get(), block.as_ref()),
            _ => return false,
        };
        let at = to.len();
        let mut flags = flag::SHORT;
        to.push(0);
        let is_free = matches!(event.kind, EventKind::Free { .. });
        if is_free {
            flags |= flag::FREE;
        }
        if event.thread.0 != self.before.thread {
            flags |= flag::THREAD;
            put_number(to, event.thread.0.into());
        }
        let gap = event.number.wrapping_sub(self.before.number).wrapping_sub(1);
        if gap != 0 {
            flags |= flag::GAP;
            put_number(to, gap);
        }
        put_difference(to, event.ticks, self.before.ticks);
        let time = nanoseconds(event.time);
        if time != self.before.time {
            flags |= flag::TIME;
            put_difference(to, time, self.before.time);
        }
        if is_free && key == self.before.key {
            flags |= flag::SAME_KEY;
        } else if (key | self.before.key).is_multiple_of(STEP) {
            put_difference(to, key / STEP, self.before.key / STEP);
        } else {
            flags |= flag::FINE;
            put_difference(to, key, self.before.key);
        }
        if is_free {
            if let Some(block) = block {
                flags |= flag::WITH_BLOCK;
                block.put(to);
            }
        } else if let Some(block) = block {
            flags |= self.put_block(block, to);
        }
        to[at] = flags;
        self.before = Before { key, ..self.after(event) };
        true
    }

    /// Writes the description of an allocated block.
    fn put_block(&mut self, block: &Block, to: &mut Vec<u8>) -> u8 {
        let mut flags = 0;
        let Block { device, bytes, kind, context, stack } = *block;
        let next = self.sorts.len();
        let sort = *self.sorts.entry((device, kind as u8, context, stack.0)).or_insert(next);
        if sort == next {
            put_number(to, sort as u64);
            sort_of(block).put(to);
        } else if sort == self.before.sort {
            flags |= flag::SAME_SORT;
        } else {
            put_number(to, sort as u64);
        }
        if bytes.get() == self.before.bytes {
            flags |= flag::SAME_BYTES;
        } else {
            put_number(to, bytes.get());
        }
        (self.before.sort, self.before.bytes) = (sort, bytes.get());
        flags
    }

    fn after(&self, event: &RecordedEvent) -> Before {
        let RecordedEvent { number, ticks, time, thread, .. } = *event;
        Before { number, ticks, time: nanoseconds(time), thread: thread.0, ..self.before }
    }

    /// Writes any other event.
    pub(super) fn put_plain(&mut self, event: &RecordedEvent, to: &mut Vec<u8>) {
        event.thread.put(to);
        put_number(to, event.number.wrapping_sub(self.before.number).wrapping_sub(1));
        put_difference(to, event.ticks, self.before.ticks);
        put_difference(to, nanoseconds(event.time), self.before.time);
        event.kind.put(to);
        self.before = self.after(event);
    }
}

impl EventReader {
    pub(super) fn start_record(&mut self) {
        self.before = Before::default();
        self.sorts.clear();
    }

    /// Reads an allocation or a free that starts with this byte.
    pub(super) fn get_short(&mut self, flags: u8, from: &mut Input<'_>) -> Result<RecordedEvent> {
        let Self { before, sorts } = self;
        let is = |flag: u8| flags & flag != 0;
        if is(flag::THREAD) {
            before.thread = from.small()?;
        }
        before.next(if is(flag::GAP) { from.number()? } else { 0 })?;
        before.ticks = from.difference(before.ticks)?;
        if is(flag::TIME) {
            before.time = from.difference(before.time)?;
        }
        if is(flag::FREE) && is(flag::SAME_KEY) {
        } else if is(flag::FINE) {
            before.key = from.difference(before.key)?;
        } else {
            before.key = from.difference(before.key / STEP)?.wrapping_mul(STEP);
        }
        let key = Key::from_raw(before.key);
        let kind = if is(flag::FREE) {
            let block = if is(flag::WITH_BLOCK) { Some(Block::get(from)?) } else { None };
            EventKind::Free { key, block }
        } else {
            if !is(flag::SAME_SORT) {
                before.sort = usize::get(from)?;
                if before.sort == sorts.len() {
                    sorts.push(Block::get(from)?);
                }
            }
            let sort = sorts.get(before.sort).ok_or(Malformed("a block is of a sort that was not defined"))?;
            if !is(flag::SAME_BYTES) {
                before.bytes = from.number()?;
            }
            EventKind::Alloc { key, block: Block { bytes: Bytes::new(before.bytes), ..*sort } }
        };
        Ok(before.event(kind))
    }

    /// Reads any other event. Returns `None` if nothing needs it.
    pub(super) fn get_plain(&mut self, from: &mut Input<'_>) -> Result<Option<RecordedEvent>> {
        let Self { before, .. } = self;
        before.thread = from.small()?;
        before.next(from.number()?)?;
        before.ticks = from.difference(before.ticks)?;
        before.time = from.difference(before.time)?;
        // Earlier versions recorded on which stream a thread allocates or frees.
        if from.starts_with(ON_STREAM) { Ok(None) } else { EventKind::get(from).map(|kind| Some(before.event(kind))) }
    }
}

impl Before {
    fn next(&mut self, gap: u64) -> Result<()> {
        let next = self.number.checked_add(gap).and_then(|number| number.checked_add(1));
        self.number = next.ok_or(Malformed("the number of an event is above 2^64"))?;
        Ok(())
    }

    const fn event(&self, kind: EventKind) -> RecordedEvent {
        let Self { number, ticks, time, thread, .. } = *self;
        RecordedEvent { number, ticks, time: Duration::from_nanos(time), thread: ThreadId(thread), kind }
    }
}

/// The code of each kind of event, and its fields. Allocations and frees have another form.
macro_rules! events {
    ($($variant:ident = $code:literal { $($field:ident: $type:ty),* })*) => {
        impl Wire for EventKind {
            fn put(&self, to: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        to.push($code);
                        $(<$type as Wire>::put($field, to);)*
                    })*
                }
            }

            fn get(from: &mut Input<'_>) -> Result<Self> {
                match from.byte()? {
                    $($code => Ok(Self::$variant { $($field: <$type as Wire>::get(from)?),* }),)*
                    _ => Err(Malformed("a number matches no event")),
                }
            }
        }

        /// All kinds are equally frequent.
        #[cfg(any(test, feature = "testing"))]
        impl crate::testing::Any for EventKind {
            #[allow(unused_variables, reason = "some kinds have no fields")]
            fn any(random: &mut crate::testing::Random) -> Self {
                use crate::testing::{Any, Random};

                let all: &[fn(&mut Random) -> Self] = &[$(|random| Self::$variant { $($field: Any::any(random)),* }),*];
                all[random.index(all.len())](random)
            }
        }
    };
}

const ON_STREAM: u8 = 24;

events! {
    Alloc = 1 { key: Key, block: Block }
    Free = 2 { key: Key, block: Option<Block> }
    LateLookup = 3 { block: Block }
    Untracked = 4 {}
    FreeFailed = 5 {}
    Shrink = 6 { key: Key, bytes: Bytes }
    ContextDestroyed = 7 { context: u8 }
    Sample = 8 { device: Device, memory: GpuMemory }
    ReadFailed = 10 { device: Device, gauge: Gauge }
    Open = 11 { scope: ScopeId, spec: ScopeSpec }
    Enter = 12 { scope: ScopeId }
    Leave = 13 { scope: ScopeId }
    Read = 14 { scope: ScopeId }
    Reset = 15 { scope: ScopeId }
    ResetKeepingPeak = 16 { scope: ScopeId }
    Close = 17 { scope: ScopeId }
    ResetPeaks = 18 { device: Device }
    Lost = 19 { count: u64 }
    Displaced = 20 { now: u64, more: u64 }
    Rejected = 22 { device: Option<Device>, bytes: Bytes, kind: MemKind, stack: StackId }
    Mark = 23 { callsite: CallsiteId }
    Adopt = 25 { scope: ScopeId, threads: Threads }
    Named = 26 { name: ThreadName }
    PoolRegistered = 27 { pool: PoolId, device: Device }
    PoolReserved = 28 { pool: PoolId, bytes: Bytes }
    PoolEmptied = 29 { pool: PoolId }
    PoolsQueried = 30 {}
    ResetSummary = 31 {}
    DriverMeasured = 32 { device: Device, by: DriverGauge }
    RealBlocks = 33 { largest: Bytes }
    UnknownValue = 34 { bytes: Bytes, stack: StackId }
}
