//! Reads a recording and derives the reports that the program printed.

use std::io::{self, Seek, SeekFrom};

use super::{
    allocator::AllocatorEvents,
    budget::Budget,
    bytes::LONGEST_TEXT,
    check::{AllocatorChecks, Rejection},
    definitions::{Definitions, MOST_CALLERS},
    event::RecordedEvent,
    item::BlockLabel,
    item::Item,
    items::{Items, Next},
    record::{End, Records},
    state::State,
    totals::Totals,
};
use gpumem_core::{
    derive::{self, KeptPeak, LedgerView, Names},
    ledger::{NodeId, Observer},
    model::{Device, StackId, Time},
    report::{PeakHolders, Summary},
};

/// Reads a recording.
///
/// Events are applied to a ledger as they are read. The file is read twice because a definition may follow the first use of its id.
#[derive(Debug)]
pub struct Reader<R> {
    pub(super) items: Items<R>,
    state: State,
    allocator: AllocatorChecks,
    skipped: Skipped,
    /// True if definitions are added as they are read.
    defines: bool,
    /// The approximate bytes of the added definitions.
    defined: u64,
    /// The number of the last event.
    latest: u64,
    /// True while the start of a new file repeats events of the previous file.
    skips: bool,
}

/// The result of reading.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Step {
    /// An event was applied.
    Event(RecordedEvent),
    /// The program labelled a live block.
    Label(Box<BlockLabel>),
    /// The steps of a caching allocator of the program. They come after all events.
    Allocator(AllocatorEvents),
    /// The initial live blocks of a shortened recording were applied. These are the totals up to that point.
    Totals(Box<Totals>),
}

/// The number of things that are missing from the derived reports, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Records of types that this version does not know.
    pub unknown_records: u64,
    /// Items that this version does not understand.
    pub not_understood: u64,
    /// Items that contradict earlier ones.
    pub contradictions: u64,
    /// Items above a limit of the reader.
    pub above_limits: u64,
    /// Items that the writer missed.
    pub missed: u64,
    /// Texts of more than 16 KiB: the writer truncated them, and they end in `… (cut)`.
    pub cut_texts: u64,
}

impl Skipped {
    /// Returns whether nothing was left out.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl<R: io::Read + Seek> Reader<R> {
    /// Reads the definitions of a recording.
    ///
    /// # Errors
    /// Returns an error if reading fails, and one of the kind [`InvalidData`](io::ErrorKind::InvalidData) if this is not a recording,
    /// or its version is too new.
    pub fn new(mut from: R) -> io::Result<Self> {
        let start = from.stream_position()?;
        let length = from.seek(SeekFrom::End(0))?.saturating_sub(start);
        from.seek(SeekFrom::Start(start))?;
        Self::of_size(from, length)
    }

    /// Like [`new`](Self::new), but for a recording that was converted from a file with `length` bytes. Reading it may cost as
    /// much time and memory as reading a recording of this size.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn of_size(mut from: R, length: u64) -> io::Result<Self> {
        let start = from.stream_position()?;
        let mut definitions = Definitions::default();
        let mut items = Items::of(Records::new(&mut from)?, Budget::new(length, 0));
        while let Some(next) = items.next()? {
            if let Next::Other(item, bytes) = next {
                definitions.add(*item, bytes, &mut items.budget);
            }
        }
        let budget = Budget::new(length, items.budget.memory());
        from.seek(SeekFrom::Start(start))?;
        Ok(Self::of(Items::of(Records::new(from)?, budget), definitions, false))
    }
}

impl<R: io::Read> Reader<R> {
    /// Creates a reader. `defines` is true if the definitions of these items are not in `definitions` yet.
    pub(super) fn of(items: Items<R>, definitions: Definitions, defines: bool) -> Self {
        let skipped = Skipped {
            contradictions: definitions.contradictions,
            above_limits: definitions.left_out,
            ..Skipped::default()
        };
        Self {
            items,
            state: State::new(definitions),
            allocator: AllocatorChecks::default(),
            skipped,
            defines,
            defined: 0,
            latest: 0,
            skips: false,
        }
    }

    /// Adds a definition that takes `bytes` bytes in the file.
    pub(super) fn define(&mut self, item: Item, bytes: u64) {
        let before = self.items.budget.memory();
        self.state.definitions.add(item, bytes, &mut self.items.budget);
        self.defined += self.items.budget.memory() - before;
    }

    /// Returns the approximate memory of definitions that are added as they are read, live blocks and open scopes.
    pub(super) fn memory(&self) -> u64 {
        self.defined + self.state.memory()
    }

