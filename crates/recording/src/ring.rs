//! A ring of fixed size that never blocks. It passes events from the threads of a program to the thread that writes the
//! recording.
//!
//! The writing side belongs to the inbox, which fills the ring under its lock. An allocation or a free takes one slot, which is
//! one cache line, so that an event writes as few lines as possible. Everything else is rare and takes as many slots as its bytes
//! need. Items that do not fit are counted, and the count becomes the next item in the ring.
//!
//! The memory of the ring can outlive the program. If the program is killed, the memory remains, and [`RingReader::from_bytes`]
//! reads its content. A slot is released only after its event is in the recording, so every event is in the recording, in the
//! ring, or in both.
//!
//! Another process of the user may change that memory. Then the recording is wrong, but neither side waits, panics, or reads
//! outside the memory.
//!
//! The slots are followed by space for definitions. A thread that sees a stack for the first time writes its definition there
//! before the event. The thread that writes the recording also defines the stack, but only when it reaches that event.

use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release},
    },
    time::Duration,
};

use super::{
    bytes::Input,
    event::{EventReader, EventWriter, RecordedEvent},
    item::{self, Item},
    wire::nanoseconds,
};
use gpumem_core::model::{Block, Bytes, Event, EventKind, Key, MemKind, Tag, ThreadId};

const WORDS: usize = 8;
const BYTES: usize = 8 * WORDS;

/// A cache line of a ring.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Line(pub [AtomicU64; WORDS]);

/// The memory of a ring. A clone refers to the same memory.
pub trait RingMemory: Clone + Debug {
    /// Returns the lines, which are initially 0. Their number comes from [`lines_for`].
    fn lines(&self) -> &[Line];
}

impl RingMemory for Arc<[Line]> {
    fn lines(&self) -> &[Line] {
        self
    }
}

/// Returns the number of lines of memory for a ring of at least `slots` slots, with half as many lines for definitions.
pub const fn lines_for(slots: usize) -> usize {
    let slots = slots.next_power_of_two();
    HEADER + slots + slots / 2
}

/// Returns the number of slots in memory of this many lines; `None` if this is not the memory of a ring.
fn slots_of(lines: usize) -> Option<usize> {
    let lines = lines.checked_sub(HEADER)?;
    let slots = lines / 3 * 2;
    (lines.is_multiple_of(3) && slots.is_power_of_two()).then_some(slots)
}

/// Memory on the heap.
pub fn on_the_heap(slots: usize) -> Arc<[Line]> {
    (0..lines_for(slots)).map(|_| Line::default()).collect()
}

/// The first word, in memory that outlives the program.
const MAGIC: u64 = u64::from_le_bytes(*b"gpumring");

/// The contents of the lines before the slots. The two sides write to different lines, because adjacent lines are often fetched
/// together.
mod line {
    /// The words are magic, version, the index of the later of the two states, and the id of the recording.
    pub(super) const ABOUT: usize = 0;
    /// The length of the recording, and the number of slots that are in it. There are two such states, so that a single store
    /// switches from one to the other.
    pub(super) const STATES: [usize; 2] = [1, 2];
    /// The number of words of definitions.
    pub(super) const DEFINED: usize = 3;
    /// The number of slots that were ever filled, and the number of items that did not fit since their count was last put into
    /// the ring.
    pub(super) const HEAD: usize = 4;
    /// The number of slots that were ever released.
    pub(super) const TAIL: usize = 6;
}
const HEADER: usize = 8;

/// The version of the layout of this memory.
const VERSION: u64 = 1;

/// The values of the lowest byte of an item's first word.
const ALLOC: u64 = 1;
const FREE: u64 = 2;
const MISSED: u64 = 3;
const OTHER: u64 = 4;

#[derive(Clone, Debug)]
struct Ring<M> {
    memory: M,
    /// The number of slots minus 1. The number of slots is a power of two.
    mask: u64,
}

impl<M: RingMemory> Ring<M> {
    #[inline]
    fn slot_line(&self, at: u64) -> &Line {
        #[expect(clippy::cast_possible_truncation, reason = "the mask leaves less than there are slots")]
        &self.memory.lines()[HEADER + (at & self.mask) as usize]
    }

