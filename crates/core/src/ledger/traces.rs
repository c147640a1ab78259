//! Measures scopes: takes the values at their start, and reads their traces. `only_on` is the meter of another device, if the
//! scope's thread allocated only there.

use std::time::Duration;

use super::{
    meters::Meter,
    scope::{Scope, ScopeStart},
    sums::Sums,
    tree::NodeId,
    watermark::Mark,
};
use crate::model::{ByteDelta, Bytes, DriverUsage, Family, Gauge, Sampling, ScopeId, Trace};

impl Sums {
    /// Starts to measure a scope, which opens now.
    #[inline]
    pub(super) fn open(&mut self, scope: &mut Scope) {
        if let Some(account) = scope.account {
            self.accounts.open(account, scope.number);
        }
        if let Some(whole) = scope.whole {
            self.accounts.open_whole(whole, scope.number);
        }
        scope.start = self.start(scope, scope.number);
        self.watch_peak(scope);
    }

    /// Restarts a scope from 0. This also restarts the record of the allocations of its peak, unless `keep_peak` is true.
    pub(super) fn reset(&mut self, scope: &mut Scope, number: u64, keep_peak: bool) {
        self.end(scope);
        if let Some(account) = scope.account {
            self.accounts.reset(account, scope.start.number, number);
        }
        scope.start = self.start(scope, number);
        if !keep_peak {
            self.unwatch_peak(scope);
            self.watch_peak(scope);
        }
    }

    /// Closes a scope. Keeps its peak, if the peak is watched.
    #[inline]
    pub(super) fn close(&mut self, id: ScopeId, scope: &mut Scope) {
        self.end(scope);
        if scope.watched.is_some() {
            self.keep(id, scope);
            self.unwatch_peak(scope);
        }
        if let Some(account) = scope.account {
            self.accounts.close(account, scope.start.number);
        }
        if let Some(whole) = scope.whole {
            self.accounts.close_whole(whole);
        }
    }

    /// Returns the values with which a scope starts now.
    fn start(&mut self, scope: &Scope, number: u64) -> ScopeStart {
        let exact = &mut self.meters.0[usize::from(scope.exact_meter)].level;
        let (device_in_use, device_peak) = (exact.in_use, exact.peaks.open(exact.in_use));
        let driver = self.meters.0[usize::from(scope.exact_meter)].driver.as_mut();
        let driver = driver.map(|level| (level.in_use, level.peaks.open(level.in_use)));
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(scope.meter)];
        let gap = if scope.is_sampled() { samples.gaps.open(Duration::ZERO) } else { Mark::default() };
        let (samples_before, is_unread) = (samples.count.saturating_sub(1), samples.failed);
        let level = self.accounts.level(scope.account).unwrap_or(level);
        let (in_use, peak) = (level.in_use, level.peaks.open(level.in_use));
        let mut before = self.counts;
        before.lost -= self.displaced;
        ScopeStart { number, in_use, peak, device_in_use, device_peak, driver, gap, samples_before, is_unread, before }
    }

    /// Closes the marks of a scope.
    fn end(&mut self, scope: &Scope) {
        self.store_device_peak(scope.node, scope);
        let exact = &mut self.meters.0[usize::from(scope.exact_meter)];
        exact.level.peaks.close(scope.start.device_peak);
        if let (Some(level), Some((_, mark))) = (&mut exact.driver, scope.start.driver) {
            level.peaks.close(mark);
        }
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(scope.meter)];
        if scope.is_sampled() {
            samples.gaps.close(scope.start.gap);
        }
        self.accounts.level(scope.account).unwrap_or(level).peaks.close(scope.start.peak);
    }

    /// Stores in the tree, for this path of a scope, the highest memory of the process on the device since the scope started.
    #[inline]
    pub(super) fn store_device_peak(&mut self, node: NodeId, scope: &Scope) {
        let exact = &self.meters.0[usize::from(scope.exact_meter)];
        self.tree.raise_device_peak(node, exact.level.peaks.max_since(scope.start.device_peak));
    }

    /// Returns the trace of a scope since its start.
    pub(super) fn trace(&self, scope: &Scope, only_on: Option<u16>) -> Trace {
        let Meter { device, gauge, samples, level, .. } = &self.meters.0[usize::from(scope.meter)];
        let ScopeStart { in_use: start, peak, gap, samples_before, is_unread, before, .. } = scope.start;
        let account = scope.account.and_then(|id| self.accounts.get(id));
        let level = account.map_or(level, |account| &account.level);
        let (end, peak) = (level.in_use, level.peaks.max_since(peak));
        let peaked = peak_above(peak, start.max(end));
        debug_assert!(peaked.is_some(), "a peak of {peak} is below {start} or {end}");
        Trace {
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            gauge: *gauge,
            source: scope.spec.source,
            used: ByteDelta::new(end - start),
            peaked: Bytes::new(peaked.unwrap_or(0)),
            sampling: scope.is_sampled().then(|| Sampling {
                every: scope.spec.every,
                readings: samples.count - samples_before,
                longest_gap: samples.gaps.max_since(gap),
            }),
            stale: samples.failed || is_unread,
            shared: Bytes::new(account.map_or(0, |account| account.shared_since(scope.start.number))),
            allocated_on: only_on.map(|meter| self.meters.0[usize::from(meter)].device.ordinal),
            untracked: if *gauge == Gauge::Exact { self.counts.untracked.saturating_sub(before.untracked) } else { 0 },
            // A peak below the value at the start or the end is a bug in gpumem. `lost` makes it visible.
            lost: u64::from(peaked.is_none())
                + match gauge {
                    Gauge::Exact => self.counts.lost - before.lost,
                    // Samples are readings of the device and do not depend on intercepted calls.
                    Gauge::Sampled | Gauge::Off => 0,
                },
            driver: if *gauge == Gauge::Exact { self.driver_usage(scope) } else { None },
        }
    }

    /// Returns the values of the driver's view since a scope started.
    fn driver_usage(&self, scope: &Scope) -> Option<DriverUsage> {
        let level = self.meters.0[usize::from(scope.exact_meter)].driver.as_ref()?;
        let (start, mark) = scope.start.driver?;
        let peaked = peak_above(level.peaks.max_since(mark), start.max(level.in_use))?;
        Some(DriverUsage::new(ByteDelta::new(level.in_use - start), Bytes::new(peaked)))
    }
}

/// Returns how far a peak is above `ends`, the larger of the values at the start and at the end. `None` if it is below.
pub(super) fn peak_above(peak: i64, ends: i64) -> Option<u64> {
    peak.checked_sub(ends).and_then(|above| u64::try_from(above).ok())
}
