//! Opens, reads, resets and closes scopes. Threads enter and leave them in `threads.rs`.

use std::time::Duration;

use super::{
    Ledger,
    account_id::AccountId,
    allocated_on::AllocatedOn,
    meters::Meter,
    observer::Observer,
    scope::{Scope, ScopeStart},
    thread::{Entered, Thread},
    watermark::Mark,
};
use crate::model::{
    ByteDelta, Bytes, CallsiteId, Counted, DriverUsage, Event, EventKind, Family, Gauge, Sampling, ScopeId, ScopeSpec,
    Trace,
};

impl Ledger {
    /// Like [`apply_observed`](Self::apply_observed), for an allocation or the opening of a scope whose thread was in this scope path, or
    /// for a thread that enters a scope with this path. The events that led there are not known.
    pub fn apply_inside(&mut self, path: &[CallsiteId], event: &Event<'_>, observer: &mut impl Observer) {
        let meter = match event.kind {
            EventKind::Alloc { block, .. } => Some(self.meters.index(block.device, Gauge::Exact)),
            EventKind::Open { spec, .. } => Some(self.meters.index(spec.device, Gauge::Exact)),
            // Allocations find the path on their device. A scope that is already closed is on no device.
            EventKind::Enter { scope } => Some(self.scopes.get(scope).map_or(0, |open| open.exact_meter)),
            _ => None,
        };
        let Some(meter) = meter else {
            self.apply_observed(event, observer);
            return;
        };
        let root = self.tree.root(meter);
        let node = path.iter().fold(root, |outer, callsite| self.tree.child(outer, *callsite));
        if let EventKind::Enter { .. } = event.kind {
            self.apply_observed(event, observer);
            let thread = self.thread(event.thread);
            thread.entered.back_mut().into_iter().for_each(|entered| entered.node = node);
            return thread.update_scope();
        }
        // No scope has this number.
        let scope = ScopeId(u64::MAX);
        let owner = self.thread(event.thread).own;
        self.thread(event.thread).enter(Entered {
            number: event.number,
            scope,
            node,
            host: None,
            owner,
            by_opening: false,
        });
        self.apply_observed(event, observer);
        self.thread(event.thread).leave(scope);
    }

    /// Opens a scope inside the scope that its thread is in.
    pub(super) fn open(&mut self, scope: ScopeId, spec: ScopeSpec, event: &Event<'_>) {
        let meter = self.meters.index(spec.device, spec.gauge);
        let exact_meter = self.meters.index(spec.device, Gauge::Exact);
        let outer = self.thread(event.thread).node;
        let outer = self.tree.same_path_on(exact_meter, outer);
        let node = self.tree.child(outer, spec.callsite);
        self.tree.opened(node);
        let Thread { owner: around, own, .. } = *self.thread(event.thread);
        let task = if spec.counts == Counted::Task { self.task_in(around) } else { None };
        let owner = task.unwrap_or(around);
        let (of, counts_unscoped) = match spec.counts {
            Counted::AllThreads | Counted::OwnAndUnscoped => (Some(own), true),
            Counted::Own => (Some(own), false),
            Counted::Task => (task, false),
        };
        // Samples are readings of the whole device.
        let is_whole = spec.gauge != Gauge::Exact || spec.counts == Counted::AllThreads;
        let account = of.map(|of| AccountId { of, meter: exact_meter, counts_unscoped });
        let (account, whole) = if is_whole { (None, account) } else { (account, None) };
        if let Some(account) = account {
            self.accounts.open(account, event.number);
        }
        if let Some(whole) = whole {
            self.accounts.open_whole(whole, event.number);
        }
        if let Some(task) = task {
            self.tasks.insert(task, AllocatedOn::default());
        }
        let opener = event.thread;
        let mut open = Box::new(Scope {
            spec,
            meter,
            account,
            whole,
            node,
            previous_nodes: Vec::new(),
            exact_meter,
            owner,
            opener,
            own,
            number: event.number,
            devices_since: event.number,
            start: ScopeStart::default(),
            watched: None,
        });
        open.start = self.start_scope(&open, event.number);
        self.watch_peak(&mut open);
        self.scopes.insert(scope, open);
        if spec.counts != Counted::Task {
            self.thread(opener).enter(Entered {
                number: event.number,
                scope,
                node,
                host: None,
                owner,
                by_opening: true,
            });
        }
        self.look_up_again();
    }

