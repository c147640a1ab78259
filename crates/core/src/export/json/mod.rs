//! Writes everything that gpumem prints or returns as JSON. Bytes are exact, and a value that was not measured is
//! `null`.

mod object;
mod output;
mod reports;

use self::object::{AsJson, Json};
use super::JsonEscapes;

/// Returns the value as one line of JSON, without a line break.
pub(super) fn json_line(value: &impl Json) -> String {
    let mut text = Vec::new();
    // Cannot fail: each type here has a JSON form, and writing to memory succeeds.
    _ = serde_json::to_writer(JsonEscapes(&mut text), &AsJson(value));
    String::from_utf8(text).unwrap_or_default()
}
