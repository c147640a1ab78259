//! JSON inside a script of the page.

use std::io::{self, Write};

use gpumem_core::model::one_line;
use serde_json::ser::{CharEscape, CompactFormatter, Formatter};

/// Writes JSON for a script of the page. The page is text for people, so its names are shown as in a terminal.
pub(super) struct InScript;

impl Formatter for InScript {
    fn write_string_fragment<W: ?Sized + Write>(&mut self, out: &mut W, fragment: &str) -> io::Result<()> {
        // The backslashes come from `one_line`: JSON's own escapes are not part of a fragment. Only `<` could end the
        // script.
        let text = one_line(fragment).replace('\\', "\\\\").replace('<', "\\u003c");
        out.write_all(text.as_bytes())
    }

    fn write_char_escape<W: ?Sized + Write>(&mut self, out: &mut W, escape: CharEscape) -> io::Result<()> {
        let control = match escape {
            CharEscape::Quote | CharEscape::ReverseSolidus | CharEscape::Solidus => {
                return CompactFormatter.write_char_escape(out, escape);
            }
            CharEscape::Backspace => 8,
            CharEscape::Tab => b'\t',
            CharEscape::LineFeed => b'\n',
            CharEscape::FormFeed => 12,
            CharEscape::CarriageReturn => b'\r',
            CharEscape::AsciiControl(control) => control,
        };
        self.write_string_fragment(out, char::from(control).encode_utf8(&mut [0; 1]))
    }
}
