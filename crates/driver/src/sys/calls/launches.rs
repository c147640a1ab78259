//! The functions that were launched already.
//!
//! The driver loads a function and raises the local memory of the device at the first launch of the function, so only this launch is
//! recorded. Every other launch must cost nothing, because a program launches functions every few microseconds.
//!
//! The runtime launches `CUkernel`s. A `CUkernel` has the same handle in all contexts. If the process has several contexts, a launch is
//! identified by the handle and the context.

use std::{
    collections::HashSet,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use crate::model::{GOLDEN, NumberHashBuilder};

/// The number of places in the table, each for two functions.
const PLACES: usize = 1 << 12;

/// True if the process has had contexts of several devices.
static ARE_SEVERAL: AtomicBool = AtomicBool::new(false);

/// Functions that were launched, by a hash of their keys. A function that has lost its place here is still in [`LAUNCHED`].
static LATEST: [[AtomicU64; 2]; PLACES] = [const { [const { AtomicU64::new(0) }; 2] }; PLACES];

static LAUNCHED: Mutex<HashSet<u64, NumberHashBuilder>> = Mutex::new(HashSet::with_hasher(NumberHashBuilder::new()));

fn launched() -> MutexGuard<'static, HashSet<u64, NumberHashBuilder>> {
    LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[inline]
fn key(function: u64, context: impl FnOnce() -> u64) -> u64 {
    // The product spreads the address of the context over all bits, so that two pairs do not get the same key.
    if ARE_SEVERAL.load(Relaxed) { function ^ context().wrapping_mul(GOLDEN) } else { function }
}

#[inline]
fn place(key: u64) -> &'static [AtomicU64; 2] {
    // Handles are addresses of structs of the driver, so their upper and lower bits are nearly the same.
    let hash = (key >> 4).wrapping_mul(GOLDEN) >> 52;
    &LATEST[hash as usize % PLACES]
}

/// Returns whether a function is known to have been launched in the current context, which `context` returns. Returns `false` for some
/// functions that were launched.
#[inline]
pub(in crate::sys) fn was_launched(function: u64, context: impl FnOnce() -> u64) -> bool {
    let key = key(function, context);
    let [first, second] = place(key);
    first.load(Relaxed) == key || second.load(Relaxed) == key
}

/// Returns whether this is the first launch of a function in the current context, which `context` returns, and notes the launch.
#[cold]
pub(in crate::sys) fn is_new_launch(function: u64, context: impl FnOnce() -> u64) -> bool {
    let key = key(function, context);
    let is_new = launched().insert(key);
    let [first, second] = place(key);
    second.store(first.load(Relaxed), Relaxed);
    first.store(key, Relaxed);
    is_new
}

/// Notes that the process has contexts of several devices.
pub(crate) fn note_several_devices() {
    if !ARE_SEVERAL.swap(true, Relaxed) {
        forget_launches();
    }
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
        let [known, new] = [|function| was_launched(function, || 1), |function| is_new_launch(function, || 1)];
        assert!(functions().all(|function| !known(function) && new(function)));
        assert!(functions().all(|function| known(function) || !new(function)));
        assert!(functions().filter(|function| known(*function)).count() > PLACES);
        forget_launches();
        assert!(functions().all(|function| !known(function)) && new(0x7f00_0000_0040));
        forget_launches();
        // A kernel has a first launch in each of several contexts.
        note_several_devices();
        for context in [0x5500_0000_1000, 0x5500_0000_2000] {
            assert!(functions().all(|function| is_new_launch(function, || context)));
        }
        forget_launches();
    }
}
