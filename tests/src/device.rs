//! What only a GPU can show.

use std::{
    env,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// `None`, and a line that says so, unless `GPUMEM_DEVICE` is set. One test of a process at a time: each sees the whole device.
pub fn device() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    if env::var_os("GPUMEM_DEVICE").is_none() {
        println!("skipped: no device (GPUMEM_DEVICE=1 switches this test on)");
        return None;
    }
    Some(ONE.lock().unwrap_or_else(PoisonError::into_inner))
}
