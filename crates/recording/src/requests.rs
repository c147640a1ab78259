//! Derives the reports that the program requested.

use std::time::UNIX_EPOCH;

use super::{
    budget::Budget,
    bytes::LONGEST_TEXT,
    check::{Rejection, check_device, check_reading, check_usage},
    item::Request,
    output::{ReplayedReport, at_exit},
    state::{MOST_LINES, Refused, ScopeResult, State, Tracker},
};
use gpumem_core::{
    derive::{self, KeptPeak, LedgerView, Names, Snapshot},
    error::Error,
    ledger::{NodeId, ScopePeriod},
    model::ScopeId,
    report::{
        Breakdown, Content, DeviceReading, Groups, LiveBlock, OutOfMemory, PeakHolders, Report, SourceLine, Tracked,
        difference, live,
    },
};

/// The most trackers, and the most groups of blocks that they remember.
const MOST_TRACKERS: usize = 1 << 10;
const MOST_SORTS: usize = 1 << 21;
/// The most rejected allocations that are waiting for their report.
const MOST_REFUSALS: usize = 32;

/// The data that a report covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Groups,
    Blocks,
}

type Result<T> = std::result::Result<T, Rejection>;

impl State {
    /// Returns the report that the program requested; `None` if the request has no report.
    pub(super) fn output(&mut self, request: Request, budget: &mut Budget) -> Result<Option<ReplayedReport>> {
        Ok(match request {
            Request::Report { scope, .. } | Request::Line { scope, .. } | Request::PeakHolders { scope }
                if self.is_partial(scope) =>
            {
                None
            }
            Request::Report { scope, ctx, subctx, lines } => {
                Some(ReplayedReport::Report(self.report(scope, ctx.as_deref(), subctx.as_deref(), lines, budget)?))
            }
            Request::Line { scope, number, source } => {
                self.line(scope, number, source)?;
                None
            }
            Request::Summary { not_intercepted } => {
                self.charge(Extent::Groups, budget)?;
                let temporary_scope = self.next_scope();
                Some(ReplayedReport::Summary(derive::summary(
                    &self.inbox,
                    &self.definitions,
                    temporary_scope,
                    not_intercepted,
                )))
            }
            Request::Breakdown(reading) => Some(ReplayedReport::Breakdown(self.breakdown(&reading, budget)?)),
            Request::MemoryStats { device, intercepted_by, since, pool } => {
                check_device(device)?;
                pool.flatten().as_ref().map_or(Ok(()), check_usage)?;
                let stats = derive::memory_stats(&self.inbox, device, intercepted_by, since, pool);
                Some(ReplayedReport::MemoryStats(Box::new(stats)))
            }
            Request::LiveBlocks { scope } => Some(ReplayedReport::LiveBlocks(self.blocks_of(scope, budget)?)),
            Request::Leaks { is_intercepted } => {
                self.charge(Extent::Blocks, budget)?;
                let pid = self.definitions.process().pid;
                let leaks = derive::leaks(&self.inbox, &self.definitions, is_intercepted);
                Some(at_exit(Content::Leaks(leaks), pid))
            }
            Request::Peaks { is_intercepted } => {
                self.charge(Extent::Groups, budget)?;
                let (temporary_scope, pid) = (self.next_scope(), self.definitions.process().pid);
                let peaks = derive::device_peaks(&self.inbox, &self.definitions, temporary_scope, is_intercepted);
                Some(at_exit(Content::Peaks(peaks), pid))
            }
            Request::PeakHolders { scope } => Some(ReplayedReport::PeakHolders(self.peak_holders(scope, budget)?)),
            Request::TrackerStarted { tracker, device } => {
                check_device(device)?;
                if self.trackers.len() >= MOST_TRACKERS {
                    return Err(Rejection::Limit);
                }
                let lost = self.inbox.counts().lost;
                let new = Tracker { device, groups: Groups::new(), lost, is_first: true };
                if self.trackers.insert(tracker, new).is_some() {
                    return Err(Rejection::Contradiction);
                }
                None
            }
            Request::Tracked { tracker, time, file, line, column, ctx, used, is_intercepted } => {
                let mut tracked =
                    self.came_and_went(tracker, SourceLine::new(file, line, column), ctx, is_intercepted, budget)?;
                tracked.time = UNIX_EPOCH.checked_add(time).ok_or(Rejection::Limit)?;
                tracked.used = used;
                Some(ReplayedReport::Tracked(tracked))
            }
            Request::TrackerEnded { tracker } => {
                self.trackers.remove(&tracker).ok_or(Rejection::Contradiction)?;
                None
            }
            Request::Refused { refusal, device, requested, kind, stack, path } => {
                check_device(device)?;
                self.charge(Extent::Groups, budget)?;
                self.refused(refusal, derive::Refusal { device, requested, kind, stack, path });
                None
            }
            Request::OutOfMemory { refusal, reading } => {
                Some(ReplayedReport::OutOfMemory(self.out_of_memory(refusal, reading, budget)?))
            }
        })
    }

