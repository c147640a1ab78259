//! Cards of another size than the real ones: dry runs and limits.

use std::env;

use gpumem::Bytes;
use gpumem_driver::dry::{self, Mode};

use crate::variable;

/// Replaces the cards, if the environment asks for it.
pub(crate) fn begin() -> Result<(), String> {
    let Some(text) = env::var(variable::CARDS).ok().filter(|text| !text.is_empty()) else { return Ok(()) };
    let mode = parsed(&text).ok_or_else(|| format!("{}={text} is not known", variable::CARDS))?;
    dry::begin(mode).map_err(|why| format!("{mode} is not possible, and the program does not run without it: {why}"))
}

fn parsed(text: &str) -> Option<Mode> {
    let mut words = text.split(' ');
    let kind = words.next()?;
    let (mut card, mut cards, mut fill) = (None, 0, 0);
    while let Some(word) = words.next() {
        match word {
            "cards" => cards = words.next()?.parse().ok()?,
            "fill" => fill = words.next()?.parse().ok()?,
            bytes => card = Some(Bytes::new(bytes.parse().ok()?)),
        }
    }
    match kind {
        "dry" => Some(Mode::Dry { card, cards, fill }),
        "limit" => Some(Mode::Limit { card: card? }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_command_asks_for() {
        assert_eq!(parsed("dry"), Some(Mode::Dry { card: None, cards: 0, fill: 0 }));
        assert_eq!(parsed("dry 1024 cards 8 fill 1"), Some(Mode::Dry { card: Some(Bytes::kib(1)), cards: 8, fill: 1 }));
        assert_eq!(parsed("limit 1024"), Some(Mode::Limit { card: Bytes::kib(1) }));
        for text in ["limit", "wet", "dry fill", "dry x", "dry fill 256"] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
