//! What the allocators of a device have done, for PyTorch's names.

use super::{Session, begun, devices, places, session, settings, status::not_exact_by_wish};
use crate::{
    error::Result,
    ledger::{self, DeviceStats},
    model::{Bytes, Device, EventKind, Family, Gauge, MemKind, PoolUsage},
    report::{AllocStats, KindStats, LiveBlock, MemoryStats, ReservedStats, Tally},
    source::Devices,
};

/// A device on which allocations are intercepted.
pub(crate) struct Heard {
    session: &'static Session,
    devices: &'static dyn Devices,
    device: Device,
}

impl Heard {
    /// The one with this number, else the current one. Begins to hear allocations if traces would: figures of allocations
    /// that nobody heard would be wrong.
    pub(crate) fn on(id: Option<u32>) -> Result<Self> {
        let devices = devices()?;
        let device = devices.device(id)?;
        devices.check(device.ordinal)?;
        Ok(Self { session: hear(devices)?, devices, device })
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let Self { session, devices, device } = *self;
        let (all, kinds) = self.allocated();
        let counts = session.inbox.counts();
        MemoryStats {
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            heard_by: devices.subscribed().map(|by| by.library.to_owned()).unwrap_or_default(),
            since: session.inbox.age(),
            untracked: counts.untracked,
            lost: counts.lost,
            all,
            kinds,
            reserved: self.usage().ok().map(|usage| ReservedStats::new(&kinds, usage.as_ref())),
        }
    }

    /// What is on the device for certain, and each kind. Where nothing was intercepted, nothing was allocated.
    pub(crate) fn allocated(&self) -> (AllocStats, KindStats) {
        let known = self.session.inbox.stats().into_iter().find(|stats| stats.device == self.device);
        known.map(|DeviceStats { on_device, kinds, .. }| (told(&on_device), of_kinds(&kinds))).unwrap_or_default()
    }

    pub(crate) fn reserved(&self) -> Result<ReservedStats> {
        let (_, kinds) = self.allocated();
        Ok(ReservedStats::new(&kinds, self.usage()?.as_ref()))
    }

    /// The pool's mark too, which no trace looks at.
    pub(crate) fn reset_peaks(&self) -> Result<()> {
        let Self { session, devices, device } = *self;
        without_pools(devices.reset_pool_reserved(device.ordinal))?;
        session.inbox.post(&EventKind::ResetPeaks { device });
        Ok(())
    }

    fn usage(&self) -> Result<Option<PoolUsage>> {
        without_pools(self.devices.read_pool(self.device.ordinal))
    }
}

/// None on a device that has no pools.
fn without_pools<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(error) if error.is_no_gauge(Gauge::Pool.name()) => Ok(None),
        read => read.map(Some),
    }
}

fn hear(devices: &dyn Devices) -> Result<&'static Session> {
    if let Some(why) = not_exact_by_wish(settings().gauge()?) {
        // A program may have subscribed by itself.
        return begun().filter(|_| devices.subscribed().is_some()).ok_or(why);
    }
    let session = session();
    session.subscribe(devices, None, false)?;
    Ok(session)
}

/// What is live on all devices, the largest first.
pub(crate) fn live_blocks() -> Result<Vec<LiveBlock>> {
    Ok(places::live_blocks(hear(devices()?)?, None))
}

fn of_kinds(kinds: &[ledger::Stat; MemKind::ALL.len()]) -> KindStats {
    let kind = |kind: MemKind| told(&kinds[kind as usize]);
    KindStats {
        device: kind(MemKind::Device),
        pool: kind(MemKind::Pool),
        vmm: kind(MemKind::Vmm),
        graph: kind(MemKind::Graph),
        managed: kind(MemKind::Managed),
        pinned_host: kind(MemKind::PinnedHost),
    }
}

fn told(stat: &ledger::Stat) -> AllocStats {
    let ledger::Stat { bytes, blocks } = *stat;
    let [current, peak, allocated, freed] = [bytes.current, bytes.peak, bytes.allocated, bytes.freed()].map(Bytes::new);
    let bytes = Tally { current, peak, allocated, freed };
    let (current, peak, allocated, freed) = (blocks.current, blocks.peak, blocks.allocated, blocks.freed());
    AllocStats { bytes, blocks: Tally { current, peak, allocated, freed } }
}
