//! Reads the items of a file, one after the other.

use std::io::{self, Read};

use super::{
    budget::{Budget, Exceeded},
    bytes::Input,
    event::EventReader,
    item::{self, Item},
    record::{End, Records},
};

/// Reads the items of a file, one after the other.
#[derive(Debug)]
pub(super) struct Items<R> {
    records: Records<R>,
    /// What was spent on them.
    pub(super) budget: Budget,
    events: EventReader,
    /// The items of this record.
    plain: Vec<u8>,
    /// Where the next one begins.
    at: usize,
    /// Items that this version does not understand.
    pub(super) not_understood: u64,
    /// Texts that the writer has cut.
    pub(super) cut_texts: u64,
}

impl<R: Read> Items<R> {
    /// Those of these records, which may cost so much.
    pub(super) fn of(records: Records<R>, budget: Budget) -> Self {
        let (events, plain) = (EventReader::default(), Vec::new());
        Self { records, budget, events, plain, at: 0, not_understood: 0, cut_texts: 0 }
    }

    /// The next item, and how many bytes it has. `None` after the last.
    pub(super) fn next(&mut self) -> io::Result<Option<(Item, u64)>> {
        loop {
            if self.at >= self.plain.len() {
                if !self.records.next(&mut self.plain)? {
                    return Ok(None);
                }
                if let Err(limit) = self.budget.record(self.records.at(), self.plain.len() as u64) {
                    self.stop(limit);
                    return Ok(None);
                }
                self.at = 0;
                self.events.begin_record();
                continue;
            }
            if let Err(limit) = self.budget.item() {
                self.stop(limit);
                return Ok(None);
            }
            let first = self.plain[self.at];
            let mut input = Input::new(&self.plain[self.at..]);
            let item = item::get(&mut self.events, &mut input);
            let bytes = self.plain.len() - self.at - input.len();
            self.at += bytes;
            self.cut_texts += input.cut_texts;
            match item {
                Ok(Some(item)) => return Ok(Some((item, bytes as u64))),
                Ok(None) => self.not_understood += u64::from(first != item::OLD_POOL),
                // Where the next one begins is not known.
                Err(_) => {
                    self.not_understood += 1;
                    self.at = self.plain.len();
                }
            }
        }
    }

    /// Reads nothing more.
    pub(super) fn stop(&mut self, limit: Exceeded) {
        self.plain.clear();
        self.at = 0;
        self.records.stop(limit.in_words());
    }

    /// Where the bytes come from. If all of it was read, more may be added there, and is read then.
    pub(super) fn underlying(&mut self) -> &mut R {
        self.records.underlying()
    }

    pub(super) fn end(&self) -> Option<&End> {
        self.records.end()
    }

    /// Records of types that this version does not know.
    pub(super) fn unknown_records(&self) -> u64 {
        self.records.unknown
    }
}

/// All items of a file, and how it ends. Items that this version does not understand are left out.
///
/// # Errors
/// Of reading, and if this is no recording.
pub fn items_of(from: impl Read) -> io::Result<(Vec<Item>, End)> {
    let mut all = Vec::new();
    let end = for_each_item(from, |item| {
        all.push(item);
        Ok(())
    })?;
    Ok((all, end))
}

/// Hands over the items of a file, one after the other, and gives how it ends. Items that this version does not understand are left out.
///
/// # Errors
/// Of reading, of `each`, and if this is no recording.
pub fn for_each_item(from: impl Read, mut each: impl FnMut(Item) -> io::Result<()>) -> io::Result<End> {
    let mut items = Items::of(Records::new(from)?, Budget::default());
    while let Some((item, _)) = items.next()? {
        each(item)?;
    }
    Ok(items.end().cloned().unwrap_or(End::Complete))
}
