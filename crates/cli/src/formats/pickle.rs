//! Writes pickles of protocol 4. Values that occur often are written once and then named by number: `serde-pickle` does not do that,
//! its files are 26 times as large, and it does not read such files.

use std::{
    collections::HashMap,
    io::{self, Write},
};

/// This many bytes are written at once.
const FULL: usize = 1 << 16;

pub(super) struct Pickle<'a> {
    out: &'a mut dyn Write,
    /// The bytes that are not written yet.
    buffer: Vec<u8>,
    texts: HashMap<String, u32>,
    /// The numbers of texts that each event has.
    words: Vec<(&'static str, u32)>,
    memo: u32,
}

impl<'a> Pickle<'a> {
    pub(super) fn new(out: &'a mut dyn Write) -> io::Result<Self> {
        let mut pickle =
            Self { out, buffer: Vec::with_capacity(2 * FULL), texts: HashMap::new(), words: Vec::new(), memo: 0 };
        pickle.put(&[0x80, 4])?;
        Ok(pickle)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() < FULL { Ok(()) } else { self.write() }
    }

    #[cold]
    fn write(&mut self) -> io::Result<()> {
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Writes a text that is repeated, such as the name of a field.
    pub(super) fn word(&mut self, word: &'static str) -> io::Result<()> {
        if let Some((_, number)) = self.words.iter().find(|(known, _)| std::ptr::eq(*known, word)) {
            return self.get(*number);
        }
        self.text(word)?;
        if let Some(number) = self.texts.get(word) {
            self.words.push((word, *number));
        }
        Ok(())
    }

    /// Writes a text, in full only the first time.
    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(number) = self.texts.get(text) {
            return self.get(*number);
        }
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        self.put(b"X")?;
        self.put(&length.to_le_bytes())?;
        self.put(text.as_bytes())?;
        let number = self.memoize()?;
        self.texts.insert(text.to_owned(), number);
        Ok(())
    }

    pub(super) fn number(&mut self, number: u64) -> io::Result<()> {
        match u32::try_from(number) {
            Ok(number @ 0..=0xff) => self.put(&[b'K', number.to_le_bytes()[0]]),
            // This opcode has a signed number of 32 bits.
            Ok(number) if number <= i32::MAX.unsigned_abs() => {
                self.put(b"J")?;
                self.put(&number.to_le_bytes())
            }
            // This opcode has a signed number in as many bytes as it needs.
            _ => {
                let bytes = number.to_le_bytes();
                let used = 8 - number.leading_zeros() as usize / 8;
                let needs_sign = bytes[used - 1] >= 0x80;
                let length = u8::try_from(used + usize::from(needs_sign)).unwrap_or(9);
                self.put(&[0x8a, length])?;
                self.put(&bytes[..used])?;
                if needs_sign { self.put(&[0]) } else { Ok(()) }
            }
        }
    }

    /// Writes a dictionary without entries.
    pub(super) fn empty_dictionary(&mut self) -> io::Result<()> {
        self.put(b"}")
    }

    /// Begins a dictionary. [`set`](Self::set) adds the values that are written until then: a name, its value, the next
    /// name.
    pub(super) fn begin_dictionary(&mut self) -> io::Result<()> {
        self.put(b"}(")
    }

    /// Begins a list. [`append`](Self::append) adds the values that are written until then.
    pub(super) fn begin_list(&mut self) -> io::Result<()> {
        self.put(b"](")
    }

    /// Adds a part of a long list: like Python, at most 1,000 values at once. The web viewer cannot add 100,000.
    pub(super) fn append_part(&mut self, values: usize) -> io::Result<()> {
        if values > 0 && values.is_multiple_of(1000) { self.put(b"e(") } else { Ok(()) }
    }

    pub(super) fn set(&mut self) -> io::Result<()> {
        self.put(b"u")
    }

    pub(super) fn append(&mut self) -> io::Result<()> {
        self.put(b"e")
    }

    /// Gives the value on top of the stack a number.
    pub(super) fn memoize(&mut self) -> io::Result<u32> {
        self.put(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    /// Writes the value with this number.
    pub(super) fn get(&mut self, number: u32) -> io::Result<()> {
        if let Ok(number) = u8::try_from(number) {
            return self.put(&[b'h', number]);
        }
        self.put(b"j")?;
        self.put(&number.to_le_bytes())
    }

    pub(super) fn end(mut self) -> io::Result<()> {
        self.put(b".")?;
        self.write()
    }
}
