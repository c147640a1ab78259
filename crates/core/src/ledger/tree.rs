//! The tree of scope paths, with the bytes in use of each path and its peak. A node is a path of nested scopes on one
//! device.
//!
//! An allocation counts for its own node and for all nodes above it. But the next event usually belongs to the same node or to a
//! nearby one. Therefore each outermost scope has a cursor at the node of its last event. When the cursor leaves a node towards
//! its parent, the changes of that node are applied to the parent as one `Delta`. The cost of an event is thus the number of
//! steps that the cursor makes: none in the same scope, and one where a scope is opened or closed, however deep it is. The meter
//! counts the whole device, above all scopes.

use std::collections::HashMap;

use super::delta::{Delta, GroupDelta};
use crate::model::{CallsiteId, NumberHashBuilder};

/// Deeper scopes are counted together.
const DEEPEST: u8 = 64;
/// The largest number of nodes. Further paths are counted together.
const MOST_NODES: usize = 1 << 16;

/// The id of a scope path on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeId(pub u32);

impl NodeId {
    /// The node outside all scopes, on no device.
    pub const NONE: Self = Self(0);
}

/// The statistics of one scope path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeNode {
    /// `NONE` if this is a device's root, which stands for everything outside all scopes.
    pub parent: NodeId,
    /// The innermost scope of the path.
    pub callsite: CallsiteId,
    pub(super) meter: u16,
    depth: u8,
    /// The outermost scope of the path; `NONE` for a root.
    top: NodeId,
    /// The node of the last event in an outermost scope. Only nodes from there up to the outermost scope have an `unapplied`
    /// delta.
    cursor: NodeId,
    /// The changes that are not yet applied to the parent.
    unapplied: Delta,
    /// The number of times that the scope was opened.
    pub calls: u64,
    /// Allocations in this scope, without those in inner scopes.
    pub allocations: u64,
    /// The sum of their bytes.
    pub allocated: u64,
    /// The bytes in use, including those of inner scopes.
    pub in_use: i64,
    /// The highest value of `in_use`.
    pub peak: i64,
    /// The highest memory of the process on the device while the scope was open.
    pub device_peak: i64,
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct ScopeTree {
    known: HashMap<(NodeId, CallsiteId), NodeId, NumberHashBuilder>,
    /// The root of each device, indexed by meter.
    roots: Vec<NodeId>,
    /// Node 0 is `NodeId::NONE`.
    nodes: Vec<ScopeNode>,
}

impl Default for ScopeTree {
    fn default() -> Self {
        let none = ScopeNode::new(NodeId::NONE, CallsiteId::NONE, u16::MAX, 0, NodeId::NONE);
        Self { nodes: vec![none], known: HashMap::default(), roots: Vec::new() }
    }
}

impl ScopeNode {
    const fn new(parent: NodeId, callsite: CallsiteId, meter: u16, depth: u8, top: NodeId) -> Self {
        let (calls, allocations, allocated, in_use, peak, device_peak) = (0, 0, 0, 0, 0, 0);
        let (cursor, unapplied) = (top, Delta::ZERO);
        Self {
            parent,
            callsite,
            meter,
            depth,
            top,
            cursor,
            unapplied,
            calls,
            allocations,
            allocated,
            in_use,
            peak,
            device_peak,
        }
    }

    #[inline]
    fn apply(&mut self, delta: Delta) {
        self.peak = self.peak.max(self.in_use + delta.high);
        self.in_use += delta.net;
        self.unapplied.append(delta);
    }
}

impl ScopeTree {
    /// Applies the sum of several events of one node.
    #[inline]
    pub(super) fn apply(&mut self, node: NodeId, delta: &GroupDelta) {
        self.move_cursor(node);
        let node = &mut self.nodes[node.0 as usize];
        node.allocations = node.allocations.saturating_add_signed(delta.allocations);
        node.allocated = node.allocated.saturating_add_signed(delta.allocated);
        node.apply(delta.bytes);
    }

    /// Moves the cursor of this node's outermost scope to the node, along the shortest path.
    #[inline]
    fn move_cursor(&mut self, node: NodeId) {
        let top = self.node(node).top;
        if top != NodeId::NONE && self.node(top).cursor != node {
            self.move_cursor_of(top, node);
        }
    }

    #[inline(never)]
    fn move_cursor_of(&mut self, top: NodeId, node: NodeId) {
        let mut left = std::mem::replace(&mut self.nodes[top.0 as usize].cursor, node);
        let mut entered = node;
        while left != entered {
            if self.node(left).depth >= self.node(entered).depth {
                left = self.apply_to_parent(left);
            } else {
                entered = self.node(entered).parent;
            }
        }
    }

    fn apply_to_parent(&mut self, node: NodeId) -> NodeId {
        let node = &mut self.nodes[node.0 as usize];
        let (unapplied, parent) = (std::mem::take(&mut node.unapplied), node.parent);
        self.nodes[parent.0 as usize].apply(unapplied);
        parent
    }

