//! From the threads of a program to the thread that writes the recording: a ring of fixed size that never blocks.
//!
//! The writing side belongs to the inbox, which fills the ring under its lock. An allocation or a free takes one slot, which is one
//! cache line, so that an event writes no more lines than it must. Everything else is rare, and lies in as many slots as its bytes
//! need. What has no room is counted, and the count is the next thing in the ring.

use std::{
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
use crate::model::{Block, Bytes, Event, EventKind, Key, Tag, ThreadId};

const WORDS: usize = 8;
const BYTES: usize = 8 * WORDS;

/// The lowest byte of the first word of an item.
const ALLOC: u64 = 1;
const FREE: u64 = 2;
const MISSED: u64 = 3;
const OTHER: u64 = 4;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot([AtomicU64; WORDS]);

/// A line of its own: the two sides write to different ones.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Position(AtomicU64);

#[derive(Debug)]
struct Ring {
    slots: Box<[Slot]>,
    /// Slots that were ever filled.
    head: Position,
    /// Slots that were ever read.
    tail: Position,
}

impl Ring {
    #[inline]
    fn slot(&self, at: u64) -> &[AtomicU64; WORDS] {
        // The number of slots is a power of two.
        #[expect(clippy::cast_possible_truncation, reason = "the mask leaves less than there are slots")]
        &self.slots[at as usize & (self.slots.len() - 1)].0
    }
}

/// The side that the inbox fills.
#[derive(Debug)]
pub struct RingWriter {
    ring: Arc<Ring>,
    head: u64,
    /// How far the other side had read at the last look.
    tail: u64,
    missed: u64,
    events: EventWriter,
    scratch: Vec<u8>,
    bytes: Vec<u8>,
}

/// The side that the writing thread empties.
#[derive(Debug)]
pub struct RingReader {
    ring: Arc<Ring>,
    head: u64,
    tail: u64,
    events: EventReader,
    bytes: Vec<u8>,
}

/// A ring of at least so many slots. An allocation or a free takes one.
pub fn ring(slots: usize) -> (RingWriter, RingReader) {
    let slots = (0..slots.next_power_of_two()).map(|_| Slot::default()).collect();
    let ring = Arc::new(Ring { slots, head: Position::default(), tail: Position::default() });
    let writer = RingWriter {
        ring: Arc::clone(&ring),
        head: 0,
        tail: 0,
        missed: 0,
        events: EventWriter::default(),
        scratch: Vec::with_capacity(1 << 10),
        bytes: Vec::with_capacity(1 << 10),
    };
    (writer, RingReader { ring, head: 0, tail: 0, events: EventReader::default(), bytes: Vec::new() })
}

impl RingWriter {
    /// Puts an event into the ring.
    #[inline]
    pub fn event(&mut self, event: &Event<'_>, ticks: u64) {
        let Event { number, time, thread, kind } = *event;
        match *kind {
            EventKind::Alloc { key, block } => {
                let first = ALLOC | u64::from(thread.0) << 8;
                let rest = [number, ticks, nanoseconds(time), key.get(), block.bytes.get(), block.tag().get()];
                self.slot_of(first, rest);
            }
            EventKind::Free { key, block: None } => {
                let first = FREE | u64::from(thread.0) << 8;
                self.slot_of(first, [number, ticks, nanoseconds(time), key.get(), 0, 0]);
            }
            kind => self.item(&Item::Event(RecordedEvent { number, ticks, time, thread, kind })),
        }
    }

    #[inline]
    fn slot_of(&mut self, first: u64, rest: [u64; 6]) {
        if self.missed > 0 && !self.say_missed() || !self.has_room(1) {
            self.missed += 1;
            return;
        }
        let [head, words @ ..] = self.ring.slot(self.head);
        head.store(first, Relaxed);
        for (to, word) in words.iter().zip(rest) {
            to.store(word, Relaxed);
        }
        self.publish(1);
    }

    /// How many items had no room since that was last put into the ring.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    #[inline]
    fn publish(&mut self, slots: u64) {
        self.head += slots;
        self.ring.head.0.store(self.head, Release);
    }

    #[inline]
    fn has_room(&mut self, slots: u64) -> bool {
        let all = self.ring.slots.len() as u64;
        if self.head + slots - self.tail > all {
            self.tail = self.ring.tail.0.load(Acquire);
        }
        self.head + slots - self.tail <= all
    }

    /// Puts the number of items that had no room into the ring; false if it has none either.
    #[cold]
    fn say_missed(&mut self) -> bool {
        // With room for what follows: else there would be a count for each item.
        if !self.has_room(64.min(self.ring.slots.len() as u64)) {
            return false;
        }
        let [first, count, ..] = self.ring.slot(self.head);
        first.store(MISSED, Relaxed);
        count.store(std::mem::take(&mut self.missed), Relaxed);
        self.publish(1);
        true
    }

    /// Puts any item into the ring. It must have far fewer bytes than the ring.
    #[cold]
    pub fn item(&mut self, item: &Item) {
        self.bytes.clear();
        self.events.begin_record();
        item::put(item, &mut self.events, &mut self.scratch, &mut self.bytes);
        let slots = (8 + self.bytes.len()).div_ceil(BYTES) as u64;
        if self.missed > 0 && !self.say_missed() || !self.has_room(slots) {
            self.missed += 1;
            return;
        }
        let first = OTHER | (self.bytes.len() as u64) << 8;
        let words = self.bytes.chunks(8).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        });
        for (at, word) in (0..).zip([first].into_iter().chain(words)) {
            let slot = self.ring.slot(self.head + at / WORDS as u64);
            #[expect(clippy::cast_possible_truncation, reason = "it is below the number of words")]
            slot[at as usize % WORDS].store(word, Relaxed);
        }
        self.publish(slots);
    }
}

