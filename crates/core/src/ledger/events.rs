//! Applies each event. Allocations and frees are in `blocks.rs`, scopes in `scopes.rs`.

use super::{
    Ledger,
    live::{Attribution, BLOCK_PARTS},
    meters::Meter,
    observer::{BlockChangeKind, Observer},
    pools::Undecided,
    stats::Stat,
    thread::{Entered, Freed},
};
use crate::model::{Answer, CallsiteId, Event, EventKind, Gauge, OwnerThread, ScopeId, Time, Trace};

impl Ledger {
    /// Applies one event.
    #[inline]
    pub fn apply(&mut self, event: &Event<'_>) -> Answer {
        self.apply_observed(event, &mut ())
    }

    /// Applies an event like [`apply`](Self::apply), and tells the observer its effects on blocks.
    #[inline]
    pub fn apply_observed<O: Observer>(&mut self, event: &Event<'_>, observer: &mut O) -> Answer {
        match event.kind {
            EventKind::Alloc { key, block } => {
                self.set_time(event.time);
                let (bytes, tag) = (block.bytes, block.tag());
                if !tag.is_of_driver() {
                    self.part_observed(*key, bytes, tag, event.number, event.thread, observer);
                    return Answer::Applied;
                }
                if !self.alloc_like_latest(*key, bytes, tag, event.number, event.thread) {
                    self.alloc_observed(*key, bytes, tag, event.number, event.thread, observer);
                } else if O::OBSERVES {
                    let attribution = Attribution::new(OwnerThread(0), self.sums.pending.group);
                    let entry = self.live.entry(bytes, event.number, attribution);
                    self.sums.notify(BlockChangeKind::Allocated, *key, &entry, observer);
                }
                Answer::Applied
            }
            EventKind::Free { key, .. } if self.free_like_latest(*key, event.thread) => {
                if O::OBSERVES
                    && let Freed::Block(key, entry) = self.places.threads.get(event.thread).freed
                {
                    self.sums.notify(BlockChangeKind::Freed, key, &entry, observer);
                }
                Answer::Applied
            }
            EventKind::Free { key, block } => self.free_observed(*key, block.as_ref(), event.thread, observer),
            _ => {
                self.apply_rare(event, observer);
                Answer::Applied
            }
        }
    }

    /// Like [`apply_observed`](Self::apply_observed), for an allocation or the opening of a scope whose thread was in this scope path, or
    /// for a thread that enters a scope with this path. The events that led there are not known.
    pub fn apply_inside(&mut self, path: &[CallsiteId], event: &Event<'_>, observer: &mut impl Observer) {
        let meter = match event.kind {
            EventKind::Alloc { block, .. } => Some(self.sums.meters.index(block.device, Gauge::Exact)),
            EventKind::Open { spec, .. } => Some(self.sums.meters.index(spec.device, Gauge::Exact)),
            // Allocations find the path on their device. A scope that is already closed is on no device.
            EventKind::Enter { scope } => Some(self.places.scopes.get(scope).map_or(0, |open| open.exact_meter)),
            _ => None,
        };
        let Some(meter) = meter else {
            self.apply_observed(event, observer);
            return;
        };
        let tree = &mut self.sums.tree;
        let root = tree.root(meter);
        let node = path.iter().fold(root, |outer, callsite| tree.child(outer, *callsite));
        if let EventKind::Enter { .. } = event.kind {
            self.apply_observed(event, observer);
            let thread = self.places.threads.get(event.thread);
            thread.entered.back_mut().into_iter().for_each(|entered| entered.node = node);
            return thread.update_scope();
        }
        // No scope has this number.
        let scope = ScopeId(u64::MAX);
        let owner = self.places.threads.get(event.thread).own;
        let entered = Entered { number: event.number, scope, node, host: None, owner, by_opening: false };
        self.places.threads.get(event.thread).enter(entered);
        self.apply_observed(event, observer);
        self.places.threads.get(event.thread).leave(scope);
    }

    /// Sets the time of the allocations that follow.
    pub fn set_time(&mut self, time: Time) {
        self.live.set_time(time);
    }

    /// Applies an event that reads, resets or closes a scope. Returns its trace. `None` if there is no such scope, and for any other event.
    pub fn query(&mut self, event: &Event<'_>) -> Option<Trace> {
        self.settle(event, &mut ());
        let trace = match *event.kind {
            EventKind::Read { scope }
            | EventKind::Reset { scope }
            | EventKind::ResetKeepingPeak { scope }
            | EventKind::Close { scope } => self.places.trace(scope, &self.sums),
            _ => None,
        };
        self.apply_settled(event, &mut ());
        trace
    }

    /// Applies all other events. This is a separate function so that the code for allocations and frees stays small in the
    /// instruction cache.
    #[cold]
    fn apply_rare<O: Observer>(&mut self, event: &Event<'_>, observer: &mut O) {
        self.settle(event, observer);
        self.apply_settled(event, observer);
    }

