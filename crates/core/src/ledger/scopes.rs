//! Opens, reads, resets and closes scopes. Threads enter and leave them in `places.rs`, and `traces.rs` measures them.

use super::{
    account_id::AccountId,
    places::Places,
    scope::{Scope, ScopeStart},
    sums::Sums,
    thread::{Entered, Thread},
    tree::{NodeId, ScopeNode},
};
use crate::model::{CallsiteId, Counted, Event, Gauge, ScopeId, ScopeSpec, ThreadId, Trace};

impl Places {
    /// Opens a scope inside the scope that its thread is in.
    pub(super) fn open(&mut self, scope: ScopeId, spec: ScopeSpec, event: &Event<'_>, sums: &mut Sums) {
        let meter = sums.meters.index(spec.device, spec.gauge);
        let exact_meter = sums.meters.index(spec.device, Gauge::Exact);
        let Thread { node: outer, owner: around, own, .. } = *self.threads.get(event.thread);
        let outer = sums.tree.same_path_on(exact_meter, outer);
        let node = sums.tree.child(outer, spec.callsite);
        sums.tree.opened(node);
        let is_task = spec.counts == Counted::Task;
        let task = if is_task { self.start_task(around, &mut sums.guests) } else { None };
        let (of, counts_unscoped) = match spec.counts {
            Counted::AllThreads | Counted::OwnAndUnscoped => (Some(own), true),
            Counted::Own => (Some(own), false),
            Counted::Task => (task, false),
        };
        // Samples are readings of the whole device.
        let is_whole = spec.gauge != Gauge::Exact || spec.counts == Counted::AllThreads;
        let account = of.map(|of| AccountId { of, meter: exact_meter, counts_unscoped });
        let (account, whole) = if is_whole { (None, account) } else { (account, None) };
        let mut open = Box::new(Scope {
            spec,
            meter,
            account,
            whole,
            node,
            previous_nodes: Vec::new(),
            exact_meter,
            owner: task.unwrap_or(around),
            opener: event.thread,
            own,
            number: event.number,
            devices_since: event.number,
            start: ScopeStart::default(),
            watched: None,
        });
        sums.open(&mut open);
        self.scopes.insert(scope, open);
        if !is_task {
            let Event { number, thread, .. } = *event;
            let entered = Entered { number, scope, node, host: None, owner: around, by_opening: true };
            self.threads.get(thread).enter(entered);
        }
        self.look_up_again();
    }

    /// Returns the trace of an open scope.
    pub(super) fn trace(&self, scope: ScopeId, sums: &Sums) -> Option<Trace> {
        let open = self.scopes.get(&scope)?;
        Some(sums.trace(open, self.allocated_only_on(open)))
    }

    /// Restarts a scope from 0. This also restarts the record of the allocations of its peak, unless `keep_peak` is true.
    pub(super) fn reset(&mut self, scope: ScopeId, number: u64, keep_peak: bool, sums: &mut Sums) {
        let Some(open) = self.scopes.get_mut(&scope) else { return };
        sums.reset(open, number, keep_peak);
        if !keep_peak {
            // Threads in a task need not look up their next allocation.
            open.devices_since = if open.is_task() { open.devices_since } else { number };
            self.threads.get(open.opener).forget_latest();
        }
        self.look_up_again();
    }

    /// Closes a scope. Its thread leaves it.
    pub(super) fn close(&mut self, scope: ScopeId, sums: &mut Sums) {
        let Some(mut open) = self.scopes.remove(&scope) else { return };
        sums.close(scope, &mut open);
        if open.is_task() {
            self.tasks.remove(&open.owner);
        } else if let Some(at) = self.threads.get(open.opener).leave_opened(scope, open.number) {
            self.update_later(open.opener, at, &mut sums.guests);
            if at < self.threads.get(open.opener).entered.len() {
                self.move_out(open.opener, at, open.node, sums);
            }
        }
        self.look_up_again();
        self.adopters.remove(scope);
    }

    /// Handles a scope that was closed before the scopes that its thread opened inside it. Those scopes are in `entered` from
    /// index `at` on. They move to the scope around the closed one, because their later allocations are not in the closed one.
    /// There are at most as many of them as scopes can nest in the tree.
    #[cold]
    fn move_out(&mut self, thread: ThreadId, at: usize, closed: NodeId, sums: &mut Sums) {
        let (mut left, mut outer) = (closed, sums.tree.node(closed).parent);
        let mut moved: Vec<(ScopeId, NodeId)> = Vec::new();
        let thread = self.threads.get(thread);
        for Entered { scope, node, by_opening, .. } in thread.entered.range_mut(at..) {
            let to = if let Some((_, to)) = moved.iter().find(|(moved, _)| moved == scope) {
                *to
            } else {
                let ScopeNode { parent, callsite, meter, .. } = *sums.tree.node(*node);
                // This scope was not opened inside the closed one. The same is true of all scopes inside it.
                if !*by_opening || callsite == CallsiteId::OTHERS || parent != sums.tree.same_path_on(meter, left) {
                    break;
                }
                let to = sums.tree.same_path_on(meter, outer);
                let to = sums.tree.child(to, callsite);
                if let Some(open) = self.scopes.get_mut(scope) {
                    sums.store_device_peak(*node, open);
                    open.previous_nodes.push(std::mem::replace(&mut open.node, to));
                }
                sums.tree.reopened(*node, to);
                moved.push((*scope, to));
                to
            };
            (left, outer) = (std::mem::replace(node, to), to);
        }
        thread.update_scope();
    }
}
