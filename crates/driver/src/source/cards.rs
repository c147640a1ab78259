//! Replaces the real GPUs with simulated ones.

use crate::model::Bytes;
#[cfg(feature = "dry")]
use crate::sys::{cuda, dispatch};
#[cfg(feature = "cuda")]
use crate::{
    error::{Kind, Result},
    settings::Card,
};

/// Describes how the program's GPUs differ from the real ones. Also returns the total memory of each, if that differs. `None` if the GPUs
/// are the real ones.
pub fn replaced_cards() -> Option<(String, Option<Bytes>)> {
    #[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    let mode = crate::sys::dispatch::dry::mode().map(|mode| (mode.to_string(), mode.card()));
    // Other systems have no dispatch table.
    #[cfg(not(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let mode = None;
    mode
}

/// Replaces the program's GPUs with this one. Earlier allocations would not be on it, so the program must not have a context yet.
#[cfg(feature = "dry")]
pub(super) fn replace(card: Card) -> Result<()> {
    let has_context = cuda::devices()?.iter().any(|device| cuda::has_primary_context(device.ordinal.cast_signed()));
    let replaced = if has_context || cuda::current_context().is_some() {
        let next = "call gpumem::intercept::subscribe(), in C gpumem_pool_register, before it has one";
        Err(format!("the program has a CUDA context already; {next}; or use `gpumem run` with --dry or --limit"))
    } else {
        dispatch::replace_cards(card).map_err(|why| why.to_string())
    };
    replaced.map_err(|detail| Kind::BadSetting { setting: card.variable, detail }.into())
}

/// Returns an error, because this program does not contain the code that replaces GPUs.
#[cfg(all(feature = "cuda", not(feature = "dry")))]
pub(super) fn replace(card: Card) -> Result<()> {
    let detail =
        "the program was built without gpumem's feature `dry`; add it, or use `gpumem run` with --dry or --limit";
    Err(Kind::BadSetting { setting: card.variable, detail: detail.to_owned() }.into())
}
