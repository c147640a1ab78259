//! Writes a recording.

use std::{
    io::{self, Write},
    mem,
};

use super::{
    event::{EventWriter, RecordedEvent},
    item::{self, Item},
    record,
};

/// A record is written when its items have this many bytes. Larger records compress better, smaller ones lose less when a program is
/// killed.
const RECORD: usize = 1 << 16;

/// The most bytes of one item; a longer one is left out. Texts are truncated before that.
const LONGEST_ITEM: usize = record::LARGEST - RECORD - 64;

/// Writes a recording, item by item.
///
/// After an error, everything that was written before is readable, and nothing more should be written.
#[derive(Debug)]
pub struct Writer<W> {
    to: W,
    events: EventWriter,
    /// The items of the next record, and their number.
    plain: Vec<u8>,
    waiting: u64,
    packed: Vec<u8>,
    scratch: Vec<u8>,
    written: Written,
}

/// The totals of a [`Writer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The number of items. Some may still wait for their record to be written.
    pub items: u64,
    /// The number of items that were left out because they are too long.
    pub left_out: u64,
    /// The number of records.
    pub records: u64,
    /// The number of bytes.
    pub bytes: u64,
}

impl<W: Write> Writer<W> {
    /// Writes the header of a recording.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn new(mut to: W) -> io::Result<Self> {
        record::write_header(&mut to)?;
        Ok(Self::append(to, record::FILE_HEADER as u64))
    }

    /// Continues a recording that has `bytes` bytes, after its last complete record.
    pub fn append(to: W, bytes: u64) -> Self {
        Self {
            to,
            events: EventWriter::default(),
            plain: Vec::with_capacity(2 * RECORD),
            waiting: 0,
            packed: Vec::new(),
            scratch: Vec::new(),
            written: Written { bytes, ..Written::default() },
        }
    }

    /// Returns whether no item waits: all written items are in the file.
    pub fn is_flushed(&self) -> bool {
        self.plain.is_empty()
    }

    /// Writes an item, now or with a later flush.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn write(&mut self, item: &Item) -> io::Result<()> {
        let before = self.plain.len();
        item::put(item, &mut self.events, &mut self.scratch, &mut self.plain);
        if self.plain.len() - before > LONGEST_ITEM {
            self.plain.truncate(before);
            self.written.left_out += 1;
            return Ok(());
        }
        self.wrote_one()
    }

    /// Writes an event, like [`write`](Self::write).
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn write_event(&mut self, event: &RecordedEvent) -> io::Result<()> {
        if self.events.put_short(event, &mut self.plain) { self.wrote_one() } else { self.write(&Item::Event(*event)) }
    }

    #[inline]
    fn wrote_one(&mut self) -> io::Result<()> {
        self.written.items += 1;
        self.waiting += 1;
        if self.plain.len() < RECORD { Ok(()) } else { self.flush() }
    }

    /// Writes all waiting items as one record, so that a reader of the file finds them.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.plain.is_empty() {
            return self.to.flush();
        }
        record::pack(&self.plain, mem::take(&mut self.waiting), &mut self.packed);
        self.plain.clear();
        self.events.start_record();
        // The record is written in one call, so another process usually reads whole records.
        self.to.write_all(&self.packed)?;
        self.written.records += 1;
        self.written.bytes += self.packed.len() as u64;
        self.to.flush()
    }

    /// Returns the totals so far.
    pub fn written(&self) -> Written {
        self.written
    }

    /// Writes all waiting items, and returns the target.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush()?;
        Ok(self.to)
    }
}