impl RingReader {
    /// An item of so many bytes, and how many slots it takes.
    fn other(&mut self, length: u64) -> (Item, u64) {
        let slots = (8 + length).div_ceil(BYTES as u64);
        self.bytes.clear();
        let length = usize::try_from(length).unwrap_or(0);
        let words = (self.tail..self.tail + slots).flat_map(|at| self.ring.slot(at)).skip(1);
        self.bytes.extend(words.flat_map(|word| word.load(Relaxed).to_le_bytes()).take(length));
        self.events.begin_record();
        let item = item::get(&mut self.events, &mut Input::new(&self.bytes));
        // It was put there by this version.
        (item.ok().flatten().unwrap_or(Item::Missed(1)), slots)
    }
}

/// The items that are in the ring now.
impl Iterator for RingReader {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        if self.tail == self.head {
            self.head = self.ring.head.0.load(Acquire);
            if self.tail == self.head {
                return None;
            }
        }
        let words: [u64; WORDS] = std::array::from_fn(|at| self.ring.slot(self.tail)[at].load(Relaxed));
        let [first, number, ticks, time, key, bytes, tag, _] = words;
        let key = Key::from_raw(key);
        let event = |kind| {
            #[expect(clippy::cast_possible_truncation, reason = "it was put there from 32 bits")]
            let thread = ThreadId((first >> 8) as u32);
            Item::Event(RecordedEvent { number, ticks, time: Duration::from_nanos(time), thread, kind })
        };
        let (item, slots) = match first & 0xff {
            ALLOC => {
                let block = Block::from_tag(Bytes::new(bytes), Tag::from_raw(tag));
                (event(EventKind::Alloc { key, block }), 1)
            }
            FREE => (event(EventKind::Free { key, block: None }), 1),
            MISSED => (Item::Missed(number), 1),
            _ => self.other(first >> 8),
        };
        self.tail += slots;
        self.ring.tail.0.store(self.tail, Release);
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::model::{Device, Family, MemKind, ScopeId, StackId};

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

    fn put(ring: &mut RingWriter, number: u64) {
        let RecordedEvent { number, ticks, time, thread, kind } = event(number);
        ring.event(&Event { number, time, thread, kind: &kind }, ticks);
    }

    #[test]
    fn items_come_out_as_they_went_in() {
        let (mut writer, mut reader) = ring(16);
        for number in 0..1_000 {
            put(&mut writer, number);
            let long = Item::Request(super::super::Request::Summary { not_intercepted: Some("x".repeat(300)) });
            writer.item(&long);
            assert_eq!((reader.next(), reader.next()), (Some(Item::Event(event(number))), Some(long)));
            assert_eq!(reader.next(), None);
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
        put(&mut writer, 1_000);
        assert_eq!((reader.next(), reader.next()), (Some(Item::Missed(36)), Some(Item::Event(event(1_000)))));
    }

    #[test]
    fn nothing_is_torn_between_two_threads() {
        const EVENTS: u64 = if cfg!(miri) { 500 } else { 200_000 };
        let (mut writer, mut reader) = ring(128);
        thread::scope(|threads| {
            threads.spawn(move || (1..=EVENTS).for_each(|number| put(&mut writer, number)));
            let (mut next, mut missed) = (1, 0);
            while next + missed <= EVENTS {
                match reader.next() {
                    Some(Item::Event(read)) => {
                        assert_eq!(read, event(read.number));
                        assert_eq!(read.number, next + missed);
                        next += 1;
                    }
                    Some(Item::Missed(more)) => missed += more,
                    Some(other) => panic!("{other:?}"),
                    // The last missed items are reported only when an item follows.
                    None if thread::panicking() || Arc::strong_count(&reader.ring) == 1 => break,
                    None => thread::yield_now(),
                }
            }
            assert!(next > 1);
        });
    }
}