    /// Returns the values with which a scope starts now.
    fn start_scope(&mut self, scope: &Scope, number: u64) -> ScopeStart {
        let exact = &mut self.meters.0[usize::from(scope.exact_meter)].level;
        let (device_in_use, device_peak) = (exact.in_use, exact.peaks.open(exact.in_use));
        let driver = self.meters.0[usize::from(scope.exact_meter)].driver.as_mut();
        let driver = driver.map(|level| (level.in_use, level.peaks.open(level.in_use)));
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(scope.meter)];
        let gap = if scope.is_sampled() { samples.gaps.open(Duration::ZERO) } else { Mark::default() };
        let (samples_before, is_unread) = (samples.count.saturating_sub(1), samples.failed);
        let level = scope.account.and_then(|id| self.accounts.get_mut(id)).map_or(level, |account| &mut account.level);
        let (in_use, peak) = (level.in_use, level.peaks.open(level.in_use));
        let mut before = self.counts;
        before.lost -= self.displaced;
        ScopeStart { number, in_use, peak, device_in_use, device_peak, driver, gap, samples_before, is_unread, before }
    }

    /// Reads a scope and restarts it from 0. This also restarts the record of the allocations of its peak, unless `keep_peak` is
    /// true.
    pub(super) fn reset(&mut self, scope: ScopeId, number: u64, keep_peak: bool) -> Option<Trace> {
        let mut open = self.scopes.remove(&scope)?;
        let trace = self.end(&open);
        if let Some(account) = open.account {
            self.accounts.reset(account, open.start.number, number);
        }
        open.start = self.start_scope(&open, number);
        if !keep_peak {
            // Threads in a task need not look up their next allocation.
            open.devices_since = if open.is_task() { open.devices_since } else { number };
            self.thread(open.opener).forget_latest();
            self.unwatch_peak(&mut open);
            self.watch_peak(&mut open);
        }
        self.scopes.insert(scope, open);
        self.look_up_again();
        Some(trace)
    }

    pub(super) fn close(&mut self, scope: ScopeId) -> Option<Trace> {
        let mut open = self.scopes.remove(&scope)?;
        let trace = self.end(&open);
        if open.watched.is_some() {
            self.keep(scope, &open);
            self.unwatch_peak(&mut open);
        }
        if let Some(account) = open.account {
            self.accounts.close(account, open.start.number);
        }
        if let Some(whole) = open.whole {
            self.accounts.close_whole(whole);
        }
        if open.is_task() {
            self.tasks.remove(&open.owner);
        } else if let Some(at) = self.thread(open.opener).leave_opened(scope, open.number) {
            self.update_later(open.opener, at);
            if at < self.thread(open.opener).entered.len() {
                self.move_out(open.opener, at, open.node);
            }
        }
        self.end_adoption(scope);
        Some(trace)
    }

    /// Restarts the statistics of all scope paths. Open scopes count as opened now.
    pub(super) fn reset_summary(&mut self, number: u64) {
        self.summary_since = number;
        for Meter { level, peaks, .. } in &mut self.meters.0 {
            peaks.reset_record(level.in_use);
        }
        self.tree.reset();
        for scope in self.scopes.values() {
            self.tree.opened(scope.node);
        }
    }

    /// Reads a scope and closes its marks.
    fn end(&mut self, scope: &Scope) -> Trace {
        let trace = self.trace(scope);
        let device_peak = self.device_peak(scope);
        self.tree.raise_device_peak(scope.node, device_peak);
        let exact = &mut self.meters.0[usize::from(scope.exact_meter)];
        exact.level.peaks.close(scope.start.device_peak);
        if let (Some(level), Some((_, mark))) = (&mut exact.driver, scope.start.driver) {
            level.peaks.close(mark);
        }
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(scope.meter)];
        if scope.is_sampled() {
            samples.gaps.close(scope.start.gap);
        }
        let level = scope.account.and_then(|id| self.accounts.get_mut(id)).map_or(level, |account| &mut account.level);
        level.peaks.close(scope.start.peak);
        trace
    }

    /// Returns the highest memory of the process on the device since a scope started.
    pub(super) fn device_peak(&self, scope: &Scope) -> i64 {
        self.meters.0[usize::from(scope.exact_meter)].level.peaks.max_since(scope.start.device_peak)
    }

    /// Returns the trace of a scope since its start.
    pub(super) fn trace(&self, scope: &Scope) -> Trace {
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
            allocated_on: self.allocated_only_on(scope),
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
}

impl Ledger {
    /// Returns the values of the driver's view since a scope started.
    fn driver_usage(&self, scope: &Scope) -> Option<DriverUsage> {
        let level = self.meters.0[usize::from(scope.exact_meter)].driver.as_ref()?;
        let (start, mark) = scope.start.driver?;
        let peaked = peak_above(level.peaks.max_since(mark), start.max(level.in_use))?;
        Some(DriverUsage::new(ByteDelta::new(level.in_use - start), Bytes::new(peaked)))
    }

    /// Returns the device on which a scope's thread allocated since the scope started, if it allocated nothing on the scope's
    /// device.
    fn allocated_only_on(&self, scope: &Scope) -> Option<u32> {
        if scope.spec.device.family == Family::Custom {
            return None;
        }
        let (meter, since) = (scope.exact_meter, scope.devices_since);
        let other = if scope.is_task() {
            self.tasks.get(&scope.owner)?.other_than(meter, since)
        } else {
            // The opener may have ended.
            let opener = self.threads.get(scope.opener.0 as usize).filter(|opener| opener.own == scope.own)?;
            opener.allocated_on.other_than(meter, since).filter(|_| opener.is_in_opened(scope.number))
        }?;
        Some(self.meters.0[usize::from(other)].device.ordinal)
    }
}

/// Returns how far a peak is above `ends`, the larger of the values at the start and at the end. `None` if it is below.
pub(super) fn peak_above(peak: i64, ends: i64) -> Option<u64> {
    peak.checked_sub(ends).and_then(|above| u64::try_from(above).ok())
}