    #[inline]
    fn slot(&self, at: u64) -> &[AtomicU64; WORDS] {
        &self.slot_line(at).0
    }

    #[inline]
    fn line(&self, number: usize) -> &[AtomicU64; WORDS] {
        &self.memory.lines()[number].0
    }

    #[inline]
    fn head(&self) -> &AtomicU64 {
        &self.line(line::HEAD)[0]
    }

    fn missed(&self) -> &AtomicU64 {
        &self.line(line::HEAD)[1]
    }

    #[inline]
    fn tail(&self) -> &AtomicU64 {
        &self.line(line::TAIL)[0]
    }

    fn latest_state(&self) -> &AtomicU64 {
        &self.line(line::ABOUT)[2]
    }

    fn defined(&self) -> &AtomicU64 {
        &self.line(line::DEFINED)[0]
    }

    /// Returns the words for definitions.
    fn definitions(&self) -> impl Iterator<Item = &AtomicU64> {
        let slots = usize::try_from(self.mask).map_or(usize::MAX, |mask| mask + 1);
        self.memory.lines().get(HEADER + slots..).unwrap_or_default().iter().flat_map(|line| &line.0)
    }
}

/// The side of the ring that the inbox fills. All fields that each event uses are in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RingWriter<M = Arc<[Line]>> {
    ring: Ring<M>,
    head: u64,
    /// The number of slots that the other side had released when this side last checked.
    tail: u64,
    missed: u64,
    events: EventWriter,
    scratch: Vec<u8>,
    bytes: Vec<u8>,
}

/// The side that the writing thread empties.
#[derive(Debug)]
pub struct RingReader<M = Arc<[Line]>> {
    ring: Ring<M>,
    head: u64,
    /// The next slot to read.
    next: u64,
    /// The number of slots that were ever released.
    tail: u64,
    events: EventReader,
    bytes: Vec<u8>,
}

/// The side that writes the definition of each stack before its first event.
#[derive(Debug)]
pub struct RingDefinitions<M = Arc<[Line]>> {
    ring: Ring<M>,
    /// The number of words that were written.
    written: usize,
    events: EventWriter,
    scratch: Vec<u8>,
    bytes: Vec<u8>,
}

/// The content of the ring of a killed program.
#[derive(Debug)]
pub struct RingContent<I> {
    /// The length of the recording when slots were last released.
    pub recorded: u64,
    /// The definitions of stacks, modules and addresses. Some may be in the recording as well.
    pub definitions: Vec<Item>,
    /// The items after the recording.
    pub items: I,
}

/// Instead of a length: the whole file counts. Set while another file replaces the recording.
pub const WHOLE_FILE: u64 = u64::MAX;

/// Creates a ring in this memory, for the recording with the id `recording`, which has `recorded` bytes. An allocation or a free
/// takes one slot.
///
/// # Panics
/// Panics if the number of lines of the memory is not a result of [`lines_for`].
pub fn ring<M: RingMemory>(memory: M, recording: u64, recorded: u64) -> (RingWriter<M>, RingReader<M>) {
    let lines = memory.lines().len();
    let slots = slots_of(lines).unwrap_or_else(|| panic!("{lines} lines are not the memory of a ring"));
    let ring = Ring { memory, mask: slots as u64 - 1 };
    let about = ring.line(line::ABOUT);
    for (word, value) in about.iter().zip([MAGIC, VERSION, 0, recording]) {
        word.store(value, Relaxed);
    }
    ring.line(line::STATES[0])[0].store(recorded, Relaxed);
    let writer = RingWriter {
        ring: ring.clone(),
        head: 0,
        tail: 0,
        missed: 0,
        events: EventWriter::default(),
        scratch: Vec::with_capacity(1 << 10),
        bytes: Vec::with_capacity(1 << 10),
    };
    (writer, RingReader::new(ring, 0, 0))
}

