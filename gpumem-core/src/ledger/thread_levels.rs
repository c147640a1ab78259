//! Scopes that count only one thread.

use super::{Ledger, live::Entry, thread_level::ThreadLevel};
use crate::model::OwnerThread;

impl Ledger {
    /// Changes the levels of the threads for which a block counts, and of the scopes that count by themselves.
    #[cold]
    pub(super) fn count_for_thread_scopes(&mut self, entry: &Entry, bytes: i64) {
        let attribution = entry.attribution();
        let group = self.groups.get(attribution.group());
        if !group.is_in_program() {
            return;
        }
        let meter = group.meter;
        let Self { guests, thread_levels, .. } = self;
        guests.for_each_thread(attribution.owner(), |thread| {
            if let Some(ThreadLevel { level, groups, .. }) = thread_levels.get_mut(&(thread, meter)) {
                level.change(bytes);
                if let Some(groups) = groups {
                    groups.change(attribution.group(), bytes, level.in_use);
                }
            }
        });
        if !self.own_scopes.is_empty() {
            self.count_for_own_scopes(entry, bytes);
        }
    }

    /// Stops counting allocations and frees one by one, if nothing needs it.
    pub(super) fn update_has_thread_scopes(&mut self) {
        self.has_thread_scopes =
            !(self.thread_levels.is_empty() && self.own_scopes.is_empty() && self.watched.is_empty());
        self.update_is_special();
    }

    pub(super) fn update_is_special(&mut self) {
        self.is_special = self.has_thread_scopes || self.has_pools;
    }

    /// Notes that a scope or a kept peak no longer needs the level of a thread.
    pub(super) fn release_thread_level(&mut self, of_thread: Option<OwnerThread>, meter: u16) {
        let Some(of) = of_thread else { return };
        let Some(level) = self.thread_levels.get_mut(&(of, meter)) else { return };
        level.users -= 1;
        if level.users == 0 {
            self.thread_levels.remove(&(of, meter));
            self.update_has_thread_scopes();
        } else if level.groups.as_ref().is_some_and(|groups| groups.peaks.is_idle()) {
            level.groups = None;
        }
    }
}
