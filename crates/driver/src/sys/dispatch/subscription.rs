//! Puts hooks into the slots, and removes them.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst},
};

use super::{
    hooks::{HOOKS, hooks},
    slots::{Slot, table, unusable},
};
use crate::{
    error::Error,
    sys::{
        calls::{CALLS, Observe},
        cuda, loader, process,
    },
};

/// True if the hooks are in their slots. Each new trace reads this.
static IS_SUBSCRIBED: AtomicBool = AtomicBool::new(false);

/// Returns a guard of the lock that is held while slots are replaced, so that two threads do not replace them at the same time.
fn lock() -> MutexGuard<'static, ()> {
    static REPLACING: Mutex<()> = Mutex::new(());
    REPLACING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns an error if the dispatch table of this process's driver cannot be used.
pub(crate) fn check_available() -> Result<(), Error> {
    table().map(|_| ())
}

/// Starts to send each call to `O`, on the thread that makes it. A call that `O` makes itself is
/// [`Call::Uncounted`](crate::sys::calls::Call::Uncounted), except in [`as_program`](crate::sys::calls::as_program). Does nothing if there
/// is a subscription already.
///
/// The driver is loaded but not initialized, so this may be called while the driver initializes itself.
pub(crate) fn subscribe<O: Observe>() -> Result<(), Error> {
    let _replacing = lock();
    if IS_SUBSCRIBED.load(SeqCst) {
        return Ok(());
    }
    let table = table()?;
    cuda::load()?;
    loader::pin().map_err(unusable)?;
    process::at_fork(|| HOOKS.active.store(false, Relaxed));
    let hooks = hooks::<O>();
    for slot in &table.slots {
        HOOKS.drivers[slot.row].store(slot.driver, Relaxed);
        slot.set_hook(hooks[slot.row]);
    }
    HOOKS.active.store(true, SeqCst);
    if let Some(displaced) = table.slots.iter().position(|slot| !slot.install()) {
        remove_hooks(&table.slots[..displaced]);
        let name = CALLS[table.slots[displaced].row].1;
        return Err(unusable(format!("another tool has replaced the pointer of {name}")));
    }
    IS_SUBSCRIBED.store(true, SeqCst);
    Ok(())
}

/// Restores the driver's own pointers in the slots that still hold our hooks.
pub(crate) fn unsubscribe() {
    let _replacing = lock();
    if !IS_SUBSCRIBED.swap(false, SeqCst) {
        return;
    }
    if let Ok(table) = table() {
        remove_hooks(&table.slots);
    }
}

fn remove_hooks(slots: &[Slot]) {
    slots.iter().for_each(Slot::restore);
    HOOKS.active.store(false, SeqCst);
}

/// Returns the path of the driver, if there is a subscription.
pub(crate) fn subscribed() -> Option<&'static str> {
    IS_SUBSCRIBED.load(SeqCst).then(|| table().ok()).flatten().map(|table| table.path.as_str())
}

/// Returns a bit mask with one bit for each row of [`CALLS`] whose slot no longer holds our hook. Another tool has replaced the hook, or
/// has restored an earlier value, so calls may be missed.
pub(crate) fn displaced() -> u128 {
    const { assert!(CALLS.len() <= 128) };
    if !HOOKS.active.load(Relaxed) {
        return 0;
    }
    let Ok(table) = table() else { return 0 };
    // Each reading of a trace checks this, and nearly always each slot holds its hook. Without branches, the check takes half the time.
    if table.slots.iter().fold(0, |bits, slot| bits | slot.difference()) == 0 {
        return 0;
    }
    let displaced = table.slots.iter().filter(|slot| slot.difference() != 0);
    displaced.fold(0, |rows, slot| rows | 1 << slot.row)
}