impl<M: RingMemory> RingDefinitions<M> {
    /// Adds all of these definitions, or none. Returns `false` if they do not fit.
    pub fn add(&mut self, items: &[Item]) -> bool {
        self.bytes.clear();
        for item in items {
            self.events.start_record();
            item::put(item, &mut self.events, &mut self.scratch, &mut self.bytes);
        }
        let mut free = self.ring.definitions().skip(self.written);
        let words = 1 + self.bytes.len().div_ceil(8);
        if free.by_ref().take(words).count() < words {
            return false;
        }
        let words = [self.bytes.len() as u64].into_iter().chain(words_of(&self.bytes));
        for (to, word) in self.ring.definitions().skip(self.written).zip(words) {
            to.store(word, Relaxed);
            self.written += 1;
        }
        self.ring.defined().store(self.written as u64, Release);
        true
    }
}

/// Returns bytes as words; the last one is padded with 0.
fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    })
}

impl<M: RingMemory> RingWriter<M> {
    /// Returns the side that defines stacks. Must be called only once.
    pub fn definitions(&self) -> RingDefinitions<M> {
        RingDefinitions {
            ring: self.ring.clone(),
            written: 0,
            events: EventWriter::default(),
            scratch: Vec::new(),
            bytes: Vec::new(),
        }
    }

    /// Puts an event into the ring.
    ///
    /// This code runs after the driver's code, so fetching its instructions takes longer than running them. It is inlined into
    /// functions that pass a single kind of event, which leaves few instructions, next to each other.
    #[allow(clippy::inline_always, reason = "a call takes more lines of the instruction cache")]
    #[inline(always)]
    pub fn event(&mut self, event: &Event<'_>, ticks: u64) {
        let Event { number, time, thread, kind } = *event;
        let (first, key, block) = match *kind {
            EventKind::Alloc { key, block } => (ALLOC, key, [block.bytes.get(), block.tag().get()]),
            EventKind::Free { key, block: None } => (FREE, key, [0, 0]),
            kind => return self.item(&Item::Event(RecordedEvent { number, ticks, time, thread, kind })),
        };
        let first = first | u64::from(thread.0) << 8;
        // With a closure, the words are stored on the stack only if the ring is full.
        let words = || [first, number, ticks, nanoseconds(time), key.get(), block[0], block[1]];
        if self.missed == 0 && self.fits(1) { self.fill_slot(words()) } else { self.fill_slot_if_room(words()) }
    }

    #[inline]
    fn fill_slot(&mut self, words: [u64; 7]) {
        for (to, word) in self.ring.slot(self.head).iter().zip(words) {
            to.store(word, Relaxed);
        }
        self.publish(1);
    }

    #[cold]
    fn fill_slot_if_room(&mut self, words: [u64; 7]) {
        if self.make_room(1) { self.fill_slot(words) } else { self.miss() }
    }

    /// Returns the line that will be filled after this many others.
    #[inline]
    pub fn line_ahead(&self, slots: u64) -> &Line {
        self.ring.slot_line(self.head + slots)
    }

    /// Returns the number of items that did not fit since their count was last put into the ring.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    #[inline]
    fn publish(&mut self, slots: u64) {
        self.head += slots;
        self.ring.head().store(self.head, Release);
    }

    /// Counts an item that does not fit. The count is also in the ring's memory, in case the program is killed.
    #[cold]
    fn miss(&mut self) {
        self.missed += 1;
        self.ring.missed().store(self.missed, Relaxed);
    }

    #[inline]
    fn fits(&self, slots: u64) -> bool {
        // Another process may have changed the tail.
        (self.head + slots).wrapping_sub(self.tail) <= self.ring.mask + 1
    }

    fn has_room(&mut self, slots: u64) -> bool {
        self.fits(slots) || {
            self.tail = self.ring.tail().load(Acquire);
            self.fits(slots)
        }
    }

    /// Makes sure that an item of this many slots fits, and returns whether it does.
    fn make_room(&mut self, slots: u64) -> bool {
        (self.missed == 0 || self.say_missed()) && self.has_room(slots)
    }

    /// Puts the number of items that did not fit into the ring. Returns false if the number does not fit either.
    #[cold]
    fn say_missed(&mut self) -> bool {
        // The count waits until 64 slots are free. Otherwise almost every item would have its own count.
        if !self.has_room(64.min(self.ring.mask + 1)) {
            return false;
        }
        let [first, count, ..] = self.ring.slot(self.head);
        first.store(MISSED, Relaxed);
        count.store(std::mem::take(&mut self.missed), Relaxed);
        self.publish(1);
        self.ring.missed().store(0, Relaxed);
        true
    }