    /// Returns the node of a scope that is opened inside another one. The same callsite always has the same node.
    pub(super) fn child(&mut self, outer: NodeId, callsite: CallsiteId) -> NodeId {
        if let Some(known) = self.known.get(&(outer, callsite)) {
            return *known;
        }
        let ScopeNode { meter, depth, callsite: outer_callsite, .. } = *self.node(outer);
        if outer_callsite == CallsiteId::OTHERS {
            return outer;
        }
        if callsite != CallsiteId::OTHERS && (depth == DEEPEST || self.nodes.len() >= MOST_NODES) {
            // These scopes still count for the scope that they are in. Each node has at most one such child, so at most twice as
            // many nodes as the limit exist.
            return self.child(outer, CallsiteId::OTHERS);
        }
        let next = NodeId(u32::try_from(self.nodes.len()).expect("there are fewer than 2^32 nodes"));
        let top = if depth == 0 { next } else { self.node(outer).top };
        self.nodes.push(ScopeNode::new(outer, callsite, meter, depth + 1, top));
        self.known.insert((outer, callsite), next);
        next
    }

    /// Returns the node of the same path on another device.
    pub(super) fn same_path_on(&mut self, meter: u16, node: NodeId) -> NodeId {
        let ScopeNode { parent, callsite, meter: own, .. } = *self.node(node);
        if own == meter {
            return node;
        }
        if node == NodeId::NONE || parent == NodeId::NONE {
            return self.root(meter);
        }
        let outer = self.same_path_on(meter, parent);
        self.child(outer, callsite)
    }

    pub(super) fn root(&mut self, meter: u16) -> NodeId {
        let at = usize::from(meter);
        if at >= self.roots.len() {
            self.roots.resize(at + 1, NodeId::NONE);
        }
        if self.roots[at] == NodeId::NONE {
            self.roots[at] = NodeId(u32::try_from(self.nodes.len()).expect("there are fewer than 2^32 nodes"));
            self.nodes.push(ScopeNode::new(NodeId::NONE, CallsiteId::NONE, meter, 0, NodeId::NONE));
        }
        self.roots[at]
    }

    pub(super) fn node(&self, node: NodeId) -> &ScopeNode {
        &self.nodes[node.0 as usize]
    }

    /// Returns the scopes of a path, the outermost first.
    pub(super) fn path(&self, mut node: NodeId) -> Vec<CallsiteId> {
        let mut path = Vec::new();
        while self.node(node).depth > 0 {
            path.push(self.node(node).callsite);
            node = self.node(node).parent;
        }
        path.reverse();
        path
    }

    /// Resets all statistics except the bytes in use.
    pub(super) fn reset(&mut self) {
        self.nodes(0, usize::MAX);
        for node in &mut self.nodes {
            (node.calls, node.allocations, node.allocated) = (0, 0, 0);
            (node.peak, node.device_peak) = (node.in_use, 0);
        }
    }

    pub(super) fn opened(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].calls += 1;
    }

    /// Moves a scope from one node to another. It counts as opened only at the new node.
    pub(super) fn reopened(&mut self, from: NodeId, to: NodeId) {
        let calls = &mut self.nodes[from.0 as usize].calls;
        *calls = calls.saturating_sub(1);
        self.opened(to);
    }

    /// Records the memory of the process on the device while the scope was open.
    pub(super) fn raise_device_peak(&mut self, node: NodeId, in_use: i64) {
        let node = &mut self.nodes[node.0 as usize];
        node.device_peak = node.device_peak.max(in_use);
    }

    /// Returns at most `count` nodes starting at this number, each after its parent. `in_use` and `peak` of a root are not set;
    /// they are in its meter.
    pub(super) fn nodes(&mut self, first: usize, count: usize) -> &[ScopeNode] {
        let first = first.min(self.nodes.len());
        let end = self.nodes.len().min(first.saturating_add(count));
        for at in first..end {
            // This applies the changes of the nodes below to all nodes up to `top`.
            self.move_cursor(self.nodes[at].top);
        }
        &self.nodes[first..end]
    }

    /// Returns whether the node stands for a scope, and not for the memory outside all scopes.
    pub(super) fn is_in_scope(&self, node: NodeId) -> bool {
        self.node(node).depth > 0
    }

    /// Returns whether the path of `node` is that of `outer` or inside it. The two may be on different devices.
    pub(super) fn is_inside(&self, mut node: NodeId, outer: NodeId) -> bool {
        let depth = self.node(outer).depth;
        while self.node(node).depth > depth {
            node = self.node(node).parent;
        }
        self.is_same_path(node, outer)
    }

    fn is_same_path(&self, mut one: NodeId, mut other: NodeId) -> bool {
        while one != other {
            let (a, b) = (self.node(one), self.node(other));
            if (a.depth, a.callsite) != (b.depth, b.callsite) {
                return false;
            }
            (one, other) = (a.parent, b.parent);
        }
        true
    }
}
