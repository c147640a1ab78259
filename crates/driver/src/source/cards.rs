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

macro_rules! of_dry_run {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty, $call:expr, $default:expr) => {
        $(#[$doc])*
        #[cfg(feature = "cuda")]
        pub(super) fn $name($($argument: $type),*) -> $result {
            #[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
            return $call;
            #[cfg(not(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
            {
                $(_ = $argument;)*
                $default
            }
        }
    };
}

of_dry_run! {
    /// Returns whether the GPUs are not the real ones, and the driver's own memory can be measured all the same.
    have_real_drivers_memory() -> bool, dispatch::dry::has_real_drivers_memory(), false
}

of_dry_run! {
    /// Returns the memory that this process has on a device in a dry run, without the driver's own. `None` if it is not one.
    taken_in_dry_run(ordinal: u32) -> Option<u64>, dispatch::dry::taken_in_dry_run(ordinal), None
}

of_dry_run! {
    /// Returns the memory that this process has on a device by the account of a GPU that is not the real one.
    taken_by_account(ordinal: u32) -> u64, dispatch::dry::taken(ordinal), 0
}

of_dry_run! {
    /// Returns the number of allocations and frees on GPUs that are not the real ones. `None` while one is being made.
    changes_of_blocks() -> Option<u64>, dispatch::dry::changes(), None
}

of_dry_run! {
    /// Returns whether the latest launch of this thread was skipped in a dry run.
    was_launch_skipped() -> bool, dispatch::dry::was_skipped(), false
}

of_dry_run! {
    /// Tells the GPUs that are not the real ones how much memory the driver takes for itself.
    set_driver_memory(ordinal: u32, bytes: u64) -> (), dispatch::dry::set_driver_memory(ordinal, bytes), ()
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
