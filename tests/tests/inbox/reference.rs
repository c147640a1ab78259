//! Computes used and peaked of scopes from the order of events in a simple way.

use std::collections::BTreeMap;

use gpumem_core::model::{Counted, EventKind};
use gpumem_tests::rule::{Counts, Rule};

use crate::checker::Applied;

/// Returns used and peaked of each scope when it was closed.
pub(crate) fn traces(events: &[Applied]) -> BTreeMap<u64, (i64, u64)> {
    let (mut rule, mut closed) = (Rule::default(), BTreeMap::new());
    for event in events {
        let thread = event.thread.0.into();
        match event.kind {
            EventKind::Alloc { key, block } => rule.alloc(thread, key.get(), block.bytes.get().cast_signed()),
            EventKind::Free { key, .. } => rule.free(thread, key.get()),
            EventKind::FreeFailed => rule.free_failed(thread),
            EventKind::Open { scope, spec } => {
                let counts = match spec.counts {
                    Counted::AllThreads => Counts::All,
                    Counted::OwnAndUnscoped => Counts::OwnAndUnscoped,
                    Counted::Own => Counts::Own,
                    Counted::Task => unreachable!("no thread enters a scope here"),
                };
                rule.open(thread, scope.0, counts);
            }
            EventKind::Close { scope } => closed.extend(rule.close(scope.0).map(|values| (scope.0, values))),
            _ => {}
        }
    }
    closed
}
