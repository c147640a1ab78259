//! The library's ledger, which here writes down what it is told.

#[path = "../../../gpumem/src/ledger/mod.rs"]
mod real;

use std::{
    cell::RefCell,
    mem,
    ops::{Deref, DerefMut},
};

pub(crate) use self::real::{Counts, DeviceStats, Held, LiveOrigin, PARTS, Spot, SpotId, Within};
use crate::model::{Answer, Event, EventKind, ThreadId, Time};

/// An event that owns what it says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    pub(crate) number: u64,
    pub(crate) time: Time,
    pub(crate) thread: ThreadId,
    pub(crate) kind: EventKind,
}

thread_local! {
    // Of the real thread, in which all of a run's threads take turns.
    static TOLD: RefCell<Vec<Told>> = const { RefCell::new(Vec::new()) };
}

/// What the ledger of this run was told, in order; from now on it begins anew.
pub(crate) fn take_told() -> Vec<Told> {
    TOLD.with(|told| mem::take(&mut *told.borrow_mut()))
}

#[derive(Debug, Default)]
pub(crate) struct Ledger(real::Ledger);

impl Ledger {
    pub(crate) fn apply(&mut self, event: &Event<'_>) -> Answer {
        let &Event { number, time, thread, kind } = event;
        TOLD.with(|told| told.borrow_mut().push(Told { number, time, thread, kind: *kind }));
        self.0.apply(event)
    }
}

impl Deref for Ledger {
    type Target = real::Ledger;

    fn deref(&self) -> &real::Ledger {
        &self.0
    }
}

impl DerefMut for Ledger {
    fn deref_mut(&mut self) -> &mut real::Ledger {
        &mut self.0
    }
}
