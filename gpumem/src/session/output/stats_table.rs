//! The counters of the statistics of traces.

use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    model::{ByteDelta, Bytes, CallsiteId, NumberHashBuilder, Trace},
    report::{Distribution, MOST_ALIKE, MeasuredCalls, NameStats, WorstCall},
    session::events::Numbered,
};

/// The statistics of a session, by device and by names that differ only in numbers.
#[derive(Default)]
pub(in crate::session) struct StatsTable(Mutex<Table>);

/// The keys are small consecutive numbers, so the hash need not resist attackers.
type Table = HashMap<(u32, u32), Alike, NumberHashBuilder>;

/// The names that differ only in numbers. Their memory does not grow with the number of calls.
#[derive(Default)]
struct Alike {
    /// The calls of all of them.
    calls: u64,
    rows: Vec<StatsRow>,
    /// True if there were too many names, so that one row counts them all.
    is_together: bool,
}

struct StatsRow {
    callsite: CallsiteId,
    /// The counts, and the worst call without its values.
    counts: NameStats,
    measured: Option<Measurements>,
}

struct Measurements {
    used: Distribution,
    sum: i64,
    peaked: Distribution,
    worst: WorstCall,
    /// The index of the worst call among the calls of all names of the group.
    worst_of_alike: u64,
}

/// A row without its name.
pub(super) struct UnnamedRow {
    /// A callsite of the row; any of them if the row has several names.
    pub(super) callsite: CallsiteId,
    /// True if the row has several names.
    pub(super) is_together: bool,
    pub(super) row: NameStats,
}

impl StatsTable {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn rows(&self) -> Vec<UnnamedRow> {
        self.lock().values().flat_map(Alike::rows).collect()
    }

    /// Removes and returns all rows.
    pub(super) fn take(&self) -> Vec<UnnamedRow> {
        let table = mem::take(&mut *self.lock());
        table.values().flat_map(Alike::rows).collect()
    }

    /// Counts the end of a trace. `now` returns its name and the time.
    pub(super) fn count(&self, callsite: Numbered, trace: &Trace, now: impl FnOnce() -> (Option<String>, Duration)) {
        let Numbered { id, alike, .. } = callsite;
        let mut table = self.lock();
        let Alike { calls, rows, is_together } = table.entry((alike, trace.device)).or_default();
        *calls += 1;
        if !*is_together && rows.len() == MOST_ALIKE && !rows.iter().any(|row| row.callsite == id) {
            let first = rows.drain(..).reduce(StatsRow::merged);
            rows.extend(first);
            *is_together = true;
        }
        let at = if *is_together { Some(0) } else { rows.iter().position(|row| row.callsite == id) };
        let at = at.unwrap_or_else(|| {
            rows.push(StatsRow::new(id, trace));
            rows.len() - 1
        });
        rows[at].count(trace, *calls, now);
    }
}

impl Alike {
    fn rows(&self) -> impl Iterator<Item = UnnamedRow> {
        self.rows.iter().map(|row| {
            let mut shown = row.counts.clone();
            shown.measured = row.measured.as_ref().map(Measurements::shown);
            if let Some(measured) = shown.measured.as_mut().filter(|_| !self.is_together) {
                measured.worst.name = None;
            }
            UnnamedRow { callsite: row.callsite, is_together: self.is_together, row: shown }
        })
    }
}

impl StatsRow {
    fn new(callsite: CallsiteId, trace: &Trace) -> Self {
        let counts = NameStats::new(String::new(), trace.device, trace.simulated);
        Self { callsite, counts, measured: None }
    }

    /// Counts a call. `now` returns the name of the trace and the time.
    fn count(&mut self, trace: &Trace, of_alike: u64, now: impl FnOnce() -> (Option<String>, Duration)) {
        let counts = &mut self.counts;
        counts.calls += 1;
        counts.sampled += u64::from(trace.sampling.is_some());
        counts.doubtful += u64::from(trace.lost > 0 || trace.untracked > 0);
        counts.shared += u64::from(trace.shared.get() > 0);
        if !trace.is_measured() {
            counts.unmeasured += 1;
            return;
        }
        let (used, needed) = (trace.used.get(), trace.peak_over_start());
        let peaked = trace.peaked.signed();
        let worst = |call| {
            let (name, time) = now();
            WorstCall::new(call, name, time, needed)
        };
        match &mut self.measured {
            None => {
                let (used_in, peaked) = (Distribution::of(used), Distribution::of(peaked));
                let worst = worst(counts.calls);
                self.measured =
                    Some(Measurements { used: used_in, sum: used, peaked, worst, worst_of_alike: of_alike });
            }
            Some(measured) => {
                measured.used.add(used);
                measured.peaked.add(peaked);
                measured.sum = measured.sum.saturating_add(used);
                if needed > measured.worst.needed {
                    (measured.worst, measured.worst_of_alike) = (worst(counts.calls), of_alike);
                }
            }
        }
    }

    /// Merges two rows into one.
    fn merged(mut self, other: Self) -> Self {
        let (counts, more) = (&mut self.counts, &other.counts);
        counts.calls += more.calls;
        counts.unmeasured += more.unmeasured;
        counts.sampled += more.sampled;
        counts.doubtful += more.doubtful;
        counts.shared += more.shared;
        self.measured = match (self.measured, other.measured) {
            (Some(one), Some(other)) => Some(one.merged(other)),
            (one, other) => one.or(other),
        };
        if let Some(measured) = &mut self.measured {
            measured.worst.call = measured.worst_of_alike;
        }
        self
    }
}

impl Measurements {
    fn merged(mut self, other: Self) -> Self {
        self.used.merge(&other.used);
        self.peaked.merge(&other.peaked);
        self.sum = self.sum.saturating_add(other.sum);
        let order = |measured: &Self| (measured.worst.needed, std::cmp::Reverse(measured.worst_of_alike));
        if order(&other) > order(&self) {
            (self.worst, self.worst_of_alike) = (other.worst, other.worst_of_alike);
        }
        self
    }

    fn shown(&self) -> MeasuredCalls {
        let peaked = self.peaked.spread().map(|bytes| Bytes::new(bytes.max(0).unsigned_abs()));
        MeasuredCalls::new(self.used.spread().map(ByteDelta::new), ByteDelta::new(self.sum), peaked, self.worst.clone())
    }
}
