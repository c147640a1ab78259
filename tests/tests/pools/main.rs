//! Pools on simulated devices. A query of another thread between a block and its first part makes the block the program's, so each of
//! these tests is alone in the process.

mod parts;
mod tch;

use std::sync::{Mutex, MutexGuard, PoisonError};

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}
