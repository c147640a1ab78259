//! Reads a recording while its program writes it.

use std::{
    collections::VecDeque,
    io::{self, Read},
};

use super::{
    budget::Budget,
    check::Rejection,
    definitions::Definitions,
    item::{Item, SymbolsDefinition},
    items::Items,
    reader::Skipped,
    record::{End, FILE_HEADER, length_of},
    state::State,
};
use crate::{
    derive::LedgerView,
    model::{Device, Time},
    report::{PeakHolders, Summary},
};

/// What a symbol takes, about.
const SYMBOL_BYTES: u64 = 256;

/// Reads a recording as it becomes longer. What is read is applied to a ledger; reports that the program requested are left out.
///
/// What an event means is in the file before it, so nothing is read twice. The functions at the addresses of stacks are an exception: they are
/// added when the program has ended.
#[derive(Debug)]
pub struct Follower {
    /// The beginning of a record whose end is not there yet.
    rest: Vec<u8>,
    items: Option<Items<VecDeque<u8>>>,
    state: State,
    skipped: Skipped,
}

impl Default for Follower {
    fn default() -> Self {
        let state = State::new(Definitions::default());
        Self { rest: Vec::new(), items: None, state, skipped: Skipped::default() }
    }
}

impl Follower {
    /// Reads all that is there.
    ///
    /// # Errors
    /// Of reading, and of the kind [`InvalidData`](io::ErrorKind::InvalidData) if this is no recording, or one of a version that is
    /// too new, or a damaged one.
    pub fn read(&mut self, mut from: impl Read) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => self.add(&buffer[..read])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Adds bytes that follow those before.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.rest.extend_from_slice(bytes);
        let mut at = 0;
        if self.items.is_none() {
            if self.rest.len() < FILE_HEADER {
                return Ok(());
            }
            at = FILE_HEADER;
            self.items = Some(Items::new(self.rest[..at].iter().copied().collect())?);
        }
        let Some(items) = &mut self.items else { return Ok(()) };
        while let Some(length) = length_of(&self.rest[at..]) {
            items.more().extend(&self.rest[at..at + length]);
            at += length;
        }
        self.rest.drain(..at);
        while let Some((item, bytes)) = items.next()? {
            let budget = &mut items.budget;
            let applied = match item {
                Item::Event(event) => self.state.apply(&event, budget, &mut ()).map(drop),
                Item::ThreadReused(thread) => self.state.reuse_thread(thread, budget),
                Item::Missed(count) => self.state.miss(count, budget, &mut ()),
                Item::PeakReleased(scope) => {
                    self.state.release_peak(scope);
                    Ok(())
                }
                item => {
                    // Without effect unless it is a definition.
                    self.state.definitions.add(item, bytes, budget);
                    Ok(())
                }
            };
            match applied {
                Ok(()) => {}
                Err(Rejection::Contradiction) => self.skipped.contradictions += 1,
                Err(Rejection::Limit) => self.skipped.above_limits += 1,
                Err(Rejection::Exceeded(limit)) => items.stop(limit),
            }
        }
        match items.end() {
            Some(End::Damaged { at, why }) => {
                let text = format!("it is damaged at byte {at}: {why}");
                Err(io::Error::new(io::ErrorKind::InvalidData, text))
            }
            Some(End::AboveLimit { at, limit }) => {
                let text = format!("what follows byte {at} is not read: {limit}");
                Err(io::Error::new(io::ErrorKind::InvalidData, text))
            }
            _ => Ok(()),
        }
    }

    /// What a report that is asked for may cost.
    fn budget(&self) -> Budget {
        self.items.as_ref().map(|items| items.budget.of_one_report()).unwrap_or_default()
    }

    /// Adds what an address stands for, which a recording has only after its program has ended.
    pub fn add_symbols(&mut self, symbols: SymbolsDefinition) {
        let bytes = symbols.symbols.len() as u64 * SYMBOL_BYTES;
        let mut none = Budget::default();
        let budget = self.items.as_mut().map_or(&mut none, |items| &mut items.budget);
        self.state.definitions.add(Item::Symbols(symbols), bytes, budget);
    }

    /// What numbers stand for.
    pub fn definitions(&self) -> &Definitions {
        &self.state.definitions
    }

    /// The ledger as of the newest event.
    pub fn ledger(&self) -> &dyn LedgerView {
        &self.state.inbox
    }

    /// The time of the newest event of the ledger.
    pub fn time(&self) -> Time {
        self.state.time
    }

    /// What was left out.
    pub fn skipped(&self) -> Skipped {
        let missed = self.state.missed;
        Skipped {
            missed,
            contradictions: self.skipped.contradictions,
            above_limits: self.skipped.above_limits,
            ..self.skipped
        }
    }

    /// What each scope holds, and held at most. `None` if there are too many.
    pub fn summary(&mut self) -> Option<Summary> {
        self.state.summary(&mut self.budget())
    }

    /// Which allocations made the peak of a device so far; `None` also if there were none.
    pub fn device_peak(&mut self, device: Device) -> Option<PeakHolders> {
        self.state.device_peak(device, &mut self.budget())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        model::{Block, Bytes, EventKind, Family, Key, MemKind, ThreadId},
        recording::{Process, RecordedEvent, Writer, item::ThreadDefinition},
    };

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn recording() -> Vec<u8> {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file).unwrap();
        let process = Process { pid: 17, ..Process::default() };
        writer.write(&Item::Process(process)).unwrap();
        writer.write(&Item::Thread(ThreadDefinition { thread: ThreadId(1), os_id: 5, name: None })).unwrap();
        for number in 1..=60 {
            let key = Key::from_raw(512 * (1 + number / 2));
            let kind = if number % 2 == 0 {
                EventKind::Alloc { key, block: Block::new(DEVICE, Bytes::new(number), MemKind::Device) }
            } else {
                EventKind::Free { key: Key::from_raw(512 * (1 + (number - 1) / 2)), block: None }
            };
            let time = Duration::from_millis(number);
            if number > 1 {
                writer
                    .write_event(&RecordedEvent { number: number - 1, ticks: number, time, thread: ThreadId(1), kind })
                    .unwrap();
            }
            if number % 7 == 0 {
                writer.flush().unwrap();
            }
        }
        writer.flush().unwrap();
        drop(writer);
        file
    }

    #[test]
    fn the_ledger_is_the_same_however_the_file_grows() {
        let file = recording();
        let result = |pieces: usize| {
            let mut follower = Follower::default();
            for piece in file.chunks(pieces) {
                follower.read(piece).unwrap();
            }
            let stats = follower.ledger().stats();
            assert_eq!(follower.skipped(), Skipped::default());
            assert_eq!(follower.definitions().process().pid, 17);
            (stats[0].on_device.bytes.current, stats[0].on_device.bytes.peak, follower.time())
        };
        let whole = result(file.len());
        assert_eq!(whole, (60, 60, Duration::from_millis(60)));
        for pieces in [1, 7, 16, 100] {
            assert_eq!(result(pieces), whole, "{pieces}");
        }
    }

    #[test]
    fn what_is_no_recording_or_damaged_is_an_error() {
        assert!(Follower::default().read(&b"this is no recording"[..]).is_err());
        let mut file = recording();
        let at = file.len() - 3;
        file[at] ^= 1;
        let error = Follower::default().read(&file[..]).unwrap_err();
        assert!(error.to_string().starts_with("it is damaged at byte "), "{error}");
        // A length that no record has is not waited for.
        let mut file = recording()[..FILE_HEADER].to_vec();
        file.extend([1, 0, 0, 0, 255, 255, 255, 255]);
        file.resize(1 << 21, 0);
        assert!(Follower::default().read(&file[..]).is_err());
    }
}
