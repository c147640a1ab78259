//! Scopes that count only what was allocated in them, because a trace of another thread is or was open beside them. Such a scope
//! counts the whole process until the other trace opens. From then on it counts the blocks that are allocated in it, by its
//! thread or by threads that entered it. The free of a block that it has counted is counted as well, on any thread.

use super::{
    Ledger,
    live::Entry,
    scope::{OwnLevel, Scope},
};
use crate::model::{Gauge, OwnerThread, ScopeId};

/// The largest number of such scopes of one owner thread, because each block is compared with each of them. Further ones
/// count the whole process.
const MOST: usize = 64;

impl Ledger {
    /// Notes that a thread opens a trace on the device of this meter. The open scopes of another thread count by themselves from
    /// now on, if no trace has overlapped them before.
    pub(super) fn separate_others(&mut self, exact_meter: u16, thread: OwnerThread, number: u64) {
        let alone = &mut self.meters.0[usize::from(exact_meter)].open_traces.alone;
        // All of them belong to one thread: if two threads have open traces, these overlap.
        let is_others = alone.front().and_then(|first| self.scopes.get(first)).is_some_and(|scope| scope.own != thread);
        if !is_others {
            return;
        }
        for id in std::mem::take(alone).into_iter().take(MOST) {
            if let Some(mut scope) = self.scopes.remove(&id) {
                self.count_by_itself(id, &mut scope, number);
                self.scopes.insert(id, scope);
            }
        }
        self.separated_before = number;
    }

    /// Begins a scope, which counts the whole process unless a trace of another thread is open on its device.
    pub(super) fn begin_alone_or_not(&mut self, id: ScopeId, scope: &mut Scope) {
        // The allocations of a peak are recorded for the whole process, and would not add up to a peak of one scope.
        if scope.spec.gauge != Gauge::Exact || scope.of_thread.is_some() || scope.spec.at_peak {
            return;
        }
        let open_traces = &mut self.meters.0[usize::from(scope.exact_meter)].open_traces;
        if open_traces.has_others(scope.own) {
            self.count_by_itself(id, scope, scope.start.number);
        } else {
            let at = open_traces.alone.partition_point(|other| *other < id);
            open_traces.alone.insert(at, id);
        }
    }

    /// Undoes [`begin_alone_or_not`](Self::begin_alone_or_not).
    pub(super) fn end_alone_or_not(&mut self, id: ScopeId, scope: &mut Scope) {
        if scope.by_itself.take().is_none() {
            let alone = &mut self.meters.0[usize::from(scope.exact_meter)].open_traces.alone;
            if let Ok(at) = alone.binary_search(&id) {
                alone.remove(at);
            }
            return;
        }
        if let Some(ids) = self.own_scopes.get_mut(&scope.owner) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.own_scopes.remove(&scope.owner);
            }
        }
        self.update_has_thread_scopes();
    }

    fn count_by_itself(&mut self, id: ScopeId, scope: &mut Scope, whole_before: u64) {
        let ids = self.own_scopes.entry(scope.owner).or_default();
        if ids.len() < MOST {
            ids.push(id);
            let level = &self.meters.0[usize::from(scope.meter)].level;
            let peak = level.peaks.max_since(scope.start.peak);
            scope.by_itself = Some(OwnLevel { in_use: level.in_use, peak, whole_before });
            (self.has_thread_scopes, self.is_special) = (true, true);
        }
    }

    /// Changes the levels of the scopes that count this block.
    pub(super) fn count_for_own_scopes(&mut self, entry: &Entry, bytes: i64) {
        let Self { groups, guests, own_scopes, scopes, tree, separated_before, .. } = self;
        let (group, owner) = (groups.get(entry.group()), entry.attribution().owner());
        let mut count = |ids: &[ScopeId], may_be_inside: bool| {
            for id in ids {
                let Some(scope) = scopes.get_mut(id).filter(|scope| scope.meter == group.meter) else { continue };
                let is_inside = may_be_inside
                    && scope.number <= entry.number()
                    && scope.nodes().any(|outer| tree.is_inside(group.node, outer));
                let Some(level) = &mut scope.by_itself else { continue };
                if is_inside || (scope.start.number..level.whole_before).contains(&entry.number()) {
                    level.in_use = level.in_use.saturating_add(bytes);
                    level.peak = level.peak.max(level.in_use);
                }
            }
        };
        if entry.number() < *separated_before {
            // Any scope may have counted it while it counted the whole process.
            for (of, ids) in own_scopes.iter() {
                count(ids, guests.hosts(owner).any(|host| host == *of));
            }
        } else {
            guests.hosts(owner).filter_map(|owner| own_scopes.get(&owner)).for_each(|ids| count(ids, true));
        }
    }
}
