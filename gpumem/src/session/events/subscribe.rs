//! Starts and stops the interception of allocations.

use std::sync::{PoisonError, atomic::Ordering::Relaxed};

use super::scope::unless_needed;
#[cfg(doc)]
use crate::{error::Error, model::Trace};
use crate::{
    error::Result,
    model::{Device, EventKind, Family, Gauge, Source},
    process,
    session::{Session, current, exit, views::unsubscribed_error},
    source::Devices,
};

/// Starts to intercept all allocations: through the source that `GPUMEM_SOURCE` names, or else the driver's dispatch table, or else
/// CUPTI. The first exact trace does this automatically; call this (or [`preload`](crate::preload)) in a program that allocates before
/// its first trace, so that gpumem knows these blocks.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// gpumem::intercept::subscribe()?;
/// let weights = gpu.alloc(gpumem::Bytes::mib(256))?;
/// assert_eq!(gpumem::status().events, 1); // the allocation is known, although no trace has started
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if allocations cannot be intercepted: there is no driver, or neither the dispatch table nor CUPTI can be used.
/// CUPTI may not be installed, or another tool may hold its only subscription ([`Error::is_busy`]).
#[doc(alias = "cuptiSubscribe")]
pub fn subscribe() -> Result<()> {
    let session = current();
    session.start(session.devices()?, None, false, true).map(|_| ())
}

/// Stops the interception of allocations until [`subscribe`] is called: the driver's own pointers are put back into its dispatch
/// table, or CUPTI's only subscription is released, so that another tool can have it. The known live blocks are kept. Open traces
/// count a loss ([`Trace::lost`]), and new ones are sampled. Simulated devices are not affected.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// gpumem::intercept::unsubscribe();
/// // Another tool can subscribe to CUPTI here.
/// gpumem::intercept::subscribe()?;
/// # Ok::<(), gpumem::Error>(())
/// ```
#[doc(alias = "cuptiUnsubscribe")]
pub fn unsubscribe() {
    let session = current();
    let Ok(devices) = session.devices() else { return };
    if devices.family() == Family::Simulated {
        return;
    }
    let session = session.ensure_started();
    let record_loss = || _ = session.inbox.post(&EventKind::Lost { count: 1 });
    let unsubscribe = || {
        devices.unsubscribe();
        // Frees of known blocks may be missed after this. The event itself adds nothing to the count.
        session.inbox.post(&EventKind::Lost { count: 0 });
    };
    session.subscription.stop(|| devices.subscribed().is_some(), record_loss, unsubscribe);
}

impl Session {
    /// Starts to intercept allocations, unless [`unsubscribe`] was called: through the requested source, or else that of
    /// `GPUMEM_SOURCE`, or else the best one. If exact results are needed, an invalid `GPUMEM_SOURCE` is ignored.
    pub(in crate::session) fn subscribe(
        &'static self,
        devices: &dyn Devices,
        requested: Option<Source>,
        is_needed: bool,
    ) -> Result<Source> {
        self.start(devices, requested, is_needed, false)
    }

    /// Like `subscribe`. With `after_unsubscribe`, this also starts after [`unsubscribe`].
    fn start(
        &'static self,
        devices: &dyn Devices,
        requested: Option<Source>,
        is_needed: bool,
        after_unsubscribe: bool,
    ) -> Result<Source> {
        let subscribed = self.ensure_started().subscription.start(after_unsubscribe, unsubscribed_error, || {
            // Without a request, the source in use stays.
            if let (None, Some(live)) = (requested, devices.subscribed()) {
                return Ok(live);
            }
            let requested = requested.map_or_else(|| self.settings().source(), |requested| Ok(Some(requested)));
            let subscribed = devices.subscribe(unless_needed(requested, is_needed)?)?;
            if subscribed.source == Source::Cupti && !self.was_cupti_used.swap(true, Relaxed) {
                // libcupti is loaded now. Its subscription must end before its own exit handler runs.
                process::at_exit(exit::at_exit);
            }
            Ok(subscribed)
        });
        subscribed.map(|interception| interception.source)
    }

    /// Records state that no intercepted call reports: the memory of graphs on the device, and the functions that other tools have
    /// replaced. Calls of these may be missed.
    pub(in crate::session) fn post_polled(&self, device: Device, devices: &dyn Devices) {
        devices.poll(device.ordinal);
        self.compare_slots(devices);
    }

    /// Records the functions that other tools have replaced.
    #[cfg(feature = "capture")]
    pub(in crate::session) fn post_displaced(&self) {
        if let Ok(devices) = self.devices() {
            self.compare_slots(devices);
        }
    }

    /// Records which functions are no longer replaced, because a scope that opens reports all replaced ones. Reading a scope checks
    /// for more.
    pub(in crate::session) fn compare_displaced(&self, devices: &dyn Devices) {
        if self.is_displaced.load(Relaxed) {
            self.compare_slots(devices);
        }
    }

    fn compare_slots(&self, devices: &dyn Devices) {
        if devices.displaced() == 0 && !self.is_displaced.load(Relaxed) {
            return;
        }
        // The lock is held until the event is posted: an older observation must not be posted after a newer one.
        let mut before = self.displaced.lock().unwrap_or_else(PoisonError::into_inner);
        let now = devices.displaced();
        if now != *before {
            let more = (now & !*before).count_ones().into();
            self.inbox.post(&EventKind::Displaced { now: now.count_ones().into(), more });
            *before = now;
            self.is_displaced.store(now != 0, Relaxed);
        }
    }

    /// Starts to intercept allocations, if a trace would do so. If it fails, the traces report the reason.
    pub(crate) fn prepare(&'static self, devices: &dyn Devices) {
        if matches!(self.settings().gauge(), Ok(None | Some(Gauge::Exact))) {
            let _ = self.subscribe(devices, None, false);
        }
    }
}
