//! A snapshot as `torch.cuda.memory._snapshot()` makes it. What the driver gives is a segment with one block.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use super::{frames::functions, pickle::Pickle};
use crate::history::{ChangeKind, History};

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let mut snapshot = Snapshot { history, pickle: Pickle::new(out)?, frames: HashMap::new() };
    snapshot.pickle.dictionary()?;
    snapshot.pickle.mark()?;
    snapshot.pickle.text("segments")?;
    snapshot.segments()?;
    snapshot.pickle.text("device_traces")?;
    snapshot.traces()?;
    snapshot.pickle.text("allocator_settings")?;
    snapshot.pickle.dictionary()?;
    snapshot.pickle.set()?;
    snapshot.pickle.end()
}

/// The key of a block. Keys that are no addresses have their kind in the bits from 58 on: it is moved to those from 48 on, since the
/// web viewer has numbers of 53 bits.
const fn address(key: u64) -> u64 {
    key & ((1 << 48) - 1) | (key >> 58) << 48
}

struct Snapshot<'a> {
    history: &'a History,
    pickle: Pickle<'a>,
    /// The numbers of the lists of frames that were written, by origin.
    frames: HashMap<u32, u32>,
}

impl Snapshot<'_> {
    /// What is live at the end.
    fn segments(&mut self) -> io::Result<()> {
        let history = self.history;
        self.pickle.list()?;
        self.pickle.mark()?;
        let Some(last) = history.last_change() else { return self.pickle.append() };
        let live = history.blocks_after(last);
        let on_device = live.filter(|number| history.origin(&history.blocks[*number as usize]).kind.is_on_device());
        for (written, number) in on_device.enumerate() {
            self.pickle.append_part(written)?;
            let block = &history.blocks[number as usize];
            let bytes = history.bytes_after(number, last);
            self.pickle.dictionary()?;
            self.pickle.mark()?;
            let device = history.devices[usize::from(block.device)].device.ordinal;
            for (name, value) in [
                ("device", device.into()),
                ("address", address(block.key)),
                ("total_size", bytes),
                ("allocated_size", bytes),
                ("active_size", bytes),
                ("requested_size", bytes),
                ("stream", 0),
            ] {
                self.entry(name, value)?;
            }
            self.pickle.text("segment_type")?;
            self.pickle.text("large")?;
            self.frames(block.origin)?;
            self.pickle.text("blocks")?;
            self.pickle.list()?;
            self.pickle.mark()?;
            self.pickle.dictionary()?;
            self.pickle.mark()?;
            for (name, value) in [("address", address(block.key)), ("size", bytes), ("requested_size", bytes)] {
                self.entry(name, value)?;
            }
            self.pickle.text("state")?;
            self.pickle.text("active_allocated")?;
            self.frames(block.origin)?;
            self.pickle.set()?;
            self.pickle.append()?;
            self.pickle.set()?;
        }
        self.pickle.append()
    }

    /// What happened on each device, by its number.
    fn traces(&mut self) -> io::Result<()> {
        let devices = self.history.devices.iter().map(|device| device.device.ordinal + 1).max().unwrap_or(0);
        self.pickle.list()?;
        self.pickle.mark()?;
        (0..devices).try_for_each(|device| self.trace(device))?;
        self.pickle.append()
    }

    fn trace(&mut self, device: u32) -> io::Result<()> {
        let history = self.history;
        // Since 1970, as torch has it.
        let began = u64::try_from(history.definitions().process().began.as_micros()).unwrap_or(0);
        self.pickle.list()?;
        self.pickle.mark()?;
        let mut written = 0;
        for change in &history.changes {
            let block = &history.blocks[change.block as usize];
            let is_of = history.devices[usize::from(block.device)].device.ordinal == device;
            if !is_of || !history.origin(block).kind.is_on_device() {
                continue;
            }
            let actions: &[&str] = match change.kind {
                ChangeKind::Alloc | ChangeKind::FreeFailed => &["segment_alloc", "alloc"],
                ChangeKind::Free | ChangeKind::FreeWithContext | ChangeKind::FreeMissed => {
                    &["free_requested", "free_completed", "segment_free"]
                }
                // A part of a block cannot be freed there.
                ChangeKind::Shrink => continue,
            };
            for action in actions {
                self.pickle.append_part(written)?;
                written += 1;
                self.pickle.dictionary()?;
                self.pickle.mark()?;
                self.pickle.text("action")?;
                self.pickle.text(action)?;
                let time = began + change.time / 1000;
                for (name, value) in
                    [("addr", address(block.key)), ("size", block.bytes), ("stream", 0), ("time_us", time)]
                {
                    self.entry(name, value)?;
                }
                self.frames(block.origin)?;
                self.pickle.set()?;
            }
        }
        self.pickle.append()
    }

    fn entry(&mut self, name: &str, value: u64) -> io::Result<()> {
        self.pickle.text(name)?;
        self.pickle.number(value)
    }

    /// The stack, the innermost function first, and after it the scopes.
    fn frames(&mut self, origin: u32) -> io::Result<()> {
        self.pickle.text("frames")?;
        if let Some(number) = self.frames.get(&origin) {
            return self.pickle.get(*number);
        }
        let known = &self.history.origins[origin as usize];
        self.pickle.list()?;
        self.pickle.mark()?;
        let scopes = known.path.iter().rev().map(|scope| (scope.clone(), "scope".to_owned(), 0));
        let functions =
            functions(self.history, known).into_iter().map(|frame| (frame.function, frame.file, frame.line));
        for (name, file, line) in functions.chain(scopes) {
            self.pickle.dictionary()?;
            self.pickle.mark()?;
            self.pickle.text("name")?;
            self.pickle.text(&name)?;
            self.pickle.text("filename")?;
            self.pickle.text(&file)?;
            self.entry("line", line.into())?;
            self.pickle.set()?;
        }
        self.pickle.append()?;
        let number = self.pickle.memoize()?;
        self.frames.insert(origin, number);
        Ok(())
    }
}
