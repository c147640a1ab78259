//! The budget: how much time and memory a reader may spend on a recording. The budget depends on the size of the file. A small
//! file takes little time and memory, whatever it contains, and a large file written by gpumem is never rejected.

/// A smaller file may cost as much as a file of this size.
const LEAST: u64 = 2 << 20;

/// The most items in three bytes of a file. A record with more items is written without compression, and then each item has at least
/// two bytes.
const ITEMS_OF_THREE_BYTES: u64 = 2;
/// The most decompressed bytes for each byte of a file. A single record may have more.
const PLAIN: u64 = 16;
/// The most bytes of memory for each byte of a file.
const MEMORY: u64 = 36;
/// The most bytes of names for each byte of a file. They are added to the memory.
const NAMES: u64 = 4;
/// The most steps for each byte of a file. A step takes about a nanosecond. Decoding an item is not counted.
const WORK: u64 = 80;
/// The most bytes of text in a report for each byte of a file.
const REPORT: u64 = 48;

/// The reason why a reader stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exceeded {
    Items,
    Plain,
    Memory,
    Work,
}

impl Exceeded {
    pub(super) const fn in_words(self) -> &'static str {
        match self {
            Self::Items => "a file of this size has at most two events for three bytes",
            Self::Plain => "a file of this size has at most 16 bytes, decompressed, for each of its bytes",
            Self::Memory => "the contents of a file of this size take at most 36 bytes of memory for each of its bytes",
            Self::Work => "the events of a file of this size touch fewer blocks and scopes",
        }
    }
}

/// Returns whether a file with this number of bytes may have this number of items.
pub(super) const fn may_have(stored: u64, items: u64) -> bool {
    items <= stored * ITEMS_OF_THREE_BYTES / 3
}

/// The cost of reading so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Budget {
    /// The size of the file, as far as it is known.
    stored: u64,
    items: u64,
    plain: u64,
    memory: u64,
    work: u64,
}

impl Budget {
    /// Creates the budget for a file of this size whose definitions take this much memory.
    pub(super) fn new(stored: u64, memory: u64) -> Self {
        Self { stored, memory, ..Self::default() }
    }

    /// Returns the size that determines all limits: the size of the file, but at least [`LEAST`].
    fn counted_size(&self) -> u64 {
        self.stored.max(LEAST)
    }

    fn within(spent: u64, allowed: u64, limit: Exceeded) -> Result<(), Exceeded> {
        if spent <= allowed { Ok(()) } else { Err(limit) }
    }

    /// Pays for a record that ends at this byte of the file and has this many bytes decompressed.
    pub(super) fn record(&mut self, end: u64, plain: u64) -> Result<(), Exceeded> {
        self.stored = self.stored.max(end);
        self.plain += plain;
        Self::within(self.plain, self.counted_size() * PLAIN, Exceeded::Plain)
    }

    /// Pays for an item.
    pub(super) fn item(&mut self) -> Result<(), Exceeded> {
        self.items += 1;
        if may_have(self.counted_size(), self.items) { Ok(()) } else { Err(Exceeded::Items) }
    }

    /// Returns the number of items that were read.
    pub(super) fn items(&self) -> u64 {
        self.items
    }

    /// Pays for memory.
    pub(super) fn take(&mut self, bytes: u64) -> Result<(), Exceeded> {
        let memory = self.memory.saturating_add(bytes);
        Self::within(memory, self.counted_size() * MEMORY, Exceeded::Memory)?;
        self.memory = memory;
        Ok(())
    }

    /// Credits memory that is no longer needed.
    pub(super) fn release(&mut self, bytes: u64) {
        self.memory = self.memory.saturating_sub(bytes);
    }

    /// Returns the largest number of bytes of names: a fixed part, and half of the memory that is left.
    pub(super) fn names(&self) -> u64 {
        self.counted_size() * NAMES + (self.counted_size() * MEMORY).saturating_sub(self.memory) / 2
    }

    /// Returns the memory charged so far.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// Pays for steps.
    pub(super) fn work(&mut self, steps: u64) -> Result<(), Exceeded> {
        let work = self.work.saturating_add(steps);
        Self::within(work, self.counted_size() * WORK, Exceeded::Work)?;
        self.work = work;
        Ok(())
    }

    /// Returns whether a report with this many bytes of text may be made.
    pub(super) fn may_report(&self, texts: u64) -> bool {
        texts <= self.counted_size() * REPORT
    }
}
