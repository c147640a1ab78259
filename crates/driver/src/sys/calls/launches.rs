//! The functions that were launched already.
//!
//! The driver loads a function and raises the local memory of the device at the first launch of the function, so only this launch is
//! recorded. Every other launch must cost nothing, because a program launches functions every few microseconds.

use std::{
    collections::HashSet,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::model::{GOLDEN, NumberHashBuilder};

/// The number of places in the table, each for two functions.
const PLACES: usize = 1 << 12;

/// Functions that were launched, by a hash of their handles. A function that has lost its place here is still in [`LAUNCHED`].
static LATEST: [[AtomicU64; 2]; PLACES] = [const { [const { AtomicU64::new(0) }; 2] }; PLACES];

static LAUNCHED: Mutex<HashSet<u64, NumberHashBuilder>> = Mutex::new(HashSet::with_hasher(NumberHashBuilder::new()));

fn launched() -> MutexGuard<'static, HashSet<u64, NumberHashBuilder>> {
    LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[inline]
fn place(function: u64) -> &'static [AtomicU64; 2] {
    // Handles are addresses of structs of the driver, so their upper and lower bits are nearly the same.
    let hash = (function >> 4).wrapping_mul(GOLDEN) >> 52;
    &LATEST[hash as usize % PLACES]
}

/// Returns whether a function is known to have been launched. Returns `false` for some functions that were launched.
#[inline]
pub(in crate::sys) fn was_launched(function: u64) -> bool {
    let [first, second] = place(function);
    first.load(Relaxed) == function || second.load(Relaxed) == function
}

/// Returns whether this is the first launch of a function, and notes the launch.
#[cold]
pub(in crate::sys) fn is_new_launch(function: u64) -> bool {
    let is_new = launched().insert(function);
    let [first, second] = place(function);
    second.store(first.load(Relaxed), Relaxed);
    first.store(function, Relaxed);
    is_new
}

/// Forgets all launches: the next launch of each function may change the memory of the driver again, or the handles of functions may be
/// reused.
pub(crate) fn forget_launches() {
    launched().clear();
    LATEST.iter().flatten().for_each(|place| place.store(0, Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_launch_is_new() {
        // More functions than the table has places, so that some lose their place.
        let functions = || (1..=3 * PLACES as u64).map(|at| 0x7f00_0000_0000 + 64 * at);
        assert!(functions().all(|function| !was_launched(function) && is_new_launch(function)));
        assert!(functions().all(|function| was_launched(function) || !is_new_launch(function)));
        assert!(functions().filter(|function| was_launched(*function)).count() > PLACES);
        forget_launches();
        assert!(functions().all(|function| !was_launched(function)) && is_new_launch(0x7f00_0000_0040));
        forget_launches();
    }
}
