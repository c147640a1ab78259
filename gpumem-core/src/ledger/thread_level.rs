//! The bytes in use of one thread.

use std::collections::HashMap;

use super::{
    groups::GroupId,
    meters::UsageLevel,
    peaks::{GroupBytes, PeakHistory},
};
use crate::model::{NumberHashBuilder, OwnerThread};

/// The bytes in use of one thread on one meter.
#[derive(Debug, Default)]
pub(super) struct ThreadLevel {
    pub(super) level: UsageLevel,
    /// The number of open scopes and kept peaks that need it.
    pub(super) users: usize,
    /// The peaks, while one of them needs to know which allocations make a peak.
    pub(super) groups: Option<Box<ThreadGroups>>,
}

/// The bytes in use of one thread in each group. The counts begin when this is created.
#[derive(Debug)]
pub(super) struct ThreadGroups {
    pub(super) peaks: PeakHistory,
    pub(super) all: Vec<(GroupId, GroupBytes)>,
    known: HashMap<GroupId, usize, NumberHashBuilder>,
    /// The index of the group that changed last.
    newest: usize,
}

impl Default for ThreadGroups {
    fn default() -> Self {
        Self { peaks: PeakHistory::of_thread(), all: Vec::new(), known: HashMap::default(), newest: 0 }
    }
}

impl ThreadGroups {
    /// Changes the bytes of the thread in a group. `in_use` is the sum of all groups afterwards.
    pub(super) fn change(&mut self, group: GroupId, by: i64, in_use: i64) {
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

    /// Returns the groups that are still needed. The others are removed.
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

/// The bytes in use of one thread on one meter. An entry exists while a scope counts only that thread.
pub(super) type ThreadLevels = HashMap<(OwnerThread, u16), ThreadLevel, NumberHashBuilder>;
