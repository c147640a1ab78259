//! The program's function for rejected allocations.

use std::sync::{Arc, PoisonError};

use super::pending::Hook;
use crate::{process, report::OutOfMemory, session::current};

/// Sets a function that is called whenever an allocation is rejected because memory ran out. This replaces the previous function.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let trace = gpumem::GpuMemTrace::new();
/// # use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// static REQUESTED: AtomicU64 = AtomicU64::new(0);
/// gpumem::oom::on_oom(|oom| REQUESTED.store(oom.requested.get(), Relaxed));
/// assert!(gpu.alloc(gpumem::Bytes::gib(17)).is_err());
/// assert_eq!(REQUESTED.load(Relaxed), 17 << 30);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// The function runs on the calling thread, before the driver's call returns, at most 50 ms after the failure. Data that is not available
/// by then is missing in its argument, such as lines whose debug information was not read yet. It may free memory. It must not wait for
/// other threads that call CUDA, because the driver's call has not returned yet. If it panics, the panic is caught.
///
/// With or without such a function, rejected allocations are reported on stderr: the request, who has the memory
/// ([`InUse`](crate::report::InUse)), the breakdown of the device's memory
/// ([`breakdown`](crate::breakdown)), the scopes and lines that hold most of it, and the memory that
/// [`torch::empty_cache`](crate::torch::empty_cache) would free. There is no report if the same thread obtains that much memory of the
/// device within a second: an allocator with a cache empties the cache and tries again. Repeated failures of the same request on one thread
/// make one report. At most three reports are printed. A pending report is printed when the process exits, and is lost if the process
/// aborts. Only intercepted allocations are reported, so the first trace must have started.
pub fn on_oom(hook: impl Fn(&OutOfMemory) + Send + Sync + 'static) {
    // The child of a fork has no GPU, and a thread that does not exist there may hold the lock forever.
    if process::is_forked() {
        return;
    }
    let hook: Hook = Arc::new(hook);
    let replaced = current().rejections.hook.write().unwrap_or_else(PoisonError::into_inner).replace(hook);
    // Dropped after the lock is released: the drop of a captured value may call `on_oom`.
    drop(replaced);
}
