//! The state of a recording's reader: the ledger, the definitions and the earlier requests.

use std::collections::{HashMap, VecDeque};

use super::{
    budget::Budget,
    check::{Checks, FIRST_OWN_SCOPE, LOST, Rejection, SCOPE_EVENT},
    definitions::Definitions,
    event::RecordedEvent,
    item::BlockLabel,
};
use gpumem_core::{
    derive::{self, Labels, Snapshot},
    inbox::{Inbox, LedgerView},
    ledger::{Observer, ScopePeriod},
    model::{CallsiteId, Device, Event, EventKind, ScopeId, ThreadId, Time, Trace},
    report::{Groups, Lines},
};

/// The most closed scopes that can still be reported.
const MOST_CLOSED: usize = 1 << 14;
/// The most statements that are waiting for the report of their function.
pub(super) const MOST_LINES: usize = 1 << 18;
/// The most scopes of a path. The ledger counts deeper ones together.
const DEEPEST_PATH: usize = 1 << 7;
/// The steps for each scope of a path.
const SCOPE: u64 = 50;
/// The bytes of the label of a block.
const LONGEST_LABEL: u64 = 1 << 10;

#[derive(Debug)]
pub(super) struct State {
    pub(super) definitions: Definitions,
    pub(super) inbox: Inbox,
    checks: Checks,
    pub(super) labels: Labels,
    /// The scopes that are open or were closed recently.
    pub(super) answers: HashMap<ScopeId, ScopeResult>,
    /// The scope path that the thread of the next event was in, if it was recorded.
    inside: Option<Vec<CallsiteId>>,
    closed: VecDeque<ScopeId>,
    pub(super) lines: usize,
    pub(super) trackers: HashMap<u64, Tracker>,
    pub(super) refusals: VecDeque<(u64, Refused)>,
    next_own: u64,
    /// The time of the ledger's last event.
    pub(super) time: Time,
    /// The number of items that the writer missed.
    pub(super) missed: u64,
}

/// The result of the last query of a scope.
#[derive(Debug, Default)]
pub(super) struct ScopeResult {
    pub(super) trace: Option<Trace>,
    /// The period that selects the blocks of its allocations. Set when the scope is closed.
    pub(super) within: Option<ScopePeriod>,
    /// Its statements so far.
    pub(super) lines: Lines,
    pub(super) number_of_lines: usize,
    /// True if events since the scope was opened or reset are missing from the recording, so that the result is not known.
    pub(super) is_partial: bool,
}

/// The blocks at a tracker's last call.
#[derive(Debug)]
pub(super) struct Tracker {
    pub(super) device: Device,
    pub(super) groups: Groups,
    pub(super) lost: u64,
    pub(super) is_first: bool,
}

/// The memory that was live when an allocation was rejected.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) refusal: derive::Refusal,
    pub(super) snapshot: Snapshot,
    /// The scope id under which the ledger keeps the peak of the device.
    pub(super) peak: Option<ScopeId>,
}

impl State {
    pub(super) fn new(definitions: Definitions) -> Self {
        let state = Self {
            definitions,
            inbox: Inbox::new(),
            checks: Checks::default(),
            labels: Labels::default(),
            answers: HashMap::new(),
            inside: None,
            closed: VecDeque::new(),
            lines: 0,
            trackers: HashMap::new(),
            refusals: VecDeque::new(),
            next_own: FIRST_OWN_SCOPE,
            time: Time::ZERO,
            missed: 0,
        };
        state.note_shortened();
        state
    }

    /// Tells the ledger which events a shortened recording lacks.
    fn note_shortened(&self) {
        if let Some(part) = self.definitions.part().filter(|part| part.after > self.checks.number()) {
            self.inbox.replay_from(part.after.saturating_add(1));
        }
    }

    /// Returns the approximate bytes of live blocks and open scopes.
    pub(super) fn memory(&self) -> u64 {
        self.checks.memory()
    }

    /// Returns an unused scope id, for a temporarily kept peak.
    pub(super) fn next_scope(&mut self) -> ScopeId {
        self.next_own += 1;
        ScopeId(self.next_own)
    }

    pub(super) fn apply(
        &mut self,
        event: &RecordedEvent,
        budget: &mut Budget,
        observer: &mut impl Observer,
    ) -> Result<Option<Box<Trace>>, Rejection> {
        let inside = self.inside.take();
        budget.work(inside.as_ref().map_or(0, |path| SCOPE_EVENT + SCOPE * path.len() as u64))?;
        self.checks.spend(event, budget)?;
        let before = self.checks.count();
        let applied = self.apply_paid(event, inside.as_deref(), observer);
        budget.give_back(self.checks.given_back(event, before));
        applied
    }

