//! Scopes that count one thread only.

use super::{Ledger, groups::AllocGroup, live::Attribution, thread_level::ThreadLevel};
use crate::model::OwnerThread;

impl Ledger {
    /// Changes the levels of the threads for which a block counts.
    #[cold]
    pub(super) fn count_for_thread_scopes(&mut self, attribution: Attribution, bytes: i64) {
        let AllocGroup { kind, meter, .. } = *self.groups.get(attribution.group());
        if !kind.is_on_device() {
            return;
        }
        let Self { guests, thread_levels, .. } = self;
        guests.for_each_thread(attribution.owner(), |thread| {
            if let Some(ThreadLevel { level, groups, .. }) = thread_levels.get_mut(&(thread, meter)) {
                level.change(bytes);
                if let Some(groups) = groups {
                    groups.change(attribution.group(), bytes, level.in_use);
                }
            }
        });
    }

    /// A scope or a kept peak no longer needs the level of a thread.
    pub(super) fn release_thread_level(&mut self, of_thread: Option<OwnerThread>, meter: u16) {
        let Some(of) = of_thread else { return };
        let Some(level) = self.thread_levels.get_mut(&(of, meter)) else { return };
        level.users -= 1;
        if level.users == 0 {
            self.thread_levels.remove(&(of, meter));
            self.has_thread_scopes = !self.thread_levels.is_empty();
        } else if level.groups.as_ref().is_some_and(|groups| groups.peaks.is_idle()) {
            level.groups = None;
        }
    }
}
