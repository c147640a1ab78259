//! Moves scopes whose outer scope is closed first to the scope around that one.

use super::{
    Ledger,
    thread::Entered,
    tree::{NodeId, ScopeNode},
};
use crate::model::{CallsiteId, ScopeId, ThreadId};

impl Ledger {
    /// Handles a scope that was closed before the scopes that its thread opened inside it. Those scopes are in `entered` from
    /// index `at` on. They move to the scope around the closed one, because their later allocations are not in the closed one.
    /// There are at most as many of them as scopes can nest in the tree.
    #[cold]
    pub(super) fn move_out(&mut self, thread: ThreadId, at: usize, closed: NodeId) {
        let (mut left, mut outer) = (closed, self.tree.node(closed).parent);
        let mut moved: Vec<(ScopeId, NodeId)> = Vec::new();
        for at in at..self.thread(thread).entered.len() {
            let Entered { scope, node, by_opening, .. } = self.thread(thread).entered[at];
            let to = if let Some((_, to)) = moved.iter().find(|(moved, _)| *moved == scope) {
                *to
            } else {
                let ScopeNode { parent, callsite, meter, .. } = *self.tree.node(node);
                // This scope was not opened inside the closed one. The same is true of all scopes inside it.
                if !by_opening || callsite == CallsiteId::OTHERS || parent != self.tree.same_path_on(meter, left) {
                    break;
                }
                let to = self.tree.same_path_on(meter, outer);
                let to = self.tree.child(to, callsite);
                if let Some(mut open) = self.scopes.remove(&scope) {
                    let device_peak = self.device_peak(&open);
                    self.tree.raise_device_peak(node, device_peak);
                    open.previous_nodes.push(std::mem::replace(&mut open.node, to));
                    self.scopes.insert(scope, open);
                }
                self.tree.reopened(node, to);
                moved.push((scope, to));
                to
            };
            self.thread(thread).entered[at].node = to;
            (left, outer) = (node, to);
        }
        self.thread(thread).update_scope();
    }
}
