//! Reads the items of a file, one after the other.

use std::io::{self, Read};

use super::{
    budget::{Budget, Exceeded},
    bytes::Input,
    event::{EventReader, RecordedEvent, is_short},
    item::{self, Item},
    record::{End, Records},
};

/// The next part of a file. Events are separate because there may be millions of them, and the largest other item is several
/// times their size.
pub(super) enum Next {
    Event(RecordedEvent),
    /// Any other item, and its number of bytes.
    Other(Box<Item>, u64),
}

impl From<Next> for Item {
    fn from(next: Next) -> Self {
        match next {
            Next::Event(event) => Self::Event(event),
            Next::Other(item, _) => *item,
        }
    }
}

/// Reads the items of a file, one after the other.
#[derive(Debug)]
pub(super) struct Items<R> {
    records: Records<R>,
    /// The cost of the items so far.
    pub(super) budget: Budget,
    events: EventReader,
    /// The decompressed items of the current record.
    plain: Vec<u8>,
    /// The offset at which the next item starts.
    at: usize,
    /// The number of items that this version does not understand.
    pub(super) not_understood: u64,
    /// The number of texts that the writer truncated.
    pub(super) cut_texts: u64,
}

impl<R: Read> Items<R> {
    /// Reads the items of these records, within this budget.
    pub(super) fn of(records: Records<R>, budget: Budget) -> Self {
        let (events, plain) = (EventReader::default(), Vec::new());
        Self { records, budget, events, plain, at: 0, not_understood: 0, cut_texts: 0 }
    }

    /// Returns the next item; `None` after the last one.
    pub(super) fn next(&mut self) -> io::Result<Option<Next>> {
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
                self.events.start_record();
                continue;
            }
            if let Err(limit) = self.budget.item() {
                self.stop(limit);
                return Ok(None);
            }
            let first = self.plain[self.at];
            let start = self.at + usize::from(is_short(first));
            let mut input = Input::new(&self.plain[start..]);
            let next = if is_short(first) {
                self.events.get_short(first, &mut input).map(|event| Some(Next::Event(event)))
            } else {
                item::get(&mut self.events, &mut input).map(|item| {
                    Some(match item? {
                        Item::Event(event) => Next::Event(event),
                        item => Next::Other(Box::new(item), (self.plain.len() - start - input.len()) as u64),
                    })
                })
            };
            self.at = self.plain.len() - input.len();
            self.cut_texts += input.cut_texts;
            self.not_understood += input.not_understood;
            match next {
                Ok(Some(next)) => return Ok(Some(next)),
                Ok(None) => {}
                // The start of the next item is not known.
                Err(_) => {
                    self.not_understood += 1;
                    self.at = self.plain.len();
                }
            }
        }
    }

    /// Stops reading.
    pub(super) fn stop(&mut self, limit: Exceeded) {
        self.plain.clear();
        self.at = 0;
        self.records.stop(limit.in_words());
    }

    /// Returns the source of the bytes. At its end, the caller may add more bytes, which are read next.
    pub(super) fn underlying(&mut self) -> &mut R {
        self.records.underlying()
    }

    /// See [`Records::rewind`].
    pub(super) fn rewind(&mut self) -> &mut R {
        self.records.rewind()
    }

    /// Returns the number of bytes up to the end of the last complete record.
    pub(super) fn bytes(&self) -> u64 {
        self.records.at()
    }

    pub(super) fn end(&self) -> Option<&End> {
        self.records.end()
    }

    /// Returns the number of records of types that this version does not know.
    pub(super) fn unknown_records(&self) -> u64 {
        self.records.unknown
    }
}

/// Reads all items of a file, and where reading ended. Items that this version does not understand are left out.
///
/// # Errors
/// Returns an error if reading fails, or if the data is not a recording.
pub fn items_of(from: impl Read) -> io::Result<(Vec<Item>, End)> {
    let mut all = Vec::new();
    let end = for_each_item(from, |item| {
        all.push(item);
        Ok(())
    })?;
    Ok((all, end))
}

/// Calls `each` with every item of a file, and returns where reading ended. Items that this version does not understand are left out.
///
/// # Errors
/// Returns an error if reading or `each` fails, or if the data is not a recording.
pub fn for_each_item(from: impl Read, mut each: impl FnMut(Item) -> io::Result<()>) -> io::Result<End> {
    let mut items = Items::of(Records::new(from)?, Budget::default());
    while let Some(next) = items.next()? {
        each(next.into())?;
    }
    Ok(items.end().cloned().unwrap_or(End::Complete))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{pack, write_header};

    #[test]
    fn items_of_a_later_version_and_malformed_ones_are_counted_and_the_rest_is_read() {
        let plain = [
            // An item of an unknown type.
            &[99, 2, 1, 2][..],
            // An item `missed` with one more field.
            &[16, 2, 7, 5],
            // An event that is not needed any more.
            &[1, 7, 1, 0, 0, 0, 24, 1, 2],
            // An event with an unknown code.
            &[1, 5, 1, 0, 0, 0, 200],
            // Numbers without an end, above 64 bits, and above the 32 bits of a thread.
            &[16, 1, 0x80],
            &[16, 10, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
            &[14, 5, 0xff, 0xff, 0xff, 0xff, 0x1f],
            // A pool whose name has 2^60 bytes.
            &[25, 10, 1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10],
            // An event `untracked` with one more field.
            &[1, 6, 1, 0, 0, 0, 4, 8],
        ]
        .concat();
        let (mut file, mut record) = (Vec::new(), Vec::new());
        write_header(&mut file).unwrap();
        pack(&plain, 4, &mut record);
        file.extend(record);
        let mut items = Items::of(Records::new(&*file).unwrap(), Budget::default());
        assert!(matches!(items.next().unwrap().map(Item::from), Some(Item::Missed(7))));
        let Some(Next::Event(event)) = items.next().unwrap() else { panic!("it is an event") };
        assert_eq!(event.kind, gpumem_core::model::EventKind::Untracked);
        assert!(items.next().unwrap().is_none());
        assert_eq!((items.not_understood, items.end()), (6, Some(&End::Complete)));
    }
}
