//! The end of the process: reports, and threads that must stop before libraries are torn down.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{
    SESSION,
    output::{call_stats, exit_reports, oom},
};
use crate::{process, source};

/// Prints reports and stops the threads that call libraries. At exit, libraries release their state in handlers that they
/// registered when they were loaded; no thread may then be inside a library, or call it later. Handlers run in reverse order, so
/// this one is registered again for each library that is loaded after the session started.
pub(super) extern "C" fn at_exit() {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if let (Some(session), false) = (SESSION.get(), process::is_forked()) {
        session.sampler.stop();
        if !REPORTED.swap(true, Relaxed) {
            // A panic must not unwind into C.
            let _ = catch_unwind(AssertUnwindSafe(|| session.print_repeats()));
            let _ = catch_unwind(AssertUnwindSafe(|| call_stats::print_stats(session)));
            let _ = catch_unwind(AssertUnwindSafe(|| session.notify_unmatched()));
            let _ = catch_unwind(AssertUnwindSafe(|| oom::print_pending(session)));
            let _ = catch_unwind(AssertUnwindSafe(|| exit_reports::print_leaks(session)));
            let _ = catch_unwind(AssertUnwindSafe(|| exit_reports::print_peaks(session)));
            #[cfg(feature = "capture")]
            let _ = catch_unwind(AssertUnwindSafe(|| session.end_recording()));
        }
        if let Ok(devices) = source::devices() {
            devices.unsubscribe();
        }
    }
}

/// Stops the sampling thread. Registered separately, because NVML and the driver may be loaded after the session started.
pub(super) extern "C" fn stop_sampling() {
    if let (Some(session), false) = (SESSION.get(), process::is_forked()) {
        session.sampler.stop();
    }
}
