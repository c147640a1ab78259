//! Breaks text into lines that fit the width of a terminal.
//!
//! The crate `textwrap` adds up the widths of characters. The width of an emoji that consists of several characters is
//! not that sum, neither for the terminal nor for the tables of `gpumem-core`, so lines would be broken at wrong
//! columns.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Breaks lines between words where they do not fit. The following lines are indented like the text after a label, else
/// by two columns. A longer word is not broken, so that a path can still be copied.
pub(crate) fn wrapped(text: &str, width: usize) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let plain = without_codes(line.trim_end_matches('\n'));
        if plain.width() <= width {
            out.push_str(line);
        } else {
            wrap(line, indent(&plain, width), width, &mut out);
        }
    }
    out
}

fn wrap(line: &str, indent: usize, width: usize, out: &mut String) {
    let mut column = 0;
    for piece in line.split_inclusive(' ') {
        let plain = without_codes(piece);
        let word = plain.trim_end();
        if !word.is_empty() && column + word.width() > width && column > indent {
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        }
        out.push_str(piece);
        column += plain.width();
    }
}

/// Returns where the text after the last gap of two spaces starts, if that is in the first half of the line.
fn indent(plain: &str, width: usize) -> usize {
    let (mut column, mut spaces, mut indent) = (0, 0, 0);
    for c in plain.chars() {
        if c != ' ' && spaces >= 2 && column <= width / 2 {
            indent = column;
        }
        spaces = if c == ' ' { spaces + 1 } else { 0 };
        column += c.width().unwrap_or(0);
    }
    indent.max(2)
}

/// Returns the text without colour codes, which have no width and end in `m`.
fn without_codes(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    first + &parts.map(|part| part.split_once('m').map_or("", |(_, rest)| rest)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        for (text, expected) in [
            ("one two three\n", "one two three\n"),
            ("one two three four five six\nseven\n", "one two three four\n  five six\nseven\n"),
            ("kind  one two three four five\n", "kind  one two three\n      four five\n"),
            ("    one two three four\n", "    one two three\n    four\n"),
            ("see /a/very/long/path/to/a/file now", "see\n  /a/very/long/path/to/a/file\n  now"),
            ("/a/very/long/path/to/a/file", "/a/very/long/path/to/a/file"),
            ("äöü äöü äöü äöü äöü äöü", "äöü äöü äöü äöü äöü\n  äöü"),
            ("", ""),
        ] {
            assert_eq!(wrapped(text, 19), expected);
        }
    }

    #[test]
    fn colours_have_no_width() {
        let (faint, off) = ("\u{1b}[2m", "\u{1b}[0m");
        let line = format!("{faint}kind  {off}one two three four five\n");
        assert_eq!(wrapped(&line, 19), format!("{faint}kind  {off}one two three\n      four five\n"));
        assert_eq!(wrapped(&line, 29), line);
    }
}
