//! The open scopes that adopt threads.

use std::collections::BTreeMap;

use crate::model::{ScopeId, ThreadId, Threads};

/// The open scopes that adopt threads.
#[derive(Debug, Default)]
pub(super) struct Adopters {
    scopes: BTreeMap<ScopeId, Threads>,
    /// The number of scopes that adopt by name.
    by_name: usize,
    /// The threads without a scope that have allocated since these scopes, or others of their threads, changed.
    pub(super) looked_up: Vec<ThreadId>,
}

impl Adopters {
    /// Returns whether no scope adopts threads.
    pub(super) fn is_empty(&self) -> bool {
        self.scopes.is_empty()
    }

    /// Returns whether some scope adopts threads by their names.
    pub(super) fn is_by_name(&self) -> bool {
        self.by_name > 0
    }

    pub(super) fn add(&mut self, scope: ScopeId, threads: Threads) {
        self.remove(scope);
        self.by_name += usize::from(matches!(threads, Threads::Named(_)));
        self.scopes.insert(scope, threads);
    }

    pub(super) fn remove(&mut self, scope: ScopeId) {
        if let Some(Threads::Named(_)) = self.scopes.remove(&scope) {
            self.by_name -= 1;
        }
    }

    /// Returns all adopting scopes, the latest first.
    pub(super) fn latest_first(&self) -> impl Iterator<Item = (ScopeId, Threads)> {
        self.scopes.iter().rev().map(|(scope, threads)| (*scope, *threads))
    }
}
