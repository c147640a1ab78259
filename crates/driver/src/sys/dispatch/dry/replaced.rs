//! The functions in the slots, and the driver's functions below them.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::table::FUNCTIONS;

/// The driver's own implementations, by row of [`FUNCTIONS`]. Each is set before its slot is replaced.
pub(super) static DRIVERS: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

/// The functions in the slots, by row of [`FUNCTIONS`]. 0 for the driver's own function.
pub(super) static REPLACED: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

/// Returns the driver's own implementation if this function has replaced it, or else the function itself.
pub(in crate::sys::dispatch) fn driver_below(function: usize) -> usize {
    let row = REPLACED.iter().position(|replaced| replaced.load(Relaxed) == function);
    row.map_or(function, |row| DRIVERS[row].load(Relaxed))
}
