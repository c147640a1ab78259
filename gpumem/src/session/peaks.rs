//! Which allocations made a peak: what the fold keeps by number, under its names.

use std::{process, sync::atomic::Ordering::Relaxed};

use super::{Session, begun, notice::say, places::Paths, session, settings};
use crate::{
    ledger::AtPeak,
    model::{Bytes, Device, Family, ScopeId},
    report::{PeakHolder, PeakHolders},
};

/// A peak that the fold keeps until this is dropped, whether its scope is open or not.
#[derive(Debug)]
pub(super) struct KeptPeak(ScopeId);

impl Drop for KeptPeak {
    fn drop(&mut self) {
        session().inbox.release_peak(self.0);
    }
}

impl KeptPeak {
    /// That of an open scope, so far; `None` unless it was opened for that.
    pub(super) fn of_open(scope: ScopeId) -> Option<Self> {
        let Session { inbox, scopes, .. } = session();
        let under = ScopeId(scopes.fetch_add(1, Relaxed));
        inbox.keep_peak(scope, under).then_some(Self(under))
    }

    /// That of a scope that was opened for that, and is closed.
    pub(super) fn of_closed(scope: ScopeId) -> Self {
        Self(scope)
    }

    /// Of the blocks that gpumem saw on a device, since the start of the session; `None` if there were none.
    pub(super) fn of_device(session: &Session, device: Device) -> Option<Self> {
        let under = ScopeId(session.scopes.fetch_add(1, Relaxed));
        session.inbox.keep_device_peak(device, under).then_some(Self(under))
    }

    /// How much it was, and of which groups.
    pub(super) fn groups(&self, session: &Session) -> Option<(Bytes, Vec<AtPeak>)> {
        let (peak, groups) = session.inbox.kept_peak(self.0)?;
        Some((Bytes::new(peak.bytes.get().max(0).unsigned_abs()), groups))
    }

    /// The same under its names.
    pub(super) fn holders(&self, session: &Session) -> Option<PeakHolders> {
        let (peak, groups) = session.inbox.kept_peak(self.0)?;
        let paths = Paths::now(session);
        let holder = |group: &AtPeak| {
            let scope = paths.of(group.group.node);
            let stack = super::places::stack(group.group.stack);
            PeakHolder {
                path: scope.map(|scope| scope.path.clone()).unwrap_or_default(),
                scope_place: scope.and_then(|scope| scope.place.clone()),
                caller: stack.caller.filter(|_| stack.library.is_none()),
                line: stack.line.filter(|_| stack.library.is_none()),
                library: stack.library,
                is_older: false,
                bytes: group.bytes,
            }
        };
        let older = PeakHolder { is_older: true, bytes: peak.older, ..PeakHolder::default() };
        let counts = session.inbox.counts();
        Some(PeakHolders {
            device: peak.device.ordinal,
            simulated: peak.device.family == Family::Simulated,
            bytes: Bytes::new(peak.bytes.get().max(0).unsigned_abs()),
            is_over_start: peak.is_over_start,
            holders: PeakHolder::largest(groups.iter().map(holder).chain([older])),
            untracked: counts.untracked,
            lost: counts.lost,
        })
    }
}

/// `GPUMEM_PEAK=1`: says at the end of the process which allocations made the peak of each device.
pub(super) fn report_at_exit() {
    let Some(session) = begun().filter(|_| settings().peak) else { return };
    let mut devices: Vec<Device> = session.inbox.stats().iter().map(|stats| stats.device).collect();
    devices.sort_by_key(|device| device.ordinal);
    let peaks = devices.into_iter().filter_map(|device| KeptPeak::of_device(session, device)?.holders(session));
    let mut text: String = peaks.map(|peak| peak.to_string()).collect();
    if text.is_empty() {
        text.push_str("no allocation was seen\n");
    }
    if !super::status::Now::find().is_intercepted() {
        text.push_str("gpumem: allocations are not intercepted; there may have been more\n");
    }
    say(&format_args!("gpumem: process {} ends. {text}", process::id()));
}
