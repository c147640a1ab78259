//! Tests threads that have ended. This needs a process of its own: while there are several inboxes, no thread number is
//! reused.

use std::{
    cell::{Cell, OnceCell},
    sync::Arc,
    thread,
};

use gpumem_core::{
    inbox::{Inbox, LedgerView},
    model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, Space},
};

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

fn open(scope: u64) -> EventKind {
    let spec = ScopeSpec::exact(DEVICE);
    EventKind::Open { scope: ScopeId(scope), spec }
}

fn alloc(address: u64) -> EventKind {
    let block = Block::new(DEVICE, Bytes::new(10), MemKind::Device);
    EventKind::Alloc { key: Key::new(Space::Address, address), block }
}

fn free(address: u64) -> EventKind {
    EventKind::Free { key: Key::new(Space::Address, address), block: None }
}

/// Frees a block when its thread ends, like a cache in a thread-local variable.
struct Cached(Cell<u64>, Arc<Inbox>);

impl Drop for Cached {
    fn drop(&mut self) {
        self.1.post(&free(self.0.get()));
    }
}

thread_local! {
    static CACHED: OnceCell<Cached> = const { OnceCell::new() };
}

#[test]
fn threads_that_have_ended_leave_no_records() {
    let inbox: Arc<Inbox> = Arc::new(Inbox::new());
    for address in 1..=3_000 {
        let inbox = Arc::clone(&inbox);
        let works = move || {
            CACHED.with(|cached| {
                if address % 2 == 0 {
                    cached.get_or_init(|| Cached(Cell::new(address), Arc::clone(&inbox)));
                }
                inbox.post(&open(address));
                inbox.post(&alloc(address));
                if address % 2 == 1 {
                    inbox.post(&free(address));
                }
            });
        };
        thread::spawn(works).join().unwrap();
    }
    let records = inbox.thread_records();
    assert!(records < 10, "{records} records");
    assert_eq!(inbox.stats()[0].on_device.bytes.current, 0);
}
