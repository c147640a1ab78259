//! Makes names safe to print: a terminal shows them and does not interpret them.

use std::{borrow::Cow, fmt::Write};

/// Returns whether a terminal only shows this character. Others move its cursor, change the direction of text, or are invisible.
pub fn is_printable(c: char) -> bool {
    let acts = c.is_control()
        || matches!(c,
            // Characters without width, line and paragraph separators, and those that change the direction of text.
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            // Tags are an invisible copy of ASCII.
            | '\u{e0000}'..='\u{e007f}');
    !acts
}

/// Returns text on one line. Characters that are not printable are escaped: `\n`, `\u{1b}`.
///
/// All text for people uses this for names that gpumem did not choose. Formats for programs keep names as they are.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_printable) {
        return Cow::Borrowed(text);
    }
    let mut line = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_printable(c) {
            line.push(c);
        } else {
            let _ = write!(line, "{}", c.escape_default());
        }
    }
    Cow::Owned(line)
}

/// Shortens a text to about this many characters, from its start and its end. A message that quotes a user's value must stay
/// readable.
pub fn bounded(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most || text.chars().nth(most).is_none() {
        return Cow::Borrowed(text);
    }
    let first: String = text.chars().take(most / 2).collect();
    let last = text.char_indices().rev().nth(most - most / 2 - 1).map_or("", |(at, _)| &text[at..]);
    Cow::Owned(format!("{first} … {last}"))
}

/// Returns a value in quotes, shortened, but recognizable.
pub fn quoted(value: &str) -> String {
    const MOST: usize = 64;
    format!("`{}`", bounded(value, MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_a_long_text_are_kept() {
        for (text, most, expected) in
            [("", 4, ""), ("abcd", 4, "abcd"), ("éééé", 4, "éééé"), ("abcde", 4, "ab … de"), ("ééabcéé", 5, "éé … céé")]
        {
            assert_eq!(bounded(text, most), expected, "{text}");
        }
        assert_eq!(quoted("off"), "`off`");
        assert!(quoted(&"é".repeat(1 << 20)).chars().count() < 80);
    }

    #[test]
    fn what_acts_is_an_escape() {
        for (text, line) in [
            ("", ""),
            ("λ 漢字 é \\n", "λ 漢字 é \\n"),
            ("a\nb\r\tc", "a\\nb\\r\\tc"),
            ("\0\u{1b}[31m\u{7f}\u{85}\u{9b}", "\\u{0}\\u{1b}[31m\\u{7f}\\u{85}\\u{9b}"),
            ("\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}", "\\u{61c}\\u{200e}\\u{200f}\\u{2028}\\u{2029}"),
            ("\u{202a}\u{202e}\u{2066}\u{2069}", "\\u{202a}\\u{202e}\\u{2066}\\u{2069}"),
            ("\u{200b}\u{2060}\u{feff}\u{ad}\u{e0041}", "\\u{200b}\\u{2060}\\u{feff}\\u{ad}\\u{e0041}"),
        ] {
            assert_eq!(one_line(text), line);
        }
    }
}
