//! A second attempt after trimming the stream-ordered pools.

use super::handler::{IS_RETRIED, REJECTED_COUNT};
use crate::{session::current, source::Devices};

/// Runs `attempt`. If memory ran out, frees the unused memory of the stream-ordered pools and runs it again. The first failure
/// is not reported.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::Bytes;
/// drop(gpu.alloc_async(Bytes::gib(10))?); // the pool keeps it
/// let block = gpumem::oom::retry_after_trim(|| gpu.alloc(Bytes::gib(10)))?;
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Memory ran out if the driver rejected an allocation of this thread during the attempt. If allocations are not intercepted,
/// any error counts as out of memory.
///
/// # Errors
/// Returns the error of the second attempt, or of the first if memory did not run out. Trimming waits for the devices on
/// which this process has a context; no pool is trimmed while a stream is being captured.
pub fn retry_after_trim<T, E>(mut attempt: impl FnMut() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
    let session = current();
    let Ok(devices) = session.devices() else { return attempt() };
    session.prepare(devices);
    let is_intercepted = devices.subscribed().is_some();
    let before = REJECTED_COUNT.get();
    let outer = IS_RETRIED.replace(true);
    let _restore = RestoreRetried(outer);
    let first = attempt();
    IS_RETRIED.set(outer);
    if first.is_ok() || is_intercepted && REJECTED_COUNT.get() == before {
        return first;
    }
    trim(devices);
    attempt()
}

/// Restores [`IS_RETRIED`], even if the attempt panics.
struct RestoreRetried(bool);

impl Drop for RestoreRetried {
    fn drop(&mut self) {
        IS_RETRIED.set(self.0);
    }
}

/// Trims the pools of all devices. Errors are ignored: if nothing was freed, the second attempt fails.
fn trim(devices: &dyn Devices) {
    for ordinal in 0..devices.count().unwrap_or(0) {
        let _ = devices.trim(ordinal);
    }
}
