//! Used and peaked of scopes, computed from the order of events in the obvious way: everything is summed up again for each event.

use std::collections::{BTreeMap, HashMap};

use gpumem_core::model::{EventKind, Key, ScopeId, ThreadId};

use crate::checker::Applied;

/// Used and peaked of each scope when it was closed.
pub(crate) fn traces(events: &[Applied]) -> BTreeMap<u64, (i64, u64)> {
    let mut live: HashMap<Key, (ThreadId, i64)> = HashMap::new();
    let mut freed = HashMap::new();
    let mut open: HashMap<ScopeId, (Option<ThreadId>, i64, i64)> = HashMap::new();
    let mut closed = BTreeMap::new();
    for event in events {
        let level = |live: &HashMap<Key, (ThreadId, i64)>, of: Option<ThreadId>| -> i64 {
            live.values().filter(|(thread, _)| of.is_none_or(|of| of == *thread)).map(|(_, bytes)| bytes).sum()
        };
        match event.kind {
            EventKind::Alloc { key, block } => {
                live.insert(key, (event.thread, block.bytes.get().cast_signed()));
            }
            EventKind::Free { key, .. } => {
                freed.insert(event.thread, live.remove(&key).map(|block| (key, block)));
            }
            EventKind::FreeFailed => live.extend(freed.remove(&event.thread).flatten()),
            EventKind::Open { scope, spec } => {
                let start = level(&live, spec.thread);
                open.insert(scope, (spec.thread, start, start));
            }
            EventKind::Close { scope } => {
                if let Some((thread, start, peak)) = open.remove(&scope) {
                    let end = level(&live, thread);
                    closed.insert(scope.0, (end - start, (peak - start.max(end)).unsigned_abs()));
                }
            }
            _ => {}
        }
        for (thread, _, peak) in open.values_mut() {
            *peak = level(&live, *thread).max(*peak);
        }
    }
    closed
}
