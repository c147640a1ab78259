//! Applies each event. Allocations and frees are in `blocks.rs`, scopes in `scopes.rs`.

use super::{
    Ledger,
    counts::Counts,
    live::{BLOCK_PARTS, tenths},
    meters::{DeviceStats, Meter},
    observer::{BlockChangeKind, Observer},
    pool_table::Undecided,
    stats::Stat,
    thread::Freed,
};
use crate::model::{Answer, Event, EventKind, Gauge, Time, Trace};

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
                    self.notify_latest(*key, bytes, event.number, observer);
                }
                Answer::Applied
            }
            EventKind::Free { key, .. } if self.free_like_latest(*key, event.thread) => {
                if O::OBSERVES
                    && let Freed::Block(key, entry) = self.thread(event.thread).freed
                {
                    self.notify(BlockChangeKind::Freed, key, &entry, observer);
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

    /// Sets the time of the allocations that follow.
    pub fn set_time(&mut self, time: Time) {
        self.tenths = tenths(time);
    }

    /// Applies an event that reads, resets or closes a scope. Returns its trace. `None` if there is no such scope, and for any other event.
    pub fn query(&mut self, event: &Event<'_>) -> Option<Trace> {
        self.apply_rare(event, &mut ())
    }

    /// Applies all other events. This is a separate function so that the code for allocations and frees stays small in the
    /// instruction cache.
    #[cold]
    fn apply_rare<O: Observer>(&mut self, event: &Event<'_>, observer: &mut O) -> Option<Trace> {
        if self.has_undecided() && !event.kind.is_of_pool() {
            let is_decided = |of: &Undecided| event.kind.concerns_all_blocks() || of.thread == event.thread;
            self.decide_for_program(Some(event.thread), is_decided, observer);
        }
        self.flush_pending();
        match *event.kind {
            EventKind::Alloc { .. }
            | EventKind::Free { .. }
            // These events change nothing.
            | EventKind::Rejected { .. }
            | EventKind::Mark { .. }
            // All undecided blocks were decided before.
            | EventKind::PoolsQueried => {}
            EventKind::FreeFailed => self.free_failed(event.thread, observer),
            EventKind::Untracked => {
                self.counts.untracked += 1;
                self.thread(event.thread).freed = Freed::Untracked(event.number);
            }
            EventKind::Shrink { key, bytes } => self.shrink(key, bytes, event.thread, observer),
            EventKind::LateLookup { block } => {
                let freed = self.free_older(&block, event.thread);
                self.thread(event.thread).freed = freed;
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
                self.meters.of(device, Gauge::Sampled).apply_sample(event.time, &memory);
            }
            EventKind::ReadFailed { device, gauge } => self.meters.of(device, gauge).samples.failed = true,
            EventKind::Open { scope, spec } => self.open(scope, spec, event),
            EventKind::Enter { scope } => self.enter(scope, event),
            EventKind::Leave { scope } => self.leave(scope, event.thread),
            EventKind::Adopt { scope, threads } => self.adopt(scope, threads),
            EventKind::Named { name } => self.name_thread(event.thread, name),
            EventKind::Read { scope } => {
                return self.scopes.get(&scope).map(|open| self.trace(open));
            }
            EventKind::Reset { scope } => return self.reset(scope, event.number, false),
            EventKind::ResetKeepingPeak { scope } => return self.reset(scope, event.number, true),
            EventKind::Close { scope } => return self.close(scope),
            EventKind::ResetPeaks { device } => {
                let Meter { on_device, kinds, .. } = self.meters.of(device, Gauge::Exact);
                kinds.iter_mut().chain([on_device]).for_each(Stat::reset_peaks);
            }
            EventKind::ResetSummary => self.reset_summary(event.number),
            EventKind::Lost { count } => self.lost(count, event.number, observer),
            EventKind::Displaced { now, more } => {
                let before = std::mem::replace(&mut self.displaced, now);
                if more > 0 || (now > 0) != (before > 0) {
                    self.lost(more, event.number, observer);
                }
            }
        }
        None
    }

    /// Counts `count` events that were missed before the event with this number. While functions are displaced, later frees may
    /// be missed as well.
    fn lost<O: Observer>(&mut self, count: u64, number: u64, observer: &mut O) {
        self.counts.lost += count;
        let until = if self.displaced > 0 { u64::MAX } else { number };
        self.pools.complete_from = until.saturating_add(1);
        for (key, missed) in self.live.frees_missed_until(until) {
            self.block_is_gone(key);
            self.remove_without_free(&missed);
            self.notify(BlockChangeKind::FreeMissed, key, &missed, observer);
        }
    }

    /// Returns the number of events that were applied or missed so far.
    pub fn counts(&mut self) -> Counts {
        self.flush_pending();
        self.counts
    }

    /// Returns the statistics of each device on which allocations were observed.
    pub fn stats(&mut self) -> Vec<DeviceStats> {
        self.flush_pending();
        self.meters.stats()
    }
}
