//! What the inbox is built of. The model checker (`tests/tests/inbox`) compiles the same inbox with its own kind of each.

pub(super) use std::{thread::sleep, thread_local, time::Instant};

use std::sync;
pub(super) use std::sync::{
    Mutex as Patient, MutexGuard as PatientGuard, PoisonError,
    atomic::{AtomicU64, Ordering::SeqCst},
};

pub(super) use crossbeam::utils::Backoff;
pub(super) use spin::mutex::{SpinMutex as Mutex, SpinMutexGuard as MutexGuard};

/// The numbers of threads.
struct Numbers {
    /// How many were lent so far, from 1 on.
    lent: u32,
    /// Those of threads that have ended.
    returned: Vec<u32>,
}

static NUMBERS: sync::Mutex<Numbers> = sync::Mutex::new(Numbers { lent: 0, returned: Vec::new() });

/// A number for a thread, and whether another one had it before.
pub(super) fn lend_number() -> (u32, bool) {
    let mut numbers = NUMBERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(returned) = numbers.returned.pop() {
        return (returned, true);
    }
    numbers.lent += 1;
    (numbers.lent, false)
}

/// The thread that had the number has ended.
pub(super) fn return_number(number: u32) {
    NUMBERS.lock().unwrap_or_else(PoisonError::into_inner).returned.push(number);
}
