//! Checks what a terminal would show of hostile names.

use serde_json::Value;

/// Returns whether a terminal interprets this character. The list is independent of `is_printable`, so that the tests
/// find a gap in either.
fn acts(c: char) -> bool {
    matches!(u32::from(c), 0..=0x1f | 0x7f..=0x9f | 0x61c | 0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f | 0xfeff
        | 0xe0000..=0xe007f)
}

/// Checks that the text contains no characters that a terminal interprets, and that no name in it forges a line.
///
/// # Panics
/// Panics if it does not.
#[track_caller]
pub fn assert_printable(text: &str) {
    let acting = text.chars().find(|c| *c != '\n' && acts(*c));
    assert!(acting.is_none(), "{acting:?} in {text:?}");
    assert!(!text.lines().any(|line| line.trim_start().starts_with("FORGED")), "a name forges a line: {text:?}");
}

/// Returns whether a key or a text of the JSON contains the name as it is.
pub fn has(value: &Value, name: &str) -> bool {
    match value {
        Value::String(text) => text.contains(name),
        Value::Array(all) => all.iter().any(|value| has(value, name)),
        Value::Object(all) => all.iter().any(|(key, value)| key.contains(name) || has(value, name)),
        _ => false,
    }
}
