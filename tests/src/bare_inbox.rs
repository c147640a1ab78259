//! An inbox without sources and session, for benchmarks.

use gpumem_core::{
    inbox::Inbox,
    model::{Block, Bytes, CallsiteId, Device, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, Space},
};

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

/// An inbox of its own. Each call records one event.
#[derive(Debug)]
pub struct BareInbox(Inbox);

impl Default for BareInbox {
    fn default() -> Self {
        Self(Inbox::new())
    }
}

impl BareInbox {
    /// Records an allocation.
    pub fn alloc(&self, address: u64, bytes: u64) {
        let block = Block::new(DEVICE, Bytes::new(bytes), MemKind::Pool);
        self.0.post(&EventKind::Alloc { key: Key::new(Space::Address, address), block });
    }

    /// Records a free.
    pub fn free(&self, address: u64) {
        self.0.post(&EventKind::Free { key: Key::new(Space::Address, address), block: None });
    }

    /// Opens a scope.
    pub fn open(&self, scope: u64) {
        self.open_at(scope, CallsiteId::NONE.0);
    }

    /// Opens a scope that has a path of its own.
    pub fn open_at(&self, scope: u64, callsite: u32) {
        self.open_as(scope, callsite, false, false);
    }

    /// Opens a scope. With `at_peak`, it keeps which allocations made its peak. With `of_this_thread`, it counts only what the calling
    /// thread allocates.
    pub fn open_as(&self, scope: u64, callsite: u32, at_peak: bool, of_this_thread: bool) {
        let callsite = CallsiteId(callsite);
        let spec = ScopeSpec {
            thread: of_this_thread.then(|| self.0.this_thread()),
            callsite,
            at_peak,
            ..ScopeSpec::exact(DEVICE)
        };
        self.0.post(&EventKind::Open { scope: ScopeId(scope), spec });
    }

    /// The calling thread enters a scope.
    pub fn enter(&self, scope: u64) {
        self.0.post(&EventKind::Enter { scope: ScopeId(scope) });
    }

    /// The calling thread leaves a scope.
    pub fn leave(&self, scope: u64) {
        self.0.post(&EventKind::Leave { scope: ScopeId(scope) });
    }

    /// Records that an event was lost.
    pub fn lose(&self) {
        self.0.post(&EventKind::Lost { count: 1 });
    }

    /// Closes a scope.
    pub fn close(&self, scope: u64) {
        self.0.post(&EventKind::Close { scope: ScopeId(scope) });
    }
}
