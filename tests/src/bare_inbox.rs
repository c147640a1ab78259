//! An inbox without sources or a session, for benchmarks.

use gpumem_core::{
    inbox::Inbox,
    model::{
        Block, Bytes, CallsiteId, Counted, Device, EventKind, Family, Key, MemKind, PoolId, ScopeId, ScopeSpec, Space,
        StackId, Tag,
    },
};

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

const POOL: PoolId = PoolId(1);

/// An inbox without a session. Each call records one event.
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

    /// Registers a pool that has a block of 64 GiB at this address.
    pub fn register_pool(&self, address: u64) {
        self.0.post(&EventKind::PoolRegistered { pool: POOL, device: DEVICE });
        let block = Block::new(DEVICE, Bytes::gib(64), MemKind::Device);
        self.0.post(&EventKind::Alloc { key: Key::new(Space::Address, address), block });
    }

    /// Records that the pool has handed out a part.
    pub fn part(&self, address: u64, bytes: u64) {
        let tag = Tag::new(DEVICE, MemKind::Part, POOL.0, StackId::NONE);
        self.0.part(Key::of_part(POOL, address), Bytes::new(bytes), tag);
    }

    /// Records that a part of the pool was freed.
    pub fn unpart(&self, address: u64) {
        self.0.free(Key::of_part(POOL, address));
    }

    /// Opens a scope.
    pub fn open(&self, scope: u64) {
        self.open_at(scope, CallsiteId::NONE.0);
    }

    /// Opens a scope at this callsite.
    pub fn open_at(&self, scope: u64, callsite: u32) {
        self.open_as(scope, callsite, false, false);
    }

    /// Opens a scope. With `at_peak`, it keeps the allocations that made its peak. With `of_this_thread`, it counts only allocations
    /// of the calling thread.
    pub fn open_as(&self, scope: u64, callsite: u32, at_peak: bool, of_this_thread: bool) {
        let callsite = CallsiteId(callsite);
        let spec = ScopeSpec {
            counts: if of_this_thread { Counted::Own } else { Counted::OwnAndUnscoped },
            callsite,
            at_peak,
            ..ScopeSpec::exact(DEVICE)
        };
        self.0.post(&EventKind::Open { scope: ScopeId(scope), spec });
    }

    /// Makes the calling thread enter a scope.
    pub fn enter(&self, scope: u64) {
        self.0.post(&EventKind::Enter { scope: ScopeId(scope) });
    }

    /// Makes the calling thread leave a scope.
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
