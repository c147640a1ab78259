//! The library's ledger, which here writes down what it is told.

#[path = "../../../gpumem/src/ledger/mod.rs"]
mod real;

use std::{
    cell::RefCell,
    mem,
    ops::{Deref, DerefMut},
};

pub(crate) use self::real::{
    AtPeak, Counts, DeviceStats, GroupUsage, KnownBlock, NodeId, PARTS, PeakOf, SLICE, ScopeNode, Within,
};
use crate::model::{Answer, Block, Bytes, Event, EventKind, Key, Tag, ThreadId, Time};

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
pub(crate) struct Ledger {
    real: real::Ledger,
    /// Of the newest event that had one.
    time: Time,
    /// The number of the newest event. A free is handed over without its own, which is the next: the event after it shows that.
    number: u64,
}

impl Ledger {
    pub(crate) fn apply(&mut self, event: &Event<'_>) -> Answer {
        self.time = event.time;
        self.write_down(event.number, event.thread, *event.kind);
        self.real.apply(event)
    }

    pub(crate) fn set_time(&mut self, time: Time) {
        self.time = time;
        self.real.set_time(time);
    }

    pub(crate) fn alloc_like_newest(
        &mut self,
        key: Key,
        bytes: Bytes,
        tag: Tag,
        number: u64,
        thread: ThreadId,
    ) -> bool {
        let is_alike = self.real.alloc_like_newest(key, bytes, tag, number, thread);
        if is_alike {
            self.write_down(number, thread, allocation(key, bytes, tag));
        }
        is_alike
    }

    pub(crate) fn free_like_newest(&mut self, key: Key, thread: ThreadId) -> bool {
        let is_alike = self.real.free_like_newest(key, thread);
        if is_alike {
            self.write_down(self.number + 1, thread, EventKind::Free { key, block: None });
        }
        is_alike
    }

    pub(crate) fn alloc(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) {
        self.write_down(number, thread, allocation(key, bytes, tag));
        self.real.alloc(key, bytes, tag, number, thread);
    }

    pub(crate) fn free(&mut self, key: Key, block: Option<&Block>, thread: ThreadId) -> Answer {
        self.write_down(self.number + 1, thread, EventKind::Free { key, block: block.copied() });
        self.real.free(key, block, thread)
    }

    fn write_down(&mut self, number: u64, thread: ThreadId, kind: EventKind) {
        self.number = number;
        TOLD.with(|told| told.borrow_mut().push(Told { number, time: self.time, thread, kind }));
    }
}

fn allocation(key: Key, bytes: Bytes, tag: Tag) -> EventKind {
    let block = Block { context: tag.context(), stack: tag.stack(), ..Block::new(tag.device(), bytes, tag.kind()) };
    EventKind::Alloc { key, block }
}

impl Deref for Ledger {
    type Target = real::Ledger;

    fn deref(&self) -> &real::Ledger {
        &self.real
    }
}

impl DerefMut for Ledger {
    fn deref_mut(&mut self) -> &mut real::Ledger {
        &mut self.real
    }
}
