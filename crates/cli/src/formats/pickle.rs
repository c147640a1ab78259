//! Writes pickles of protocol 4. Values that occur often are written once and then referred to by number.
//! `serde-pickle` cannot do that: its files are 26 times as large, and it does not read files that do it.

use std::{
    collections::HashMap,
    io::{self, Write},
};

/// The buffer is written out when it contains this many bytes.
const FULL: usize = 1 << 16;

pub(super) struct Pickle<'a> {
    out: &'a mut dyn Write,
    /// The bytes that are not written out yet.
    buffer: Vec<u8>,
    texts: HashMap<String, u32>,
    /// The memo numbers of words, which each event repeats.
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

    /// Writes a text: in full the first time, and then by number.
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
            // This opcode takes a signed 32-bit number.
            Ok(number) if number <= i32::MAX.unsigned_abs() => {
                self.put(b"J")?;
                self.put(&number.to_le_bytes())
            }
            // This opcode takes a signed number of as many bytes as needed.
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

    /// Writes an empty dictionary.
    pub(super) fn empty_dictionary(&mut self) -> io::Result<()> {
        self.put(b"}")
    }

    /// Starts a dictionary. Write its names and values in turn, and then call [`set`](Self::set) to add them.
    pub(super) fn start_dictionary(&mut self) -> io::Result<()> {
        self.put(b"}(")
    }

    /// Starts a list. Write its values, and then call [`append`](Self::append) to add them.
    pub(super) fn start_list(&mut self) -> io::Result<()> {
        self.put(b"](")
    }

    /// Adds a part of a long list. Like Python, callers add at most 1,000 values at once: the web viewer cannot add
    /// 100,000.
    pub(super) fn append_part(&mut self, values: usize) -> io::Result<()> {
        if values > 0 && values.is_multiple_of(1000) { self.put(b"e(") } else { Ok(()) }
    }

    pub(super) fn set(&mut self) -> io::Result<()> {
        self.put(b"u")
    }

    pub(super) fn append(&mut self) -> io::Result<()> {
        self.put(b"e")
    }

    /// Gives a memo number to the value on top of the stack.
    pub(super) fn memoize(&mut self) -> io::Result<u32> {
        self.put(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    /// Writes the value with this memo number.
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
