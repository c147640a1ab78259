//! Reads a recording, and derives the reports that the program printed.

use std::io::{self, Read, Seek, SeekFrom};

use super::{
    allocator::AllocatorEvents,
    check::{AllocatorChecks, Rejection},
    definitions::Definitions,
    event::RecordedEvent,
    item::BlockLabel,
    item::Item,
    items::Items,
    output::ReplayedReport,
    record::End,
    state::State,
};
use crate::{
    derive::LedgerView,
    model::{Device, Time, Trace},
    report::{Leaks, LiveBlock, MemoryStats, PeakHolders, Summary},
};

/// Reads a recording.
///
/// Events are applied to a ledger as they are read, and the reports that the program requested are derived from it at the same point. The file
/// is read twice: names may come later than what they name.
#[derive(Debug)]
pub struct Reader<R> {
    items: Items<R>,
    state: State,
    allocator: AllocatorChecks,
    skipped: Skipped,
}

/// What was read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Step {
    /// An event was applied. If it is a query of a scope: what the scope came to.
    Event(RecordedEvent, Option<Trace>),
    /// The program named a live block.
    Label(Box<BlockLabel>),
    /// The program requested a report.
    ReplayedReport(Box<ReplayedReport>),
    /// What a caching allocator of the program did. It comes after all events.
    Allocator(AllocatorEvents),
}

/// What a reader does not have of the program, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Records of types that this version does not know.
    pub unknown_records: u64,
    /// Items that this version does not understand.
    pub not_understood: u64,
    /// Items that contradict what came before.
    pub contradictions: u64,
    /// Items above a limit of the reader.
    pub above_limits: u64,
    /// Items that the recording itself says it missed.
    pub missed: u64,
    /// Texts of more than 16 KiB: they end in `… (cut)`.
    pub cut_texts: u64,
}

impl Skipped {
    /// Nothing was left out: what is derived is what the program had.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl<R: Read + Seek> Reader<R> {
    /// Reads the definitions of a recording.
    ///
    /// # Errors
    /// Of reading, and of the kind [`InvalidData`](io::ErrorKind::InvalidData) if this is no recording, or one of a version that is
    /// too new.
    pub fn new(mut from: R) -> io::Result<Self> {
        let begin = from.stream_position()?;
        let mut definitions = Definitions::default();
        let mut items = Items::new(&mut from)?;
        while let Some((item, bytes)) = items.next()? {
            definitions.add(item, bytes);
        }
        from.seek(SeekFrom::Start(begin))?;
        let skipped = Skipped {
            contradictions: definitions.contradictions,
            above_limits: definitions.left_out,
            ..Skipped::default()
        };
        let allocator = AllocatorChecks::default();
        Ok(Self { items: Items::new(from)?, state: State::new(definitions), allocator, skipped })
    }
}

impl<R: Read> Reader<R> {
    /// Reads up to the next event, label or report. `None` after the last: [`end`](Self::end) says how the file ends.
    ///
    /// # Errors
    /// Of reading.
    pub fn step(&mut self) -> io::Result<Option<Step>> {
        while let Some((item, bytes)) = self.items.next()? {
            self.state.read += 1;
            match self.item(item, bytes) {
                Ok(None) => {}
                Ok(step) => return Ok(step),
                Err(Rejection::Contradiction) => self.skipped.contradictions += 1,
                Err(Rejection::Limit) => self.skipped.above_limits += 1,
            }
        }
        Ok(None)
    }

    fn item(&mut self, item: Item, bytes: u64) -> Result<Option<Step>, Rejection> {
        let state = &mut self.state;
        match item {
            Item::Event(event) => return state.apply(&event).map(|trace| Some(Step::Event(event, trace))),
            Item::Request(request) => {
                return state.output(request).map(|output| output.map(|output| Step::ReplayedReport(Box::new(output))));
            }
            Item::ThreadReused(thread) => state.reuse_thread(thread)?,
            Item::PeakReleased(scope) => state.release_peak(scope),
            Item::Missed(count) => state.miss(count)?,
            Item::Label(label) => {
                state.label(&label, bytes)?;
                return Ok(Some(Step::Label(Box::new(label))));
            }
            Item::AllocatorEvents(events) => {
                self.allocator.events(&events)?;
                return Ok(Some(Step::Allocator(events)));
            }
            // All definitions are known already.
            _ => {}
        }
        Ok(None)
    }

    /// Reads all that is left, and hands over the reports.
    ///
    /// # Errors
    /// Of reading.
    pub fn replay(&mut self, mut report: impl FnMut(&ReplayedReport)) -> io::Result<()> {
        while let Some(step) = self.step()? {
            if let Step::ReplayedReport(output) = step {
                report(&output);
            }
        }
        Ok(())
    }

    /// How the file ends, once that was reached.
    pub fn end(&self) -> Option<&End> {
        self.items.end()
    }

    /// What was left out so far.
    pub fn skipped(&self) -> Skipped {
        Skipped {
            unknown_records: self.items.unknown_records(),
            not_understood: self.items.not_understood,
            missed: self.state.missed,
            cut_texts: self.items.cut_texts,
            ..self.skipped
        }
    }

    /// How many items were read.
    pub fn items(&self) -> u64 {
        self.state.read
    }
}

impl<R> Reader<R> {
    /// What numbers stand for.
    pub fn definitions(&self) -> &Definitions {
        &self.state.definitions
    }

    /// The ledger as of the newest event that was read.
    pub fn ledger(&self) -> &dyn LedgerView {
        &self.state.inbox
    }

    /// The time of the newest event of the ledger.
    pub fn time(&self) -> Time {
        self.state.time
    }
}

/// Reports of the moment that was read last, whether or not the program requested them. `None` if the recording is too large for a report.
impl<R> Reader<R> {
    /// What each scope holds, and held at most.
    pub fn summary(&mut self) -> Option<Summary> {
        self.state.summary()
    }

    /// The live blocks, the largest first.
    pub fn live_blocks(&mut self) -> Option<Vec<LiveBlock>> {
        self.state.live_blocks()
    }

    /// What was live, as it is reported when a process ends.
    pub fn leaks(&mut self) -> Option<Leaks> {
        self.state.leaks()
    }

    /// The statistics of a device.
    pub fn memory_stats(&self, device: Device) -> MemoryStats {
        self.state.memory_stats(device)
    }

    /// Which allocations made the peak of a device; `None` also if there were none.
    pub fn device_peak(&mut self, device: Device) -> Option<PeakHolders> {
        self.state.device_peak(device)
    }

    /// The devices on which something was allocated.
    pub fn used_devices(&self) -> Vec<Device> {
        self.state.used_devices()
    }
}
