//! Dry runs and smaller GPUs: a program runs as if on a GPU that the machine does not have.
//!
//! On a smaller GPU ([`Mode::Limit`]), all memory is real. The driver's functions that allocate are replaced by ones that keep an account,
//! and that fail when the GPU would not have enough memory.
//!
//! In a dry run ([`Mode::Dry`]), large blocks are dry: all of them share a little memory (`behind`). Small ones are real and start as
//! zeros, so that counters, lengths and masks are computed. A kernel or a copy is executed if none of its addresses is dry; otherwise it
//! does nothing, and what it should have written is not known (`contents`). A copy to the host from dry memory writes one byte, repeated.
//!
//! The functions are between the hooks and the driver, so a hook records their results. They are put into the slots before the program uses
//! CUDA, and stay there until the process ends.

mod behind;
mod blocks;
mod card_calls;
mod cards;
mod contents;
mod copies;
mod functions;
mod memory;
mod mode;
pub mod nccl;
mod nodes;
#[cfg(feature = "capture")]
pub mod nvml;
mod physical;
mod places;
mod questions;
pub(super) mod replaced;
mod roles;
pub mod runtime;
#[cfg_attr(
    not(feature = "capture"),
    allow(dead_code, reason = "without the command, a process has the cards for itself")
)]
mod shared;
mod state;
mod table;
mod unused;
mod work;

use std::sync::atomic::Ordering::Relaxed;

pub(crate) use self::mode::Observe;
use self::{
    functions::replacements,
    mode::MODE,
    replaced::{DRIVERS, REPLACED},
    table::FUNCTIONS,
};
pub use self::{mode::Mode, shared::SHARED_WORDS};
use super::slots::{DispatchTable, Slot, unusable};
use crate::{
    error::Error,
    settings::Card,
    sys::{cuda, loader, process},
};

/// Shares the account of the GPUs with other processes, through the segment of shared memory with this id, which has [`SHARED_WORDS`].
/// `devices` are UUIDs, without `GPU-` or `MIG-`, in an order that all these processes share, because they may number the devices
/// differently. Must be called before [`start`].
///
/// # Errors
/// Returns an error if this process cannot use the segment, or if too many processes use it.
#[cfg(feature = "capture")]
pub fn share(segment: u64, devices: Vec<String>) -> std::io::Result<()> {
    let words = crate::sys::ring_memory::words_of(segment, SHARED_WORDS)?;
    // Another process that gets the same id starts later.
    let own = u64::from(std::process::id()) | process::start_time() << 32;
    let joined = shared::Shared::join(words, own, is_running);
    state::share_by_uuid(devices);
    joined
        .map(|joined| _ = state::SHARED.set(joined))
        .ok_or_else(|| std::io::Error::other("too many processes use the GPUs"))
}

/// Returns whether the process that took a slot is running.
#[cfg(feature = "capture")]
fn is_running(owner: u64) -> bool {
    let pid = u32::try_from(owner & u64::from(u32::MAX)).unwrap_or(0);
    process::start_time_of(pid).is_some_and(|started| u64::from(pid) | started << 32 == owner)
}

/// Replaces the GPUs of the process. Must be called before the program has a context, and at most once.
///
/// # Errors
/// Returns an error if the driver's dispatch table cannot be used, or if another tool uses it. In this case, no function is replaced.
pub fn start(mode: Mode) -> Result<(), Error> {
    let replaced = FUNCTIONS.iter().enumerate().filter(|(_, (_, shape))| shape.is_of(mode));
    let table = DispatchTable::find(replaced.map(|(row, (name, _))| (row, *name)))?;
    cuda::load()?;
    work::load();
    loader::pin().map_err(unusable)?;
    if MODE.set(mode).is_err() {
        return Err(unusable("the GPUs of this process were replaced before"));
    }
    process::notice_forks();
    let replacements = replacements();
    if let Mode::Dry { cards, .. } = mode {
        cards::start(cards);
    }
    for (at, slot) in table.slots.iter().enumerate() {
        DRIVERS[slot.row].store(slot.driver, Relaxed);
        slot.set_hook(replacements[slot.row]);
        if !slot.install() {
            table.slots[..at].iter().for_each(Slot::restore);
            return Err(unusable(format!("another tool has replaced the pointer of {}", FUNCTIONS[slot.row].0)));
        }
        REPLACED[slot.row].store(replacements[slot.row], Relaxed);
    }
    Ok(())
}

/// Runs [`start`] for a program that was built for gpumem.
pub(crate) fn replace_cards(Card { size, is_dry, .. }: Card) -> Result<(), Error> {
    mode::IS_ALONE.store(true, Relaxed);
    start(if is_dry {
        Mode::Dry { card: Some(size), cards: 0, fill: 0, real: None }
    } else {
        Mode::Limit { card: size }
    })
}

/// Returns how the GPUs of this process were replaced, or `None` if they are the real ones.
pub fn mode() -> Option<Mode> {
    MODE.get().copied()
}

/// Returns whether the memory of the driver can be measured although the GPUs are not the real ones: the program has the GPUs of the machine.
pub(crate) fn has_real_drivers_memory() -> bool {
    matches!(MODE.get(), Some(Mode::Dry { cards: 0, .. } | Mode::Limit { .. }))
}

/// Returns the memory that this process has on a device by the account of a dry run or a smaller GPU, without the driver's own.
pub(crate) fn taken(device: u32) -> u64 {
    state::memory().taken(device) + behind::taken(device)
}

/// Returns the same for a dry run. `None` if it is not one.
pub(crate) fn taken_in_dry_run(device: u32) -> Option<u64> {
    mode::is_dry_run().then(|| taken(device))
}

/// Returns the number of allocations and frees of real memory so far. `None` while one is being made: the driver and the account may differ.
pub(crate) fn changes() -> Option<u64> {
    state::memory().changes()
}

/// Returns whether the latest launch of this thread was skipped.
pub(crate) fn was_skipped() -> bool {
    work::was_skipped()
}

/// Makes the account of a device hold what the driver takes for itself.
pub(crate) fn set_driver_memory(device: u32, bytes: u64) {
    state::memory().set_driver_memory(device, bytes);
}

/// Makes a dry run report to this observer. Later observers are ignored.
pub(crate) fn observe(observer: mode::Observe) {
    _ = mode::OBSERVER.set(observer);
}
