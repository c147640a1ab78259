//! Replaces the GPUs by others, for dry runs and limits.

use std::{env, fmt::Display, sync::OnceLock};

use gpumem::Bytes;
use gpumem_driver::dry::{self, Mode, nvml};

use crate::variable;

/// Replaces the GPUs, if the environment requests it.
pub(crate) fn begin() -> Result<(), String> {
    let Some(text) = env::var(variable::CARDS).ok().filter(|text| !text.is_empty()) else { return Ok(()) };
    let (mode, shared) = parsed(&text).ok_or_else(|| format!("{}={text} is not known", variable::CARDS))?;
    let refused = |why: &dyn Display| format!("{mode} is not possible, and the program does not run without it: {why}");
    if let Some(segment) = shared {
        let refused =
            |why| refused(&format_args!("it has no access to the account of the cards, which processes share: {why}"));
        dry::share(segment, devices()).map_err(refused)?;
    }
    dry::begin(mode).map_err(|why| refused(&why))
}

/// Returns the devices that the command sees. Empty if it did not find NVML.
fn devices() -> Vec<String> {
    let text = env::var(variable::DEVICES).unwrap_or_default();
    text.split(',').filter(|device| !device.is_empty()).map(str::to_owned).collect()
}

/// Returns the GPUs that NVML must show, or `None` if they are the real ones.
pub(crate) fn of_nvml() -> Option<&'static nvml::Cards> {
    static CARDS: OnceLock<Option<nvml::Cards>> = OnceLock::new();

    let read = || {
        let (mode, segment) = parsed(&env::var(variable::CARDS).ok()?)?;
        Some(nvml::Cards { mode, segment, devices: devices() })
    };
    CARDS.get_or_init(read).as_ref()
}

/// Parses the mode, and the id of the shared memory in which processes note their use of the GPUs.
fn parsed(text: &str) -> Option<(Mode, Option<u64>)> {
    let mut words = text.split(' ');
    let kind = words.next()?;
    let (mut card, mut cards, mut fill, mut shared) = (None, 0, 0, None);
    while let Some(word) = words.next() {
        match word {
            "cards" => cards = words.next()?.parse().ok()?,
            "shared" => shared = Some(words.next()?.parse().ok()?),
            "fill" => fill = words.next()?.parse().ok()?,
            bytes => card = Some(Bytes::new(bytes.parse().ok()?)),
        }
    }
    let mode = match kind {
        "dry" => Mode::Dry { card, cards, fill },
        "limit" => Mode::Limit { card: card? },
        _ => return None,
    };
    Some((mode, shared))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_command_asks_for() {
        let dry = |card, cards, fill| Mode::Dry { card, cards, fill };
        assert_eq!(parsed("dry"), Some((dry(None, 0, 0), None)));
        let all = parsed("dry 1024 cards 8 fill 1 shared 7");
        assert_eq!(all, Some((dry(Some(Bytes::kib(1)), 8, 1), Some(7))));
        assert_eq!(parsed("limit 1024"), Some((Mode::Limit { card: Bytes::kib(1) }, None)));
        for text in ["limit", "wet", "dry fill", "dry x", "dry fill 256", "dry shared"] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
