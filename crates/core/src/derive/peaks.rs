//! Derives the allocations that made a peak.

use std::fmt;

use super::{LedgerView, Names, Paths};
use crate::{
    ledger::{AllocGroup, GroupAtPeak},
    model::{Bytes, Device, Family, MemKind, ScopeId},
    report::{PeakHolder, PeakHolders, PoolAtPeak},
};

/// A peak that the ledger keeps until this is dropped, whether its scope is open or not.
pub struct KeptPeak<'a> {
    view: &'a dyn LedgerView,
    under: ScopeId,
}

impl Drop for KeptPeak<'_> {
    fn drop(&mut self) {
        self.view.release_peak(self.under);
    }
}

impl fmt::Debug for KeptPeak<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeptPeak").field(&self.under).finish()
    }
}

impl<'a> KeptPeak<'a> {
    /// Keeps the peak of an open scope so far, under the id `under`, which no scope has. `None` unless the scope was
    /// opened with `at_peak`.
    pub fn of_open(view: &'a dyn LedgerView, scope: ScopeId, under: ScopeId) -> Option<Self> {
        view.keep_peak(scope, under).then_some(Self { view, under })
    }

    /// Returns the peak of a closed scope that was opened with `at_peak`.
    pub fn of_closed(view: &'a dyn LedgerView, scope: ScopeId) -> Self {
        Self { view, under: scope }
    }

    /// Keeps the peak of the blocks that gpumem saw on a device since the start of the session; `None` if it saw none.
    pub fn of_device(view: &'a dyn LedgerView, device: Device, under: ScopeId) -> Option<Self> {
        view.keep_device_peak(device, under, false).then_some(Self { view, under })
    }

    /// Returns the allocations that made up the peak.
    pub fn holders(&self, names: &dyn Names) -> Option<PeakHolders> {
        peak_holders(self.view, names, self.under)
    }
}

/// Returns the allocations that made a peak that the ledger keeps under this id.
fn peak_holders(view: &dyn LedgerView, names: &dyn Names, under: ScopeId) -> Option<PeakHolders> {
    let (peak, groups) = view.kept_peak(under)?;
    let paths = Paths::now(view, names);
    let holder = |at: &GroupAtPeak| {
        let stack = names.stack(at.group.stack);
        let library = stack.library_as_place().map(str::to_owned);
        PeakHolder {
            path: paths.names_of(at.group.node),
            scope_place: paths.place_of(at.group.node),
            caller: stack.caller.filter(|_| library.is_none()),
            line: stack.line.filter(|_| library.is_none()),
            library,
            is_older: false,
            bytes: at.bytes,
        }
    };
    let older = PeakHolder { is_older: true, bytes: peak.older, ..PeakHolder::default() };
    let counts = view.counts();
    let sum = |is_counted: &dyn Fn(&AllocGroup) -> bool| {
        let sum: i64 = groups.iter().filter(|at| is_counted(&at.group)).map(|at| at.bytes.get()).sum();
        Bytes::new(sum.max(0).unsigned_abs())
    };
    let pool = |id| PoolAtPeak {
        name: names.pool(id),
        used: sum(&|group| group.pool == id && group.kind == MemKind::Part),
        reserved: sum(&|group| group.pool == id && group.kind != MemKind::Part),
    };
    let pools = view.pools().into_iter().filter(|pool| pool.device == peak.device && !peak.is_over_start);
    let pools = pools.map(|known| pool(known.pool)).filter(|pool| pool.used.max(pool.reserved) > Bytes::ZERO).collect();
    Some(PeakHolders {
        device: peak.device.ordinal,
        simulated: peak.device.family == Family::Simulated,
        bytes: Bytes::new(peak.bytes.get().max(0).unsigned_abs()),
        is_over_start: peak.is_over_start,
        holders: PeakHolder::largest(groups.iter().filter(|at| at.group.is_in_program()).map(holder).chain([older])),
        pools,
        untracked: counts.untracked,
        lost: counts.lost,
    })
}
