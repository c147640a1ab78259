//! The state of a recording's reader: the ledger and the definitions.

use super::{
    budget::Budget,
    check::{Checks, FIRST_OWN_SCOPE, LOST, Rejection, SCOPE_EVENT},
    definitions::Definitions,
    event::RecordedEvent,
    item::BlockLabel,
};
use gpumem_core::{
    inbox::{Inbox, LedgerView},
    ledger::Observer,
    model::{CallsiteId, Event, EventKind, ScopeId, ScopeSpec, ThreadId, Time},
};

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
    /// The scope path that the thread of the next event was in, if it was recorded.
    inside: Option<Vec<CallsiteId>>,
    next_own: u64,
    /// The time of the ledger's last event.
    pub(super) time: Time,
    /// The number of items that the writer missed.
    pub(super) missed: u64,
}

impl State {
    pub(super) fn new(definitions: Definitions) -> Self {
        let state = Self {
            definitions,
            inbox: Inbox::new(),
            checks: Checks::default(),
            inside: None,
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
    ) -> Result<(), Rejection> {
        let inside = self.inside.take();
        budget.work(inside.as_ref().map_or(0, |path| SCOPE_EVENT + SCOPE * path.len() as u64))?;
        self.checks.spend(event, budget)?;
        let before = self.checks.count();
        let applied = self.apply_paid(event, inside.as_deref(), observer);
        budget.release(self.checks.released(event, before));
        applied
    }

    fn apply_paid(
        &mut self,
        event: &RecordedEvent,
        inside: Option<&[CallsiteId]>,
        observer: &mut impl Observer,
    ) -> Result<(), Rejection> {
        let inbox = &self.inbox;
        self.checks.event(event, |key| inbox.block(key).map(|block| block.bytes.get()))?;
        self.time = event.time;
        let RecordedEvent { number, time, thread, ref kind, .. } = *event;
        let applied = match *kind {
            // Reports cover the whole recording.
            EventKind::ResetPeaks { .. } | EventKind::ResetSummary => EventKind::PoolsQueried,
            // None needs the peak of a scope, which the ledger would keep.
            EventKind::Open { scope, spec } => EventKind::Open { scope, spec: ScopeSpec { at_peak: false, ..spec } },
            kind => kind,
        };
        self.inbox.replay(&Event { number, time, thread, kind: &applied }, inside, observer);
        if self.definitions.part().is_some_and(|part| number <= part.after) {
            self.inbox.replay_owner(kind, self.definitions.pool_of(number), observer);
        }
        if matches!(kind, EventKind::ContextDestroyed { .. }) {
            let blocks = self.inbox.blocks(None);
            self.checks.recount(blocks.iter().map(|block| (block.key, block.bytes.get())));
        }
        Ok(())
    }

    /// Notes that the thread of the next event was in this scope path.
    pub(super) fn set_inside(&mut self, path: Vec<CallsiteId>) -> Result<(), Rejection> {
        if path.len() > DEEPEST_PATH {
            return Err(Rejection::Limit);
        }
        self.inside = Some(path);
        Ok(())
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

    /// Checks whether the reader can return a label.
    pub(super) fn check_label(&self, label: &BlockLabel, bytes: u64, budget: &mut Budget) -> Result<(), Rejection> {
        let BlockLabel { key, number, .. } = *label;
        if bytes > LONGEST_LABEL {
            return Err(Rejection::Limit);
        }
        if self.inbox.block(key).is_none_or(|block| block.number != number) {
            return Err(Rejection::Contradiction);
        }
        budget.work(SCOPE_EVENT)?;
        budget.take(96 + bytes)?;
        Ok(())
    }

    pub(super) fn reuse_thread(&mut self, thread: ThreadId, budget: &mut Budget) -> Result<(), Rejection> {
        self.checks.reuse(thread, budget)?;
        self.inbox.replay_thread(thread);
        Ok(())
    }
}