    /// Puts any item into the ring. The item must be much smaller than the ring.
    #[cold]
    pub fn item(&mut self, item: &Item) {
        self.bytes.clear();
        self.events.start_record();
        item::put(item, &mut self.events, &mut self.scratch, &mut self.bytes);
        let slots = (8 + self.bytes.len()).div_ceil(BYTES) as u64;
        if !self.make_room(slots) {
            return self.miss();
        }
        let first = OTHER | (self.bytes.len() as u64) << 8;
        for (at, word) in (0..).zip([first].into_iter().chain(words_of(&self.bytes))) {
            let slot = self.ring.slot(self.head + at / WORDS as u64);
            #[expect(clippy::cast_possible_truncation, reason = "it is below the number of words")]
            slot[at as usize % WORDS].store(word, Relaxed);
        }
        self.publish(slots);
    }
}

impl<M: RingMemory> RingReader<M> {
    fn new(ring: Ring<M>, tail: u64, head: u64) -> Self {
        Self { ring, head, next: tail, tail, events: EventReader::default(), bytes: Vec::new() }
    }

    /// Returns the number of slots that were read and are not released yet, and the number of slots of the ring.
    pub fn held(&self) -> (u64, u64) {
        (self.next - self.tail, self.ring.mask + 1)
    }

    /// Returns the memory of the ring.
    pub fn memory(&self) -> &M {
        &self.ring.memory
    }

    /// Returns the words of that memory.
    pub fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        self.ring.memory.lines().iter().flat_map(|line| &line.0)
    }

    /// Releases the slots that were read. Their items are in the recording, which now has `recorded` bytes.
    pub fn release(&mut self, recorded: u64) {
        if self.next == self.tail {
            return;
        }
        self.tail = self.next;
        self.set_recorded(recorded);
        self.ring.tail().store(self.tail, Release);
    }

    /// Notes that the recording now has `recorded` bytes and contains all items of released slots. [`WHOLE_FILE`] means all bytes
    /// of any file.
    pub fn set_recorded(&mut self, recorded: u64) {
        let other = 1 - self.ring.latest_state().load(Relaxed) % 2;
        let [length, slots, ..] = self.ring.line(line::STATES[usize::from(other == 1)]);
        length.store(recorded, Relaxed);
        slots.store(self.tail, Relaxed);
        // One store replaces both length and slots, because the program may be killed at any moment.
        self.ring.latest_state().store(other, Release);
    }

    /// Returns an item of `length` bytes, and the number of its slots.
    fn other(&mut self, length: u64) -> (Item, u64) {
        let slots = length.saturating_add(8).div_ceil(BYTES as u64);
        if slots > self.head - self.next {
            // The memory is damaged.
            return (Item::Missed(1), self.head - self.next);
        }
        self.bytes.clear();
        let length = usize::try_from(length).unwrap_or(0);
        let words = (self.next..self.next + slots).flat_map(|at| self.ring.slot(at)).skip(1);
        self.bytes.extend(words.flat_map(|word| word.load(Relaxed).to_le_bytes()).take(length));
        self.events.start_record();
        let item = item::get(&mut self.events, &mut Input::new(&self.bytes));
        // This version wrote the item. If it cannot be read, the memory is damaged, and it counts as one missed item.
        (item.ok().flatten().unwrap_or(Item::Missed(1)), slots)
    }
}

impl RingReader {
    /// Returns the content of the ring of a killed program, from the bytes of its file. `None` if these are not the bytes of a
    /// ring.
    pub fn from_bytes(bytes: &[u8]) -> Option<RingContent<impl Iterator<Item = Item>>> {
        let Found { ring, recorded, tail, head, .. } = Found::of(bytes, bytes.len() / BYTES)?;
        let missed = ring.missed().load(Relaxed);
        let missed = (missed > 0).then_some(Item::Missed(missed));
        let definitions = definitions_in(&ring);
        let items = RingReader::new(ring, tail, head).take_while_in(head).chain(missed);
        Some(RingContent { recorded, definitions, items })
    }

