//! Writes JSON that is safe to print on a terminal.

use std::io::{self, Write};

use crate::model::is_printable;

/// A writer between a JSON serializer and its output. Control characters of terminals become escapes such as `\u009b`, which a
/// parser reads as the same string. JSON itself requires this only for characters below a space.
#[derive(Debug)]
pub struct JsonEscapes<W>(pub W);

impl<W: Write> Write for JsonEscapes<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_plain = bytes.iter().all(|byte| byte.is_ascii() && *byte != 0x7f);
        // The JSON writer writes each part of a string in one call. A piece that is not text is left unchanged.
        let (false, Ok(mut text)) = (is_plain, std::str::from_utf8(bytes)) else { return self.0.write(bytes) };
        // Line breaks and spaces occur only between values, not in strings.
        let acts = |c: char| c >= '\u{7f}' && !is_printable(c);
        while let Some(at) = text.find(acts) {
            let (before, rest) = text.split_at(at);
            self.0.write_all(before.as_bytes())?;
            let mut rest = rest.chars();
            for unit in rest.next().into_iter().flat_map(|c| c.encode_utf16(&mut [0; 2]).to_vec()) {
                write!(self.0, "\\u{unit:04x}")?;
            }
            text = rest.as_str();
        }
        self.0.write_all(text.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_the_same_and_a_terminal_shows_them() {
        for (json, escaped) in [
            ("{\"a\": \"é λ\"}\n", "{\"a\": \"é λ\"}\n"),
            ("\"\u{7f}\u{9b}x\u{202e}\"", "\"\\u007f\\u009bx\\u202e\""),
            ("\"\u{e0041}\"", "\"\\udb40\\udc41\""),
        ] {
            let mut out = Vec::new();
            JsonEscapes(&mut out).write_all(json.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), escaped);
        }
    }
}
