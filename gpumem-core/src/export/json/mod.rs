//! Everything that gpumem prints or returns, as JSON. Bytes are exact; what was not measured is `null`.

mod holders;
mod object;
mod output;
mod places;
mod statistics;
mod tracked;

use std::time::Duration;

use serde_core::Serialize;

use super::JsonEscapes;

pub(super) use self::output::output;

/// One line, without a line break at its end.
fn json_line(value: &impl Serialize) -> String {
    let mut text = Vec::new();
    // Each type here has a JSON form, and memory takes all, so this does not fail.
    _ = serde_json::to_writer(JsonEscapes(&mut text), value);
    String::from_utf8(text).unwrap_or_default()
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