    /// Returns the id of the recording that the ring in these bytes belongs to. `None` if [`from_bytes`](Self::from_bytes)
    /// returns `None`. Reads only the header.
    pub fn recording_in(bytes: &[u8]) -> Option<u64> {
        Found::of(bytes, HEADER).map(|found| found.recording)
    }

    /// Returns the items before this slot.
    fn take_while_in(mut self, head: u64) -> impl Iterator<Item = Item> {
        std::iter::from_fn(move || if self.next < head { self.next() } else { None })
    }
}

/// A ring whose first lines were read from bytes, with the data of its header.
struct Found {
    ring: Ring<Arc<[Line]>>,
    recording: u64,
    recorded: u64,
    tail: u64,
    head: u64,
}

impl Found {
    fn of(bytes: &[u8], lines: usize) -> Option<Self> {
        let line = |bytes: &[u8]| {
            let word = |at: usize| bytes[8 * at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            Line(std::array::from_fn(|at| AtomicU64::new(word(at))))
        };
        let slots = slots_of(bytes.len() / BYTES)?;
        let memory = bytes.chunks_exact(BYTES).take(lines).map(line).collect();
        let ring = Ring { memory, mask: slots as u64 - 1 };
        let [magic, version, latest, recording, ..] = ring.line(line::ABOUT).each_ref().map(|word| word.load(Relaxed));
        if magic != MAGIC || version != VERSION {
            return None;
        }
        let state = ring.line(line::STATES[usize::from(latest % 2 == 1)]);
        let [recorded, tail] = [0, 1].map(|at| state[at].load(Relaxed));
        let head = ring.head().load(Relaxed);
        (head.checked_sub(tail)? <= slots as u64).then_some(Self { ring, recording, recorded, tail, head })
    }
}

/// Returns the definitions in a ring, as far as they can be read, because the memory may be damaged.
fn definitions_in(ring: &Ring<Arc<[Line]>>) -> Vec<Item> {
    let mut definitions = Vec::new();
    let defined = usize::try_from(ring.defined().load(Relaxed)).unwrap_or(0);
    let mut words = ring.definitions().take(defined).map(|word| word.load(Relaxed));
    while let Some(length) = words.next() {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes: Vec<u8> = words.by_ref().take(length.div_ceil(8)).flat_map(u64::to_le_bytes).collect();
        let Some(bytes) = bytes.get(..length) else { break };
        let mut input = Input::new(bytes);
        while let Ok(Some(item)) = item::get(&mut EventReader::default(), &mut input) {
            definitions.push(item);
        }
    }
    definitions
}

/// Iterates over the items that are currently in the ring.
impl<M: RingMemory> Iterator for RingReader<M> {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        if self.next == self.head {
            let head = self.ring.head().load(Acquire);
            let new = head.wrapping_sub(self.next);
            // If another process has changed the head, the next event repairs it.
            if new == 0 || new > self.ring.mask + 1 {
                return None;
            }
            self.head = head;
        }
        let words: [u64; WORDS] = std::array::from_fn(|at| self.ring.slot(self.next)[at].load(Relaxed));
        let [first, number, ticks, time, key, bytes, tag, _] = words;
        let key = Key::from_raw(key);
        let event = |kind| {
            #[expect(clippy::cast_possible_truncation, reason = "it was put there from 32 bits")]
            let thread = ThreadId((first >> 8) as u32);
            Item::Event(RecordedEvent { number, ticks, time: Duration::from_nanos(time), thread, kind })
        };
        let (item, slots) = match first & 0xff {
            // The memory is damaged.
            ALLOC if tag & 0xff >= MemKind::ALL.len() as u64 => (Item::Missed(1), 1),
            ALLOC => {
                let block = Block::from_tag(Bytes::new(bytes), Tag::from_raw(tag));
                (event(EventKind::Alloc { key, block }), 1)
            }
            FREE => (event(EventKind::Free { key, block: None }), 1),
            MISSED => (Item::Missed(number), 1),
            _ => self.other(first >> 8),
        };
        self.next += slots;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::{CodeAddress, PoolDefinition, StackDefinition};
    use gpumem_core::model::{Device, Family, PoolId, ScopeId, StackId};

