//! Replaces the GPUs with others, for dry runs and limits.

use std::{env, fmt::Display, sync::OnceLock};

use gpumem::Bytes;
use gpumem_driver::dry::{self, Mode, nvml};

use crate::{
    options::{CardMode, Cards},
    request::options,
    variable,
};

/// Replaces the GPUs, if the environment requests it.
pub(crate) fn start() -> Result<(), String> {
    let Some(Cards { mode, shared }) = options()?.and_then(|options| options.cards) else { return Ok(()) };
    let mode = mode_of(mode);
    let message = |why: &dyn Display| format!("{mode} is not possible, and the program does not run without it: {why}");
    if let Some(segment) = shared {
        let message =
            |why| message(&format_args!("it cannot access the memory in which processes account for the GPUs: {why}"));
        dry::share(segment, devices()).map_err(message)?;
    }
    dry::start(mode).map_err(|why| message(&why))
}

/// Returns the UUIDs of the devices that the command sees. Empty if it did not find NVML.
fn devices() -> Vec<String> {
    let text = env::var(variable::DEVICES).unwrap_or_default();
    text.split(',').filter(|device| !device.is_empty()).map(str::to_owned).collect()
}

/// Returns the GPUs that NVML must show, or `None` if it must show the real ones.
pub(crate) fn of_nvml() -> Option<&'static nvml::Cards> {
    static CARDS: OnceLock<Option<nvml::Cards>> = OnceLock::new();

    let read = || {
        let Cards { mode, shared } = options().ok()??.cards?;
        Some(nvml::Cards { mode: mode_of(mode), segment: shared, devices: devices() })
    };
    CARDS.get_or_init(read).as_ref()
}

fn mode_of(mode: CardMode) -> Mode {
    match mode {
        CardMode::Dry { card, cards, fill, real } => {
            Mode::Dry { card: card.map(Bytes::new), cards, fill, real: real.map(Bytes::new) }
        }
        CardMode::Limit { card } => Mode::Limit { card: Bytes::new(card) },
    }
}
