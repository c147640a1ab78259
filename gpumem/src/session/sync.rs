//! What the inbox is built of. The model checker (`tests/tests/inbox`) compiles the same inbox with its own kind of each.

pub(super) use std::{sync::atomic::Ordering::Relaxed, thread::sleep, thread_local, time::Instant};

use std::sync::atomic::AtomicU32;

pub(super) use crossbeam::utils::Backoff;
pub(super) use spin::mutex::{SpinMutex as Mutex, SpinMutexGuard as MutexGuard};

/// The number of the next thread that comes.
pub(super) static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);