    fn block(bytes: u64) -> Block {
        let device = Device { family: Family::Simulated, ordinal: 3 };
        Block { device, bytes: Bytes::new(bytes), kind: MemKind::Vmm, context: 7, stack: StackId(99) }
    }

    fn kind(number: u64) -> EventKind {
        let key = Key::from_raw(number * 512);
        match number % 4 {
            0 => EventKind::Free { key, block: None },
            1 => EventKind::Free { key, block: Some(block(number)) },
            2 => EventKind::Close { scope: ScopeId(number) },
            _ => EventKind::Alloc { key, block: block(number) },
        }
    }

    fn event(number: u64) -> RecordedEvent {
        let time = Duration::from_nanos(number * 3);
        RecordedEvent { number, ticks: number * 7, time, thread: ThreadId(u32::MAX), kind: kind(number) }
    }

    const RECORDING: u64 = 11;

    fn ring(slots: usize) -> (RingWriter, RingReader) {
        super::ring(on_the_heap(slots), RECORDING, 500)
    }

    fn put(ring: &mut RingWriter, number: u64) {
        let RecordedEvent { number, ticks, time, thread, kind } = event(number);
        ring.event(&Event { number, time, thread, kind: &kind }, ticks);
    }

    #[test]
    fn items_come_out_as_they_went_in() {
        let (mut writer, mut reader) = ring(16);
        for number in 0..1_000 {
            put(&mut writer, number);
            let long = Item::Pool(PoolDefinition { pool: PoolId(1), name: "x".repeat(300) });
            writer.item(&long);
            assert_eq!((reader.next(), reader.next()), (Some(Item::Event(event(number))), Some(long)));
            assert_eq!(reader.next(), None);
            reader.release(0);
        }
    }

    #[test]
    fn what_has_no_room_is_counted() {
        let (mut writer, mut reader) = ring(64);
        (0..100).for_each(|number| put(&mut writer, number * 4));
        let mut read = 0;
        for item in reader.by_ref() {
            assert_eq!(item, Item::Event(event(read * 4)));
            read += 1;
        }
        assert_eq!(read, 64);
        reader.release(0);
        put(&mut writer, 1_000);
        assert_eq!((reader.next(), reader.next()), (Some(Item::Missed(36)), Some(Item::Event(event(1_000)))));
    }

    #[test]
    fn nothing_is_torn_between_two_threads() {
        const EVENTS: u64 = 200_000;
        let (mut writer, mut reader) = ring(128);
        thread::scope(|threads| {
            threads.spawn(move || (1..=EVENTS).for_each(|number| put(&mut writer, number)));
            let (mut next, mut missed) = (1, 0);
            while next + missed <= EVENTS {
                let item = reader.next();
                reader.release(0);
                match item {
                    Some(Item::Event(read)) => {
                        assert_eq!(read, event(read.number));
                        assert_eq!(read.number, next + missed);
                        next += 1;
                    }
                    Some(Item::Missed(more)) => missed += more,
                    Some(other) => panic!("{other:?}"),
                    // The last missed items are reported only when an item follows.
                    None if thread::panicking() || Arc::strong_count(&reader.ring.memory) == 1 => break,
                    None => thread::yield_now(),
                }
            }
            assert!(next > 1);
        });
    }

    fn stack(number: u32) -> Item {
        let address = CodeAddress { module: number, offset: 0x1234 };
        Item::Stack(StackDefinition { id: StackId(number), addresses: vec![address; 3] })
    }

    #[test]
    fn definitions_are_kept_as_long_as_the_ring() {
        let (mut writer, mut reader) = ring(16);
        let mut definitions = writer.definitions();
        let defined = |reader: &RingReader| RingReader::from_bytes(&bytes(reader)).unwrap().definitions;
        assert_eq!(defined(&reader), []);
        assert!(definitions.add(&[stack(1), stack(2)]) && definitions.add(&[stack(3)]));
        (0..8).for_each(|number| put(&mut writer, number * 4));
        assert_eq!(reader.by_ref().count(), 8);
        reader.release(1_000);
        assert_eq!(defined(&reader), [1, 2, 3].map(stack));
        // There are half as many lines for definitions as slots.
        let more = (4..100).take_while(|number| definitions.add(&[stack(*number)])).count();
        assert!((10..30).contains(&more), "{more}");
        assert_eq!(defined(&reader).len(), 3 + more);
        assert_eq!(recovered(&bytes(&reader)), (1_000, vec![]));
    }