    fn answer(&mut self, scope: ScopeId) -> Result<&mut ScopeResult> {
        self.answers.get_mut(&scope).ok_or(Rejection::Contradiction)
    }

    fn report(
        &mut self,
        scope: ScopeId,
        ctx: Option<&str>,
        subctx: Option<&str>,
        lines: Option<u32>,
        budget: &mut Budget,
    ) -> Result<Report> {
        let within = self.period(scope)?;
        let outer =
            within.map(|within| derive::outer_names(&self.inbox, &self.definitions, &within)).unwrap_or_default();
        if !budget.report(outer.iter().map(|name| 32 + name.len() as u64).sum()) {
            return Err(Rejection::Limit);
        }
        let answer = self.answer(scope)?;
        let trace = answer.trace.ok_or(Rejection::Contradiction)?;
        let Some(end) = lines else { return Ok(Report::new(trace, ctx, subctx).inside(outer)) };
        let number_of_lines = std::mem::take(&mut answer.number_of_lines);
        let (trace, lines) = std::mem::take(&mut answer.lines).finish(end, trace);
        self.lines -= number_of_lines;
        let mut report = Report::new(trace, ctx, subctx).inside(outer);
        report.lines = lines;
        Ok(report)
    }

    /// Returns the period of a scope, until now or until it was closed. `None` if it was never open.
    fn period(&mut self, scope: ScopeId) -> Result<Option<ScopePeriod>> {
        if self.is_open(scope) { Ok(self.inbox.scope_period(scope)) } else { Ok(self.answer(scope)?.within.clone()) }
    }

    fn line(&mut self, scope: ScopeId, number: u32, source: String) -> Result<()> {
        if self.lines >= MOST_LINES {
            return Err(Rejection::Limit);
        }
        let answer = self.answer(scope)?;
        let trace = answer.trace.ok_or(Rejection::Contradiction)?;
        answer.lines.push(number, source, trace);
        answer.number_of_lines += 1;
        self.lines += 1;
        Ok(())
    }

    /// Returns the breakdown of a device's memory, from a reading of it.
    fn breakdown(&mut self, reading: &DeviceReading, budget: &mut Budget) -> Result<Breakdown> {
        check_reading(reading)?;
        self.charge(Extent::Groups, budget)?;
        let snapshot = Snapshot::now(&self.inbox, &self.definitions, reading.device);
        let live = snapshot.groups(|stack| self.definitions.stack(stack));
        Ok(Breakdown::of(reading, self.definitions.process().pid, &live))
    }

    fn blocks_of(&mut self, scope: Option<ScopeId>, budget: &mut Budget) -> Result<Vec<LiveBlock>> {
        let within = match scope {
            None => None,
            Some(scope) => Some(self.period(scope)?.ok_or(Rejection::Contradiction)?),
        };
        self.charge(Extent::Blocks, budget)?;
        Ok(derive::live_blocks(&self.inbox, &self.definitions, within.as_ref()))
    }

    fn peak_holders(&mut self, scope: ScopeId, budget: &mut Budget) -> Result<PeakHolders> {
        self.charge(Extent::Groups, budget)?;
        let temporary_scope = self.next_scope();
        let holders = if self.is_kept(scope) {
            derive::peak_holders(&self.inbox, &self.definitions, scope)
        } else {
            KeptPeak::of_open(&self.inbox, scope, temporary_scope).and_then(|kept| kept.holders(&self.definitions))
        };
        let trace = self.answer(scope)?.trace.ok_or(Rejection::Contradiction)?;
        let mut holders = holders.ok_or(Rejection::Contradiction)?;
        (holders.untracked, holders.lost) = (trace.untracked, trace.lost);
        Ok(holders)
    }

