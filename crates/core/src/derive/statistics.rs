//! The statistics of a device's allocators, under PyTorch's names.

use std::time::Duration;

use super::LedgerView;
use crate::{
    ledger::{self, DeviceStats},
    model::{Bytes, Device, Family, MemKind, PoolUsage},
    report::{AllocStats, KindStats, MemoryStats, ReservedStats, Tally},
};

/// Returns the statistics of a device. `pool` is the usage of its current pool: `Some(None)` if it has none, `None` if it could
/// not be read.
pub fn memory_stats(
    view: &dyn LedgerView,
    device: Device,
    intercepted_by: String,
    since: Duration,
    pool: Option<Option<PoolUsage>>,
) -> MemoryStats {
    let (all, kinds) = of_device(view, device);
    let counts = view.counts();
    MemoryStats {
        device: device.ordinal,
        simulated: device.family == Family::Simulated,
        intercepted_by,
        since,
        untracked: counts.untracked,
        lost: counts.lost,
        all,
        kinds,
        reserved: pool.map(|pool| ReservedStats::new(&kinds, pool.as_ref())),
    }
}

/// Returns the statistics of the memory that is certainly on the device, and of each kind. Zeros if nothing was intercepted.
pub fn of_device(view: &dyn LedgerView, device: Device) -> (AllocStats, KindStats) {
    let known = view.stats().into_iter().find(|stats| stats.device == device);
    known.map(|DeviceStats { on_device, kinds, .. }| (of_stat(&on_device), of_kinds(&kinds))).unwrap_or_default()
}

fn of_kinds(kinds: &[ledger::Stat; MemKind::ALL.len()]) -> KindStats {
    let kind = |kind: MemKind| of_stat(&kinds[kind as usize]);
    KindStats {
        device: kind(MemKind::Device),
        pool: kind(MemKind::Pool),
        vmm: kind(MemKind::Vmm),
        graph: kind(MemKind::Graph),
        managed: kind(MemKind::Managed),
        pinned_host: kind(MemKind::PinnedHost),
    }
}

fn of_stat(stat: &ledger::Stat) -> AllocStats {
    let ledger::Stat { bytes, blocks } = *stat;
    let [current, peak, allocated, freed] = [bytes.current, bytes.peak, bytes.allocated, bytes.freed()].map(Bytes::new);
    let bytes = Tally { current, peak, allocated, freed };
    let (current, peak, allocated, freed) = (blocks.current, blocks.peak, blocks.allocated, blocks.freed());
    AllocStats { bytes, blocks: Tally { current, peak, allocated, freed } }
}