    /// Reads up to the next event or label. Returns `None` after the last one; see [`end`](Self::end) for how the file ends.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    pub fn step(&mut self) -> io::Result<Option<Step>> {
        self.step_observed(&mut ())
    }

    /// Like [`step`](Self::step), but also passes the effects of the event on blocks to the observer. The observer may also get the
    /// changes of an item without a step (`Item::Missed`), before the step of the next event.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    pub fn step_observed(&mut self, observer: &mut impl Observer) -> io::Result<Option<Step>> {
        while let Some(next) = self.items.next()? {
            let step = match next {
                Next::Event(event) if self.skips && event.number <= self.latest => Ok(None),
                Next::Event(event) => {
                    self.latest = event.number;
                    self.skips = false;
                    let applied = self.state.apply(&event, &mut self.items.budget, observer);
                    applied.map(|()| Some(Step::Event(event)))
                }
                Next::Other(item, bytes) => self.item(*item, bytes, observer),
            };
            match step {
                Ok(None) => {}
                Ok(step) => return Ok(step),
                Err(Rejection::UnknownScope) if self.definitions().process().ran_before.is_some() => {}
                Err(Rejection::Contradiction | Rejection::UnknownScope) => self.skipped.contradictions += 1,
                Err(Rejection::Limit) => self.skipped.above_limits += 1,
                Err(Rejection::Exceeded(limit)) => self.items.stop(limit),
            }
        }
        // In a growing file, more events of the thread that allocated an undecided block may follow.
        if !self.defines {
            self.state.end(observer);
        }
        Ok(None)
    }

    fn item(&mut self, item: Item, bytes: u64, observer: &mut impl Observer) -> Result<Option<Step>, Rejection> {
        let (state, budget) = (&mut self.state, &mut self.items.budget);
        let step = match item {
            Item::Totals(totals) if !std::mem::take(&mut self.skips) => Step::Totals(Box::new(totals)),
            Item::Totals(_) => return Ok(None),
            Item::ThreadReused(_) | Item::Missed(_) | Item::Label(_) | Item::Inside(_) if self.skips => {
                return Ok(None);
            }
            Item::Inside(path) => return state.set_inside(path).map(|()| None),
            Item::ThreadReused(thread) => return state.reuse_thread(thread, budget).map(|()| None),
            Item::Missed(count) => return state.miss(count, budget, observer).map(|()| None),
            Item::Label(label) => {
                state.check_label(&label, bytes, budget)?;
                Step::Label(Box::new(label))
            }
            Item::AllocatorEvents(events) => {
                self.allocator.events(&events, budget)?;
                Step::Allocator(events)
            }
            item => {
                if self.defines {
                    self.define(item, bytes);
                }
                return Ok(None);
            }
        };
        Ok(Some(step))
    }

    /// Charges the memory and the approximate time (in nanoseconds) of data that the caller keeps from the recording. Returns false
    /// if this exceeds the budget of a file of this size. Then there are no more steps, and [`end`](Self::end) reports the limit.
    pub fn spend(&mut self, memory: u64, nanoseconds: u64) -> bool {
        let paid = self.items.budget.work(nanoseconds).and_then(|()| self.items.budget.take(memory));
        paid.map_err(|limit| self.items.stop(limit)).is_ok()
    }

    /// Extends a stack without Python frames by the 128 innermost functions of a stack that has some. These ran on another thread,
    /// which waited for this one. Does nothing if this exceeds the budget of a file of this size.
    pub fn add_callers(&mut self, stack: StackId, callers: StackId) {
        if self.spend(MOST_CALLERS as u64 * 16, 3_000) {
            self.state.definitions.add_callers(stack, callers);
        }
    }

    /// Returns the largest number of bytes for all names of nested scopes and of functions on stacks.
    pub fn names_left(&self) -> u64 {
        self.items.budget.names()
    }

    /// Continues with a new file of the recording, whose bytes come next.
    pub(super) fn start_file(&mut self) {
        self.skips = true;
        self.state.definitions.start_file();
    }

    /// Returns the number of the last event that was read.
    pub(super) fn latest(&self) -> u64 {
        self.latest
    }

    /// Returns how reading ended, after the last step.
    pub fn end(&self) -> Option<&End> {
        self.items.end()
    }

    /// Returns the data that was left out so far.
    pub fn skipped(&self) -> Skipped {
        Skipped {
            unknown_records: self.items.unknown_records(),
            not_understood: self.items.not_understood,
            missed: self.state.missed,
            cut_texts: self.items.cut_texts,
            ..self.skipped
        }
    }

    /// Returns the number of items that were read.
    pub fn items(&self) -> u64 {
        self.items.budget.items()
    }
}

impl<R> Reader<R> {
    /// Returns the definitions that were read.
    pub fn definitions(&self) -> &Definitions {
        &self.state.definitions
    }

    /// Returns the ledger after the last event that was read.
    pub fn ledger(&self) -> &dyn LedgerView {
        &self.state.inbox
    }

    /// Returns the time of the ledger's last event.
    pub fn time(&self) -> Time {
        self.state.time
    }
}

/// Reports of the state after the last step. `None` if the recording is too large for a report.
impl<R> Reader<R> {
    /// Returns the current and the highest memory of each scope.
    pub fn summary(&mut self) -> Option<Summary> {
        self.check_size()?;
        let under = self.state.next_scope();
        Some(derive::summary(&self.state.inbox, &self.state.definitions, under, None))
    }

    /// Returns the allocations that made up a device's peak, if there are any.
    pub fn device_peak(&mut self, device: Device) -> Option<PeakHolders> {
        self.check_size()?;
        let under = self.state.next_scope();
        KeptPeak::of_device(&self.state.inbox, device, under)?.holders(&self.state.definitions)
    }

    /// Returns `None` if a report would be too large.
    fn check_size(&self) -> Option<()> {
        let names = &self.state.definitions;
        let mut paths: Vec<u64> = Vec::new();
        let mut texts = 0_u64;
        for (_, node) in self.state.inbox.nodes() {
            let outer = paths.get(node.parent.0 as usize).copied().unwrap_or(0);
            let path = outer.saturating_add(32 + names.callsite(node.callsite).to_string().len() as u64);
            texts = texts.saturating_add(path);
            paths.push(path);
        }
        for usage in self.state.inbox.groups() {
            let NodeId(node) = usage.group.node;
            let stack = names.length_of(usage.group.stack).min(3 * LONGEST_TEXT as u64);
            texts = texts.saturating_add(paths.get(node as usize).copied().unwrap_or(0).saturating_add(256 + stack));
        }
        self.items.budget.may_report(texts).then_some(())
    }
}
