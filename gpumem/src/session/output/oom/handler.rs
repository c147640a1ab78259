//! Handles a rejected allocation, on the thread that made the call.

use std::{
    cell::Cell,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{PoisonError, atomic::Ordering::Relaxed},
    thread,
    time::Instant,
};

use crossbeam_channel as channel;

use super::{
    pending::PendingReport,
    print::MAX_PRINTED,
    rejection::{REJECTED_THREAD_WAIT, Stage, ThreadRejection},
    reporter::investigate,
};
#[cfg(feature = "capture")]
use crate::model::EventKind;
use crate::{
    derive,
    model::{Bytes, Device, MemKind},
    process,
    session::{Session, views},
    source,
};

thread_local! {
    /// True while this thread handles a rejected allocation. Allocations that the program's function makes are not reported.
    static IS_HANDLED: Cell<bool> = const { Cell::new(false) };
    /// True if `retry_after_trim` will retry rejected allocations of this thread.
    pub(super) static IS_RETRIED: Cell<bool> = const { Cell::new(false) };
    /// The number of rejected allocations of this thread.
    pub(super) static REJECTED_COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Handles a rejected allocation. Rejected host memory, and pools whose device is not known, are only counted and recorded.
pub(in crate::session) fn rejected(session: &'static Session, device: Option<Device>, bytes: Bytes, kind: MemKind) {
    REJECTED_COUNT.set(REJECTED_COUNT.get() + 1);
    session.rejections.count.fetch_add(1, Relaxed);
    #[cfg(feature = "capture")]
    session.record_rejected(device, bytes, kind);
    let Some(device) = device.filter(|_| kind != MemKind::PinnedHost) else { return };
    if process::is_forked() || IS_RETRIED.get() || IS_HANDLED.replace(true) {
        return;
    }
    // The panic hook has printed the panic. The program still gets the error of its allocation.
    // Dropping the payload could panic as well, so it is leaked.
    mem::forget(catch_unwind(AssertUnwindSafe(|| handle(session, device, bytes, kind))));
    IS_HANDLED.set(false);
}

/// Removes the calling thread's pending reports about requests of at most this size, because it has now allocated this many bytes.
pub(in crate::session) fn obtained(session: &Session, device: Device, bytes: Bytes) {
    let thread = thread::current().id();
    let mut reporter = session.rejections.reporter();
    reporter.pending.retain(|pending| {
        let PendingReport { rejection, .. } = pending;
        (rejection.thread, rejection.of.device) != (thread, device) || rejection.of.requested > bytes
    });
    source::watch_allocations(reporter.pending.iter().any(|pending| pending.rejection.thread == thread));
}

/// Records a reading of the device, so that readers of the recording know the free memory and the memory of other processes. Runs on a separate
/// thread, because the driver may never answer; there is one such thread at a time.
#[cfg(feature = "capture")]
fn record_reading(session: &'static Session, device: Device) {
    if !session.is_recorded() {
        return;
    }
    let threads = &session.rejections.driver_threads;
    let is_alone = threads.fetch_add(1, Relaxed) == 0;
    let read = move || {
        let known = session.devices().and_then(|devices| devices.read(device.ordinal));
        if let Ok(memory) = known {
            session.inbox.post(&EventKind::Sample { device, memory });
        }
        threads.fetch_sub(1, Relaxed);
    };
    if !is_alone || crate::own_threads::spawn("oom", read).is_err() {
        threads.fetch_sub(1, Relaxed);
    }
}

fn handle(session: &'static Session, device: Device, requested: Bytes, kind: MemKind) {
    let hook = session.rejections.hook.read().unwrap_or_else(PoisonError::into_inner).clone();
    let is_printed = !session.is_silent() && session.rejections.printed.load(Relaxed) < MAX_PRINTED;
    if !session.is_started() || hook.is_none() && !is_printed {
        #[cfg(feature = "capture")]
        record_reading(session, device);
        return;
    }
    let deadline = Instant::now() + REJECTED_THREAD_WAIT;
    let stack = session.rejection_stack();
    let of = derive::Rejection { device, requested, kind, stack, path: views::path_of_this_thread(session) };
    let rejection = ThreadRejection { thread: thread::current().id(), of };
    let mut oom = rejection.report();
    let (sender, updates) = channel::unbounded();
    if let Err(error) = investigate(session, rejection, is_printed, sender) {
        oom.breakdown = Err(error);
    }
    // Without a function, the thread waits until the driver has been read, because it may free memory when it handles the error.
    let enough = if hook.is_some() { Stage::Complete } else { Stage::Device };
    while let Ok(update) = updates.recv_deadline(deadline) {
        oom = update.oom;
        if update.stage >= enough {
            break;
        }
    }
    if let Some(hook) = hook {
        hook(&oom);
    }
}
