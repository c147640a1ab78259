//! Computes used and peaked of scopes from the order of events in a simple way: all is summed up again for each event.

use std::collections::{BTreeMap, HashMap};

use gpumem_core::model::{Counted, EventKind, Key, ScopeId, ThreadId};

use crate::checker::Applied;

/// A scope and what it counts.
struct Scope {
    /// The thread that it counts. `None` for the whole process.
    thread: Option<ThreadId>,
    /// It counts blocks from this event on.
    since: usize,
    start: i64,
    peak: i64,
}

struct Block {
    thread: ThreadId,
    at: usize,
    bytes: i64,
}

/// Used and peaked of each scope when it was closed. A scope that counts the whole process must have `at_peak`. A scope that counts
/// neither that nor one thread must overlap a scope of another thread from its beginning: it counts by itself.
pub(crate) fn traces(events: &[Applied]) -> BTreeMap<u64, (i64, u64)> {
    let mut live: HashMap<Key, Block> = HashMap::new();
    let mut freed = HashMap::new();
    let mut open: HashMap<ScopeId, Scope> = HashMap::new();
    let mut closed = BTreeMap::new();
    for (at, event) in events.iter().enumerate() {
        let level = |live: &HashMap<Key, Block>, thread: Option<ThreadId>, since: usize| -> i64 {
            let counts = |block: &&Block| block.at >= since && thread.is_none_or(|thread| thread == block.thread);
            live.values().filter(counts).map(|block| block.bytes).sum()
        };
        match event.kind {
            EventKind::Alloc { key, block } => {
                live.insert(key, Block { thread: event.thread, at, bytes: block.bytes.get().cast_signed() });
            }
            EventKind::Free { key, .. } => {
                freed.insert(event.thread, live.remove(&key).map(|block| (key, block)));
            }
            EventKind::FreeFailed => live.extend(freed.remove(&event.thread).flatten()),
            EventKind::Open { scope, spec } => {
                let (thread, since) = match spec.counts {
                    Counted::Thread(thread) => (Some(thread), 0),
                    Counted::Process if spec.at_peak => (None, 0),
                    Counted::Process => (Some(event.thread), at),
                    Counted::Task => unreachable!("no thread enters a scope here"),
                };
                let start = level(&live, thread, since);
                open.insert(scope, Scope { thread, since, start, peak: start });
            }
            EventKind::Close { scope } => {
                if let Some(Scope { thread, since, start, peak }) = open.remove(&scope) {
                    let end = level(&live, thread, since);
                    closed.insert(scope.0, (end - start, (peak - start.max(end)).unsigned_abs()));
                }
            }
            _ => {}
        }
        for Scope { thread, since, peak, .. } in open.values_mut() {
            *peak = level(&live, *thread, *since).max(*peak);
        }
    }
    closed
}
