//! What a recording may cost its reader. All of it depends on the size of the file: a small file takes little time and memory, whatever is
//! in it, and a large one of gpumem is never refused.

/// A file that is smaller may cost as much as one of this size.
const LEAST: u64 = 2 << 20;

/// So many items three bytes of a file hold at most. A program that does nothing but allocate and free one block takes five to eight bytes
/// for three events: the times between them differ.
const ITEMS_OF_THREE_BYTES: u64 = 2;
/// So many bytes a byte of a file comes to at most, once it is decompressed. A single record may come to more.
const PLAIN: u64 = 16;
/// So many bytes of memory each byte of a file may take.
const MEMORY: u64 = 36;
/// So many the names of what was read may have, besides.
const NAMES: u64 = 4;
/// So many steps it may take to read a byte of a file, besides those of each item. A step takes about a nanosecond.
const WORK: u64 = 80;
/// So many bytes the texts of all requested reports may have, for each byte of a file; and those of one report.
const REPORTS: u64 = 1 << 10;
const ONE_REPORT: u64 = 48;

/// Why a reader reads no further.
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
            Self::Memory => "what a file of this size has takes at most 36 bytes of memory for each of its bytes",
            Self::Work => "the events of a file of this size touch fewer blocks and scopes",
        }
    }
}

/// What was spent so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Budget {
    /// So many bytes of the file are known.
    stored: u64,
    items: u64,
    plain: u64,
    memory: u64,
    work: u64,
    reports: u64,
}

impl Budget {
    /// Of a file of this size, whose definitions take so much memory.
    pub(super) fn new(stored: u64, memory: u64) -> Self {
        Self { stored, memory, ..Self::default() }
    }

    fn share(&self) -> u64 {
        self.stored.max(LEAST)
    }

    fn within(spent: u64, allowed: u64, limit: Exceeded) -> Result<(), Exceeded> {
        if spent <= allowed { Ok(()) } else { Err(limit) }
    }

    /// A record that ends here was decompressed to so many bytes.
    pub(super) fn record(&mut self, end: u64, plain: u64) -> Result<(), Exceeded> {
        self.stored = self.stored.max(end);
        self.plain += plain;
        Self::within(self.plain, self.share() * PLAIN, Exceeded::Plain)
    }

    pub(super) fn item(&mut self) -> Result<(), Exceeded> {
        self.items += 1;
        Self::within(self.items, self.share() * ITEMS_OF_THREE_BYTES / 3, Exceeded::Items)
    }

    /// How many items were read.
    pub(super) fn items(&self) -> u64 {
        self.items
    }

    /// So much memory is needed.
    pub(super) fn take(&mut self, bytes: u64) -> Result<(), Exceeded> {
        let memory = self.memory.saturating_add(bytes);
        Self::within(memory, self.share() * MEMORY, Exceeded::Memory)?;
        self.memory = memory;
        Ok(())
    }

    /// So much memory is not needed any more.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.memory = self.memory.saturating_sub(bytes);
    }

    /// How many bytes the names of all that was read may have: some, and half of the memory that is left.
    pub(super) fn names(&self) -> u64 {
        self.share() * NAMES + (self.share() * MEMORY).saturating_sub(self.memory) / 2
    }

    /// How much is taken.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// So many steps are needed.
    pub(super) fn work(&mut self, steps: u64) -> Result<(), Exceeded> {
        let work = self.work.saturating_add(steps);
        Self::within(work, self.share() * WORK, Exceeded::Work)?;
        self.work = work;
        Ok(())
    }

    /// Of a report that the recording does not request.
    pub(super) fn of_one_report(&self) -> Self {
        Self { reports: 0, ..*self }
    }

    /// Whether any report may be made.
    pub(super) fn may_report(&self) -> bool {
        self.reports <= self.share() * REPORTS
    }

    /// Whether a report may be made whose texts have so many bytes. To find that out was work, so this is spent in any case.
    pub(super) fn report(&mut self, texts: u64) -> bool {
        self.reports = self.reports.saturating_add(texts.min(self.share() * ONE_REPORT));
        self.may_report() && texts <= self.share() * ONE_REPORT
    }
}