    /// Applies what earlier events have left to do, before an event other than an allocation or a free.
    fn settle<O: Observer>(&mut self, event: &Event<'_>, observer: &mut O) {
        if self.pools.has_undecided() && !event.kind.is_of_pool() {
            let is_decided = |of: &Undecided| event.kind.concerns_all_blocks() || of.thread == event.thread;
            self.decide_for_program(Some(event.thread), is_decided, observer);
        }
        self.sums.flush();
        self.scan_for_guests();
    }

    fn apply_settled<O: Observer>(&mut self, event: &Event<'_>, observer: &mut O) {
        match *event.kind {
            EventKind::Alloc { .. }
            | EventKind::Free { .. }
            // These events change nothing.
            | EventKind::Rejected { .. }
            | EventKind::RealBlocks { .. }
            | EventKind::UnknownValue { .. }
            | EventKind::Mark { .. }
            | EventKind::Read { .. }
            // All undecided blocks were decided before.
            | EventKind::PoolsQueried => {}
            EventKind::FreeFailed => self.free_failed(event.thread, observer),
            EventKind::Untracked => {
                self.sums.counts.untracked += 1;
                self.places.threads.get(event.thread).freed = Freed::Untracked(event.number);
            }
            EventKind::Shrink { key, bytes } => self.shrink(key, bytes, event.thread, observer),
            EventKind::LateLookup { block } => {
                let freed = self.free_older(&block, event.thread);
                self.places.threads.get(event.thread).freed = freed;
            }
            EventKind::ContextDestroyed { context } => {
                (0..BLOCK_PARTS).for_each(|part| self.remove_context_observed(context, part, observer));
            }
            EventKind::PoolRegistered { pool, device } => {
                self.register_pool(pool, device, event.number);
                (0..BLOCK_PARTS).for_each(|part| self.learn_blocks(device, part));
            }
            EventKind::PoolReserved { pool, bytes } => self.pool_reserved(pool, bytes, event.thread, observer),
            EventKind::PoolEmptied { pool } => {
                (0..BLOCK_PARTS).for_each(|part| self.empty_pool_observed(pool, part, observer));
            }
            EventKind::Sample { device, memory } => {
                self.sums.meters.of(device, Gauge::Sampled).apply_sample(event.time, &memory);
            }
            EventKind::DriverMeasured { device, by } => {
                self.sums.meters.of(device, Gauge::Exact).driver_measured_by = Some(by);
            }
            EventKind::ReadFailed { device, gauge } => self.sums.meters.of(device, gauge).samples.failed = true,
            EventKind::Open { scope, spec } => self.places.open(scope, spec, event, &mut self.sums),
            EventKind::Enter { scope } => self.places.enter(scope, event, &mut self.sums.guests),
            EventKind::Leave { scope } => self.places.leave(scope, event.thread, &mut self.sums.guests),
            EventKind::Adopt { scope, threads } => self.places.adopt(scope, threads),
            EventKind::Named { name } => self.places.name_thread(event.thread, name),
            EventKind::Reset { scope } => self.places.reset(scope, event.number, false, &mut self.sums),
            EventKind::ResetKeepingPeak { scope } => self.places.reset(scope, event.number, true, &mut self.sums),
            EventKind::Close { scope } => self.places.close(scope, &mut self.sums),
            EventKind::ResetPeaks { device } => {
                let Meter { on_device, kinds, .. } = self.sums.meters.of(device, Gauge::Exact);
                kinds.iter_mut().chain([on_device]).for_each(Stat::reset_peaks);
            }
            EventKind::ResetSummary => {
                self.sums.reset_summary(event.number, self.places.scopes.values().map(|open| open.node));
            }
            EventKind::Lost { count } => self.lost(count, event.number, observer),
            EventKind::Displaced { now, more } => {
                let before = std::mem::replace(&mut self.sums.displaced, now);
                if more > 0 || (now > 0) != (before > 0) {
                    self.lost(more, event.number, observer);
                }
            }
        }
    }

    /// Makes the steps that are due of a scan for the guests in use. Must not be called while a block is removed but not yet stored as
    /// freed: the scan would not find it.
    #[inline]
    pub(super) fn scan_for_guests(&mut self) {
        self.sums.guests.scan_if_due(&self.live, &self.places.scopes, &self.places.threads);
    }

    /// Counts `count` events that were missed before the event with this number. While functions are displaced, later frees may
    /// be missed as well.
    fn lost<O: Observer>(&mut self, count: u64, number: u64, observer: &mut O) {
        self.sums.counts.lost += count;
        let until = if self.sums.displaced > 0 { u64::MAX } else { number };
        self.pools.complete_from = until.saturating_add(1);
        for (key, missed) in self.live.frees_missed_until(until) {
            self.pools.remove_range(key, &mut self.sums);
            self.sums.remove_without_free(&missed);
            self.sums.notify(BlockChangeKind::FreeMissed, key, &missed, observer);
        }
    }
}
