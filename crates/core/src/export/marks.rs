//! The mark at values that are not known.

use std::fmt::Display;

/// Returns a value as text, or `?` if it is not known.
pub fn or_unknown(value: Option<impl Display>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}