    fn came_and_went(
        &mut self,
        number: u64,
        at: SourceLine,
        ctx: Option<String>,
        is_intercepted: bool,
        budget: &mut Budget,
    ) -> Result<Tracked> {
        let device = self.trackers.get(&number).ok_or(Rejection::Contradiction)?.device;
        self.charge(Extent::Blocks, budget)?;
        let groups = is_intercepted.then(|| {
            let Self { inbox, definitions, labels, .. } = self;
            derive::tracked_groups(&*inbox, &*definitions, device, |blocks| labels.of_blocks(&*inbox, blocks))
        });
        let sorts: usize = self.trackers.values().map(|tracker| tracker.groups.len()).sum();
        if sorts + groups.as_ref().map_or(0, Groups::len) > MOST_SORTS {
            return Err(Rejection::Limit);
        }
        let now = self.inbox.counts().lost;
        let Tracker { groups: before, lost, is_first, .. } =
            self.trackers.get_mut(&number).ok_or(Rejection::Contradiction)?;
        let mut tracked = Tracked::at(UNIX_EPOCH, at, ctx, device);
        tracked.is_first = std::mem::replace(is_first, false);
        if let Some(groups) = groups {
            tracked.live = Some(live(&groups));
            tracked.changes = Some(difference(before, &groups));
            tracked.lost = now - *lost;
            (*before, *lost) = (groups, now);
        }
        Ok(tracked)
    }

    fn refused(&mut self, number: u64, refusal: derive::Refusal) {
        let device = refusal.device;
        let snapshot = Snapshot::now(&self.inbox, &self.definitions, device);
        let temporary_scope = self.next_scope();
        let peak = self.inbox.keep_device_peak(device, temporary_scope, false).then_some(temporary_scope);
        self.refusals.push_back((number, Refused { refusal, snapshot, peak }));
        if self.refusals.len() > MOST_REFUSALS
            && let Some((_, Refused { peak: Some(temporary_scope), .. })) = self.refusals.pop_front()
        {
            self.inbox.release_peak(temporary_scope);
        }
    }

    fn out_of_memory(
        &mut self,
        number: u64,
        reading: std::result::Result<DeviceReading, String>,
        budget: &mut Budget,
    ) -> Result<OutOfMemory> {
        let at = self.refusals.iter().rposition(|(of, _)| *of == number).ok_or(Rejection::Contradiction)?;
        reading.as_ref().map_or(Ok(()), check_reading)?;
        let reading = reading.map_err(Error::recorded);
        let (_, Refused { refusal, snapshot, peak }) = self.refusals.remove(at).ok_or(Rejection::Contradiction)?;
        let is_allowed = self.charge(Extent::Groups, budget);
        let holders = peak
            .filter(|_| is_allowed.is_ok())
            .and_then(|temporary_scope| derive::peak_holders(&self.inbox, &self.definitions, temporary_scope));
        if let Some(temporary_scope) = peak {
            self.inbox.release_peak(temporary_scope);
        }
        is_allowed?;
        Ok(refusal.resolved(&snapshot, holders, reading, self.definitions.process().pid, &self.definitions))
    }

    /// Rejects a report that would be too large, or too much work after the earlier ones.
    pub(super) fn charge(&self, extent: Extent, budget: &mut Budget) -> Result<()> {
        if !budget.may_report() {
            return Err(Rejection::Limit);
        }
        let names = &self.definitions;
        let mut paths: Vec<u64> = Vec::new();
        let mut texts = 0_u64;
        for (_, node) in self.inbox.nodes() {
            let outer = paths.get(node.parent.0 as usize).copied().unwrap_or(0);
            let path = outer.saturating_add(32 + names.callsite(node.callsite).to_string().len() as u64);
            texts = texts.saturating_add(path);
            paths.push(path);
        }
        for usage in self.inbox.groups() {
            let NodeId(node) = usage.group.node;
            let stack = names.length_of(usage.group.stack);
            let words = if extent == Extent::Blocks { stack } else { stack.min(3 * LONGEST_TEXT as u64) };
            let each = paths.get(node as usize).copied().unwrap_or(0).saturating_add(256 + words);
            let times = if extent == Extent::Blocks { usage.blocks } else { 1 };
            texts = texts.saturating_add(each.saturating_mul(times));
        }
        if budget.report(texts) { Ok(()) } else { Err(Rejection::Limit) }
    }
}
