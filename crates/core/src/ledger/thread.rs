//! The data that the ledger keeps for each thread: its last allocation and free, and the scopes that it is in.

use std::collections::VecDeque;

use super::{
    allocated_on::AllocatedOn,
    live::{Attribution, Entry},
    tree::NodeId,
};
use crate::model::{Bytes, Device, Key, OwnerThread, ScopeId, Tag, ThreadName};

/// A thread counts for this many of the outermost scopes that it is in, for the innermost one, and for the scopes in which these
/// were opened. The limit bounds the time to leave a scope.
pub(super) const MOST_ENTERED: usize = 16;

/// One thread. It fills whole cache lines, so that threads that allocate at the same time do not share one (false sharing).
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Thread {
    /// The tag of the thread's last allocation, and the attribution that was found for it. The next allocation is likely to have
    /// the same.
    pub(super) latest: (Tag, Attribution),
    /// The block that the thread's last free removed, in case that free fails.
    pub(super) freed: Freed,
    /// The scope path that the thread is in.
    pub(super) node: NodeId,
    /// The owner thread of its allocations: its own, unless it is in a scope of another thread.
    pub(super) owner: OwnerThread,
    pub(super) own: OwnerThread,
    /// The scopes that the thread is in, the innermost last. This is a deque because programs that do not leave the last scope
    /// first usually leave the first one.
    pub(super) entered: VecDeque<Entered>,
    /// The devices on which the thread allocated. A device is noted at the first allocation after a scope was opened, reset,
    /// entered or left, and whenever the device changed.
    pub(super) allocated_on: AllocatedOn,
    /// The name of the thread, if it was needed.
    pub(super) name: Option<ThreadName>,
    /// True if the thread is in the list of threads that look up again who adopts their allocations.
    pub(super) is_looked_up: bool,
}

/// A scope that a thread is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entered {
    /// The number of the event by which the thread entered it. These numbers rise.
    pub(super) number: u64,
    pub(super) scope: ScopeId,
    pub(super) node: NodeId,
    /// The owner thread of the scope, if it was open and the thread did not open it.
    pub(super) host: Option<OwnerThread>,
    /// The owner thread of allocations in it.
    pub(super) owner: OwnerThread,
    /// True if the thread opened the scope, and leaves it when the scope is closed. Otherwise it entered an open scope, and
    /// leaves it by a separate event.
    pub(super) by_opening: bool,
}

/// The block that the last free of a thread removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Freed {
    #[default]
    Nothing,
    Block(Key, Entry),
    /// A block that is older than the session.
    Older(Device, Bytes),
    /// A block that is older than the session and is not counted, because it is not on a device or its late lookup has not ended.
    Uncounted,
    /// A block of unknown size, counted by the event with this number.
    Untracked(u64),
}

impl Thread {
    pub(super) fn new(own: OwnerThread) -> Self {
        Self {
            latest: (Tag::NONE, Attribution::default()),
            freed: Freed::Nothing,
            node: NodeId::NONE,
            owner: own,
            own,
            entered: VecDeque::new(),
            allocated_on: AllocatedOn::default(),
            name: None,
            is_looked_up: false,
        }
    }

    /// Returns whether the thread opened the scope by the event with this number, and is still in it.
    pub(super) fn is_in_opened(&self, number: u64) -> bool {
        let at = self.entered.binary_search_by_key(&number, |entered| entered.number);
        at.is_ok_and(|at| self.entered[at].by_opening)
    }

    /// Makes the next allocation look up its attribution again.
    pub(super) fn forget_latest(&mut self) {
        self.latest.0 = Tag::NONE;
    }

    /// Returns the owner thread around the scope with this index in `entered`.
    pub(super) fn owner_around(&self, at: usize) -> OwnerThread {
        at.min(MOST_ENTERED).checked_sub(1).map_or(self.own, |around| self.entered[around].owner)
    }

    pub(super) fn enter(&mut self, entered: Entered) {
        self.entered.push_back(entered);
        self.update_scope();
    }

    /// Leaves the scope where the thread last entered it, if the thread is in the scope. Returns the index in `entered` of the
    /// first scope that the thread entered after it.
    pub(super) fn leave(&mut self, scope: ScopeId) -> usize {
        let Some(at) = self.entered.iter().rposition(|entered| entered.scope == scope) else {
            return self.entered.len();
        };
        self.leave_at(at);
        at
    }

    /// Leaves the scope that the thread opened by the event with this number, if it is still in it, and returns its index in
    /// `entered`. This is a binary search, because `entered` may be long.
    pub(super) fn leave_opened(&mut self, scope: ScopeId, number: u64) -> Option<usize> {
        let at = self.entered.binary_search_by_key(&number, |entered| entered.number).ok()?;
        if (self.entered[at].scope, self.entered[at].by_opening) != (scope, true) {
            return None;
        }
        self.leave_at(at);
        Some(at)
    }

    fn leave_at(&mut self, at: usize) {
        self.entered.remove(at);
        self.update_scope();
    }

    /// Sets the path and the owner thread to those of the innermost scope in `entered`.
    pub(super) fn update_scope(&mut self) {
        (self.node, self.owner) =
            self.entered.back().map_or((NodeId::NONE, self.own), |Entered { node, owner, .. }| (*node, *owner));
        self.forget_latest();
    }
}