    fn apply_paid(
        &mut self,
        event: &RecordedEvent,
        inside: Option<&[CallsiteId]>,
        observer: &mut impl Observer,
    ) -> Result<Option<Box<Trace>>, Rejection> {
        let inbox = &self.inbox;
        self.checks.event(event, |key| inbox.block(key).map(|block| block.bytes.get()))?;
        let closing = match event.kind {
            EventKind::Close { scope } => self.inbox.scope_period(scope).map(|within| (scope, within)),
            _ => None,
        };
        self.time = event.time;
        let RecordedEvent { number, time, thread, ref kind, .. } = *event;
        let mut trace = self.inbox.replay(&Event { number, time, thread, kind }, inside, observer);
        if self.definitions.part().is_some_and(|part| number <= part.after) {
            self.inbox.replay_owner(kind, self.definitions.pool_of(number), observer);
        }
        match *kind {
            EventKind::ContextDestroyed { .. } => {
                let blocks = self.inbox.blocks(None);
                self.checks.recount(blocks.iter().map(|block| (block.key, block.bytes.get())));
            }
            EventKind::Open { scope, .. } if self.definitions.part().is_some_and(|part| number <= part.after) => {
                self.answers.entry(scope).or_default().is_partial = true;
            }
            EventKind::Read { scope }
            | EventKind::Reset { scope }
            | EventKind::ResetKeepingPeak { scope }
            | EventKind::Close { scope } => {
                let answer = self.answers.entry(scope).or_default();
                trace.take_if(|_| answer.is_partial);
                answer.trace = trace.as_deref().copied();
                answer.is_partial &= matches!(kind, EventKind::Read { .. } | EventKind::Close { .. });
            }
            _ => {}
        }
        if let Some((scope, within)) = closing {
            self.answers.entry(scope).or_default().within = Some(within);
            self.closed.push_back(scope);
            if self.closed.len() > MOST_CLOSED {
                self.forget_closed();
            }
        }
        Ok(trace)
    }

    fn forget_closed(&mut self) {
        // The scope may be open again.
        if let Some(scope) = self.closed.pop_front().filter(|scope| !self.checks.is_open(*scope))
            && let Some(answer) = self.answers.remove(&scope)
        {
            self.lines -= answer.number_of_lines;
        }
    }

    /// Notes that the thread of the next event was in this scope path.
    pub(super) fn set_inside(&mut self, path: Vec<CallsiteId>) -> Result<(), Rejection> {
        if path.len() > DEEPEST_PATH {
            return Err(Rejection::Limit);
        }
        self.inside = Some(path);
        Ok(())
    }

    /// Returns whether the result of a scope is unknown because events since it was opened are missing from the recording.
    pub(super) fn is_partial(&self, scope: ScopeId) -> bool {
        self.answers.get(&scope).is_some_and(|answer| answer.is_partial)
    }

    /// Notes that the writer missed `count` items, which may include events.
    pub(super) fn miss(
        &mut self,
        count: u64,
        budget: &mut Budget,
        observer: &mut impl Observer,
    ) -> Result<(), Rejection> {
        budget.work(LOST)?;
        self.checks.lost(count)?;
        self.missed += count;
        self.add(&EventKind::Lost { count }, observer);
        self.note_shortened();
        Ok(())
    }

    /// Assigns blocks whose owner is still unknown to the program.
    pub(super) fn end(&mut self, observer: &mut impl Observer) {
        if self.inbox.has_undecided() {
            self.add(&EventKind::PoolsQueried, observer);
        }
    }

    /// Applies an event that is not in the recording.
    fn add(&mut self, kind: &EventKind, observer: &mut impl Observer) {
        let event = Event { number: self.checks.number(), time: self.time, thread: ThreadId(0), kind };
        self.inbox.replay(&event, None, observer);
    }

    /// Adds a label. `is_kept` is true if requested reports may need it.
    pub(super) fn label(
        &mut self,
        label: &BlockLabel,
        bytes: u64,
        is_kept: bool,
        budget: &mut Budget,
    ) -> Result<(), Rejection> {
        let BlockLabel { key, number, ref label } = *label;
        if bytes > LONGEST_LABEL {
            return Err(Rejection::Limit);
        }
        if self.inbox.block(key).is_none_or(|block| block.number != number) {
            return Err(Rejection::Contradiction);
        }
        budget.work(SCOPE_EVENT)?;
        // A dimension of the shape takes one byte in the file and eight in memory.
        budget.take(96 + bytes + if is_kept { 128 + 8 * bytes } else { 0 })?;
        if is_kept {
            self.labels.set(&self.inbox, key, label.clone());
        }
        Ok(())
    }

    pub(super) fn reuse_thread(&mut self, thread: ThreadId, budget: &mut Budget) -> Result<(), Rejection> {
        self.checks.reuse(thread, budget)?;
        self.inbox.replay_thread(thread);
        Ok(())
    }

    /// Releases a kept peak. Ignores peaks that the program kept for reports, because the reader keeps its own.
    pub(super) fn release_peak(&mut self, scope: ScopeId) {
        if self.checks.release(scope) {
            self.inbox.release_peak(scope);
        }
    }

    /// Returns whether the ledger keeps the peak of this recorded scope, open or closed.
    pub(super) fn is_kept(&self, scope: ScopeId) -> bool {
        self.checks.is_kept(scope)
    }

    pub(super) fn is_open(&self, scope: ScopeId) -> bool {
        self.checks.is_open(scope)
    }
}
