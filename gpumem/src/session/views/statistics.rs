//! Statistics of a device's allocations, for the functions with PyTorch's names.

use super::status::not_exact_by_setting;
use crate::session::{Session, current};
use crate::{
    derive,
    error::Result,
    model::{Device, EventKind, PoolUsage},
    report::{AllocStats, KindStats, LiveBlock, MemoryStats, ReservedStats},
    source::Devices,
};

/// A device on which allocations are intercepted.
pub(crate) struct InterceptedDevice {
    pub(super) session: &'static Session,
    pub(super) devices: &'static dyn Devices,
    pub(super) device: Device,
}

impl InterceptedDevice {
    /// Returns the device with this ordinal, or else the current one, and starts to intercept allocations, unless `GPUMEM_GAUGE`
    /// forbids exact results. Fails if they cannot be intercepted, because the results would be wrong.
    pub(crate) fn on(id: Option<u32>) -> Result<Self> {
        let session = current();
        let devices = session.devices()?;
        let device = devices.device(id)?;
        devices.check(device.ordinal)?;
        intercept(session, devices)?;
        Ok(Self { session, devices, device })
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let Self { session, devices, device } = *self;
        let intercepted_by = devices.subscribed().map(|by| by.library.to_owned()).unwrap_or_default();
        let (since, pool) = (session.inbox.age(), self.usage().ok());
        derive::memory_stats(&session.inbox, device, intercepted_by, since, pool)
    }

    /// Returns the memory that is certainly on the device, and each kind of memory. Zeros before the first intercepted allocation.
    pub(crate) fn allocated(&self) -> (AllocStats, KindStats) {
        derive::of_device(&self.session.inbox, self.device)
    }

    pub(crate) fn reserved(&self) -> Result<ReservedStats> {
        let (_, kinds) = self.allocated();
        Ok(ReservedStats::new(&kinds, self.usage()?.as_ref()))
    }

    /// Resets the peaks, and the pool's high-water mark of reserved memory, which traces do not use.
    pub(crate) fn reset_peaks(&self) -> Result<()> {
        let Self { session, devices, device } = *self;
        devices.reset_pool_reserved(device.ordinal)?;
        session.inbox.post(&EventKind::ResetPeaks { device });
        Ok(())
    }

    /// Returns the usage of the device's current pool; `None` if the device has no pools.
    fn usage(&self) -> Result<Option<PoolUsage>> {
        self.devices.read_pool(self.device.ordinal)
    }
}

fn intercept(session: &'static Session, devices: &dyn Devices) -> Result<()> {
    if let Some(why) = not_exact_by_setting(session.settings().gauge()?) {
        // The program may have called `subscribe`.
        return if session.is_started() && devices.subscribed().is_some() { Ok(()) } else { Err(why) };
    }
    session.subscribe(devices, None, false).map(|_| ())
}

/// Returns the live blocks of all devices, the largest first.
pub(crate) fn live_blocks() -> Result<Vec<LiveBlock>> {
    let session = current();
    intercept(session, session.devices()?)?;
    Ok(derive::live_blocks(&session.inbox, session, None))
}
