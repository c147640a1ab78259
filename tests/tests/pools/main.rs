//! Tests pools on simulated devices. If another thread queries results between the allocation of a block and that of its first
//! part, the block counts for the program. Therefore only one of these tests runs at a time.

mod parts;
mod tch;

use std::sync::{Mutex, MutexGuard, PoisonError};

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}