    fn bytes(reader: &RingReader) -> Vec<u8> {
        reader.words().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect()
    }

    /// Returns the length of the recording, and the numbers of the events in the ring.
    fn recovered(bytes: &[u8]) -> (u64, Vec<u64>) {
        let RingContent { recorded, items, .. } = RingReader::from_bytes(bytes).unwrap();
        assert_eq!(RingReader::recording_in(bytes), Some(RECORDING));
        let number = |item| match item {
            Item::Event(read) => {
                assert_eq!(read, event(read.number));
                read.number
            }
            Item::Missed(count) => 1_000_000 + count,
            other => panic!("{other:?}"),
        };
        (recorded, items.map(number).collect())
    }

    #[test]
    fn what_was_not_recorded_is_found_after_the_program_was_killed() {
        let (mut writer, mut reader) = ring(32);
        assert_eq!(recovered(&bytes(&reader)), (500, vec![]));
        (0..5).for_each(|number| put(&mut writer, number * 4));
        assert_eq!(reader.by_ref().take(3).count(), 3);
        // The items were read, but are not in the file yet.
        assert_eq!(recovered(&bytes(&reader)), (500, vec![0, 4, 8, 12, 16]));
        reader.release(1_000);
        assert_eq!(recovered(&bytes(&reader)), (1_000, vec![12, 16]));
        assert_eq!(reader.by_ref().count(), 2);
        reader.release(2_000);
        assert_eq!(recovered(&bytes(&reader)), (2_000, vec![]));
        // More events than fit, wrapping around the end of the memory.
        (0..40).for_each(|number| put(&mut writer, number * 4));
        let numbers = (0..32).map(|number| number * 4).chain([1_000_008]).collect();
        assert_eq!(recovered(&bytes(&reader)), (2_000, numbers));
    }

    /// Another process of the user may write to the shared memory.
    #[test]
    fn heads_and_tails_that_another_process_has_changed_do_no_harm() {
        for wrong in [0, 1, 17, 1 << 20, u64::MAX] {
            let (mut writer, mut reader) = ring(16);
            (0..8).for_each(|number| put(&mut writer, number * 4));
            assert_eq!(reader.by_ref().count(), 8);
            reader.release(0);
            writer.ring.head().store(wrong, Relaxed);
            assert!(reader.by_ref().count() <= 16, "{wrong}");
            writer.ring.tail().store(wrong, Relaxed);
            (8..60).for_each(|number| put(&mut writer, number * 4));
            assert!(reader.by_ref().count() <= 32, "{wrong}");
            reader.release(0);
            // Repaired memory is used again.
            writer.ring.tail().store(writer.head, Relaxed);
            put(&mut writer, 400);
            assert!(writer.head > 8);
        }
    }

    #[test]
    fn bytes_that_are_no_ring_are_rejected_and_damaged_ones_do_not_panic() {
        let (mut writer, reader) = ring(16);
        (0..15).for_each(|number| put(&mut writer, number));
        assert!(writer.definitions().add(&[stack(1), stack(2)]));
        let good = bytes(&reader);
        for length in [0, 1, 511, 512, 513, good.len() - 64, good.len() + 64] {
            let mut other = good.clone();
            other.resize(length, 0);
            assert!(RingReader::from_bytes(&other).is_none(), "{length}");
            assert_eq!(RingReader::recording_in(&other), None, "{length}");
        }
        for at in 0..good.len() {
            for value in [0, 1, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                let content = RingReader::from_bytes(&bad);
                assert_eq!(RingReader::recording_in(&bad).is_some(), content.is_some(), "at {at}");
                if let Some(content) = content {
                    assert!(content.items.count() <= 17 && content.definitions.len() <= 64, "at {at}");
                }
            }
        }
    }
}
