//! Reads a recording while its program writes it.

use std::{
    collections::VecDeque,
    io::{self, Read},
};

use super::{
    budget::Budget,
    definitions::Definitions,
    event::RecordedEvent,
    item::{Item, SymbolsDefinition},
    items::Items,
    reader::{Reader, Step},
    record::{End, FILE_HEADER, Records, check_header, length_of},
};
use crate::ledger::Observer;

/// What a symbol takes, about.
const SYMBOL_BYTES: u64 = 256;

/// The bytes of a file that becomes longer. Only complete records are read from it.
#[derive(Debug, Default)]
pub struct Growing {
    has_header: bool,
    records: VecDeque<u8>,
    /// The beginning of a record whose end is not there yet.
    rest: Vec<u8>,
}

impl Read for Growing {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.records.read(to)
    }
}

impl Growing {
    /// Adds bytes that follow those before.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.rest.extend_from_slice(bytes);
        let mut at = 0;
        if !self.has_header {
            let Some(header) = self.rest.first_chunk::<FILE_HEADER>() else { return Ok(()) };
            check_header(header)?;
            self.has_header = true;
            at = FILE_HEADER;
        }
        while let Some(length) = length_of(&self.rest[at..]) {
            self.records.extend(&self.rest[at..at + length]);
            at += length;
        }
        self.rest.drain(..at);
        Ok(())
    }
}

/// Reads a recording as it becomes longer. What is read is applied to a ledger; reports that the program requested are left out.
///
/// What an event means is in the file before it, so nothing is read twice. The functions at the addresses of stacks are an exception: they are
/// added when the program has ended.
pub type Follower = Reader<Growing>;

impl Default for Follower {
    fn default() -> Self {
        let records = Records::after_header(Growing::default());
        Self::of(Items::of(records, Budget::default()), Definitions::default(), true)
    }
}

impl Follower {
    /// Reads all that is there.
    ///
    /// # Errors
    /// Of reading, and of the kind [`InvalidData`](io::ErrorKind::InvalidData) if this is no recording, or one of a version that is
    /// too new, or a damaged one.
    pub fn read(&mut self, from: impl Read) -> io::Result<()> {
        self.read_observed(from, &mut (), |_, _, ()| {})
    }

    /// Like [`read`](Self::read). Calls `each` after each event was applied; the observer was told before what the event does to blocks.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub fn read_observed<O: Observer>(
        &mut self,
        mut from: impl Read,
        observer: &mut O,
        mut each: impl FnMut(&Self, &RecordedEvent, &mut O),
    ) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => self.add(&buffer[..read], observer, &mut each)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Adds bytes that follow those before.
    fn add<O: Observer>(
        &mut self,
        bytes: &[u8],
        observer: &mut O,
        each: &mut impl FnMut(&Self, &RecordedEvent, &mut O),
    ) -> io::Result<()> {
        self.items.underlying().add(bytes)?;
        while let Some(step) = self.step_observed(observer)? {
            if let Step::Event(event, _) = step {
                each(self, &event, observer);
            }
        }
        let text = match self.end() {
            Some(End::Damaged { at, why }) => format!("it is damaged at byte {at}: {why}"),
            Some(End::AboveLimit { at, limit }) => format!("what follows byte {at} is not read: {limit}"),
            _ => return Ok(()),
        };
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// Adds what an address stands for, which a recording has only after its program has ended.
    pub fn add_symbols(&mut self, symbols: SymbolsDefinition) {
        let bytes = symbols.symbols.len() as u64 * SYMBOL_BYTES;
        self.define(Item::Symbols(symbols), bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, ThreadId},
        recording::{Process, Skipped, Writer, item::ThreadDefinition},
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
