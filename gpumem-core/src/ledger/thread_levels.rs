//! What one thread has in use, for scopes that count that thread only.

use std::collections::HashMap;

use super::{
    Ledger,
    groups::{AllocGroup, GroupId},
    live::{Attribution, hash::KeyHashBuilder},
    meters::Level,
    peaks::{GroupBytes, Peaks},
};
use crate::model::OwnerThread;

/// What one thread has in use on one meter.
#[derive(Debug, Default)]
pub(super) struct ThreadLevel {
    pub(super) level: Level,
    /// How many open scopes and kept peaks need it.
    pub(super) users: usize,
    /// Exists while one of them needs to know which allocations make a peak.
    pub(super) groups: Option<Box<ThreadGroups>>,
}

/// What one thread has in use of each group. The counts begin when this is created.
#[derive(Debug)]
pub(super) struct ThreadGroups {
    pub(super) peaks: Peaks,
    pub(super) all: Vec<(GroupId, GroupBytes)>,
    known: HashMap<GroupId, usize, KeyHashBuilder>,
    /// The index of the group that changed last.
    newest: usize,
}

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

impl Default for ThreadGroups {
    fn default() -> Self {
        Self { peaks: Peaks::of_thread(), all: Vec::new(), known: HashMap::default(), newest: 0 }
    }
}

impl ThreadGroups {
    /// Changes what the thread has of a group. `in_use` is what it has of all groups afterwards.
    fn change(&mut self, group: GroupId, by: i64, in_use: i64) {
        let Self { peaks, all, known, newest } = self;
        if all.get(*newest).is_none_or(|(number, _)| *number != group) {
            *newest = *known.entry(group).or_insert_with(|| {
                all.push((group, GroupBytes::default()));
                all.len() - 1
            });
        }
        all[*newest].1.change(by, peaks);
        peaks.raise(in_use);
    }

    /// The groups that are still needed. The others are removed.
    pub(super) fn needed(&mut self) -> impl Iterator<Item = GroupId> {
        let Self { peaks, all, known, newest } = self;
        // While a kept peak is read in parts, the indices must not change.
        if !peaks.has_kept() {
            all.retain(|(_, group)| group.bytes != 0 || group.history.is_needed(peaks));
            known.clear();
            known.extend(all.iter().enumerate().map(|(at, (number, _))| (*number, at)));
            *newest = 0;
        }
        all.iter().map(|(number, _)| *number)
    }
}
