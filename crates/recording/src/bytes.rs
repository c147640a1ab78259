//! Writes and reads numbers and text as bytes: LEB128 for integers, and a length before each text.

use std::{fmt, io};

/// The error for bytes that contradict the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl From<Malformed> for io::Error {
    fn from(error: Malformed) -> Self {
        Self::new(io::ErrorKind::InvalidData, error.0)
    }
}

pub(super) type Result<T> = std::result::Result<T, Malformed>;

/// The largest number of bytes of a text. A longer text is truncated when it is written.
pub(super) const LONGEST_TEXT: usize = 1 << 14;

/// Marks a truncated text, so that a reader does not take it for the program's own text.
const CUT: &str = "… (cut)";

/// Appends a number: seven bits in each byte, the lowest first. The top bit is set if more bytes follow.
#[inline]
pub(super) fn put_number(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are meant")]
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    #[expect(clippy::cast_possible_truncation, reason = "it is below 128")]
    to.push(number as u8);
}

/// Writes a difference as a number that is small if the difference is small: 0, -1, 1, -2 are 0, 1, 2, 3.
#[inline]
pub(super) fn put_difference(to: &mut Vec<u8>, now: u64, before: u64) {
    let difference = now.wrapping_sub(before).cast_signed();
    put_number(to, ((difference << 1) ^ (difference >> 63)).cast_unsigned());
}

/// Appends a text after its length.
pub(super) fn put_text(to: &mut Vec<u8>, text: &str) {
    let (text, end) = if text.len() > LONGEST_TEXT {
        (&text[..floor_char_boundary(text, LONGEST_TEXT - CUT.len())], CUT)
    } else {
        (text, "")
    };
    put_number(to, (text.len() + end.len()) as u64);
    to.extend_from_slice(text.as_bytes());
    to.extend_from_slice(end.as_bytes());
}

/// `str::floor_char_boundary` is more recent than the oldest supported compiler.
fn floor_char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// The remaining bytes to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    /// The number of texts so far that the writer truncated.
    pub(super) cut_texts: u64,
    /// The number of items so far that this version does not understand.
    pub(super) not_understood: u64,
}

impl<'a> Input<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, cut_texts: 0, not_understood: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn starts_with(&self, byte: u8) -> bool {
        self.bytes.first() == Some(&byte)
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8> {
        let (first, rest) = self.bytes.split_first().ok_or(Malformed("it ends within an item"))?;
        self.bytes = rest;
        Ok(*first)
    }

    #[inline]
    pub(super) fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(Malformed("a number is above 2^64"));
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed("a number has more than ten bytes"))
    }

    /// Reads a number of at most 32 bits.
    pub(super) fn small(&mut self) -> Result<u32> {
        self.number()?.try_into().map_err(|_| Malformed("a number is above 2^32"))
    }

    #[inline]
    pub(super) fn difference(&mut self, before: u64) -> Result<u64> {
        let number = self.number()?;
        let difference = (number >> 1) ^ (number & 1).wrapping_neg();
        Ok(before.wrapping_add(difference))
    }

    /// Reads the next `length` bytes.
    pub(super) fn part(&mut self, length: u64) -> Result<Self> {
        let length = usize::try_from(length).ok().filter(|length| *length <= self.bytes.len());
        let (part, rest) = self.bytes.split_at(length.ok_or(Malformed("a length exceeds the remaining bytes"))?);
        self.bytes = rest;
        Ok(Self::new(part))
    }

    pub(super) fn text(&mut self) -> Result<String> {
        let length = self.number()?;
        if length > LONGEST_TEXT as u64 {
            return Err(Malformed("a text is longer than a text can be"));
        }
        let text = String::from_utf8_lossy(self.part(length)?.bytes).into_owned();
        // A truncated text is at most 3 bytes below the limit, because no character is split.
        self.cut_texts += u64::from(text.len() > LONGEST_TEXT - 4 && text.ends_with(CUT));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_differences_take_one_byte() {
        for (now, before) in [(5, 5), (5, 6), (64, 1), (1, 64), (63, 0)] {
            let mut bytes = Vec::new();
            put_difference(&mut bytes, now, before);
            assert_eq!(bytes.len(), 1, "{now} after {before}");
        }
    }
}
