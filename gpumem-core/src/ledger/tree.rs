//! The tree of scopes: what each path of nested scopes holds, and held at most.
//!
//! An allocation counts for its own node and all nodes above it, but the next event is likely to be of the same node, or of one
//! nearby. So each outermost scope has a cursor, on the node of its newest event; what came of the events below a node is told
//! to it when the cursor leaves that way, as one sum and one highest point. An event costs as much as the cursor moves: nothing
//! within one scope, a step where one is opened or closed, however deep they lie. What is above all scopes, the whole
//! device, is counted by its meter.

use std::collections::HashMap;

use super::pending::{Delta, GroupDelta};
use crate::model::CallsiteId;

/// Deeper scopes are not told apart.
const DEEPEST: u8 = 64;
/// Nor are more of them.
const MOST: usize = 1 << 16;

/// A path of nested scopes, on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Outside of all scopes, on no device in particular.
    pub const NONE: Self = Self(0);
}

/// What is known of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeNode {
    /// `NONE` above a device's outermost node, which stands for what is outside of all scopes.
    pub parent: NodeId,
    /// The innermost scope of the path.
    pub callsite: CallsiteId,
    pub(super) meter: u16,
    depth: u8,
    /// The outermost scope that it is in; `NONE` outside of all.
    top: NodeId,
    /// Of an outermost scope: the node of its newest event. Only from there up to it anything is still to be told.
    cursor: NodeId,
    /// What is still to be told to the parent.
    unapplied: Delta,
    /// How often it was opened.
    pub calls: u64,
    /// Here, without the scopes inside.
    pub allocations: u64,
    /// Bytes in all, here, without the scopes inside.
    pub allocated: u64,
    /// With the scopes inside.
    pub in_use: i64,
    /// The most that was ever in use, with the scopes inside.
    pub peak: i64,
    /// The most that the process had in use on the device while the scope was open.
    pub device_peak: i64,
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct Tree {
    known: HashMap<(NodeId, CallsiteId), NodeId>,
    /// By meter: the outermost node.
    roots: Vec<NodeId>,
    /// Number 0 is nowhere.
    nodes: Vec<ScopeNode>,
}

impl Default for Tree {
    fn default() -> Self {
        let nowhere = ScopeNode::new(NodeId::NONE, CallsiteId::NONE, u16::MAX, 0, NodeId::NONE);
        Self { nodes: vec![nowhere], known: HashMap::new(), roots: Vec::new() }
    }
}

impl ScopeNode {
    const fn new(parent: NodeId, callsite: CallsiteId, meter: u16, depth: u8, top: NodeId) -> Self {
        let (calls, allocations, allocated, in_use, peak, device_peak) = (0, 0, 0, 0, 0, 0);
        let (cursor, unapplied) = (top, Delta::NOTHING);
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
    fn apply(&mut self, events: Delta) {
        self.peak = self.peak.max(self.in_use + events.high);
        self.in_use += events.net;
        self.unapplied.append(events);
    }
}

impl Tree {
    /// What came of several blocks of a node, one after the other.
    #[inline]
    pub(super) fn apply(&mut self, node: NodeId, delta: &GroupDelta) {
        self.move_cursor(node);
        let node = &mut self.nodes[node.0 as usize];
        node.allocations += delta.allocations;
        node.allocated = node.allocated.saturating_add(delta.allocated);
        node.apply(delta.bytes);
    }

    /// From wherever the cursor of this node's outermost scope is, by the shortest way.
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

    /// The node of a scope that is opened inside another; the same one each time.
    pub(super) fn inside(&mut self, outer: NodeId, callsite: CallsiteId) -> NodeId {
        if let Some(known) = self.known.get(&(outer, callsite)) {
            return *known;
        }
        let ScopeNode { meter, depth, callsite: outer_callsite, .. } = *self.node(outer);
        if outer_callsite == CallsiteId::OTHERS {
            return outer;
        }
        if callsite != CallsiteId::OTHERS && (depth == DEEPEST || self.nodes.len() >= MOST) {
            // Inside the scope that they are in, which they count for. It is one for each, so there are at most twice as many.
            return self.inside(outer, CallsiteId::OTHERS);
        }
        let next = NodeId(u32::try_from(self.nodes.len()).expect("fewer nodes than that are made"));
        let top = if depth == 0 { next } else { self.node(outer).top };
        self.nodes.push(ScopeNode::new(outer, callsite, meter, depth + 1, top));
        self.known.insert((outer, callsite), next);
        next
    }

    /// The node of the same path on another device.
    pub(super) fn on(&mut self, meter: u16, node: NodeId) -> NodeId {
        let ScopeNode { parent, callsite, meter: own, .. } = *self.node(node);
        if own == meter {
            return node;
        }
        if node == NodeId::NONE || parent == NodeId::NONE {
            return self.root(meter);
        }
        let outer = self.on(meter, parent);
        self.inside(outer, callsite)
    }

    pub(super) fn root(&mut self, meter: u16) -> NodeId {
        let at = usize::from(meter);
        if at >= self.roots.len() {
            self.roots.resize(at + 1, NodeId::NONE);
        }
        if self.roots[at] == NodeId::NONE {
            self.roots[at] = NodeId(u32::try_from(self.nodes.len()).expect("fewer nodes than that are made"));
            self.nodes.push(ScopeNode::new(NodeId::NONE, CallsiteId::NONE, meter, 0, NodeId::NONE));
        }
        self.roots[at]
    }

    pub(super) fn node(&self, node: NodeId) -> &ScopeNode {
        &self.nodes[node.0 as usize]
    }

    /// The scopes around a node and its own, the outermost first.
    pub(super) fn path(&self, mut node: NodeId) -> Vec<CallsiteId> {
        let mut path = Vec::new();
        while self.node(node).depth > 0 {
            path.push(self.node(node).callsite);
            node = self.node(node).parent;
        }
        path.reverse();
        path
    }

    pub(super) fn opened(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].calls += 1;
    }

    /// A scope that was opened at one node is at another from now on. It was opened once.
    pub(super) fn reopened(&mut self, from: NodeId, to: NodeId) {
        let calls = &mut self.nodes[from.0 as usize].calls;
        *calls = calls.saturating_sub(1);
        self.opened(to);
    }

    /// The process had so much in use on the device while the scope was open.
    pub(super) fn device_had(&mut self, node: NodeId, in_use: i64) {
        let node = &mut self.nodes[node.0 as usize];
        node.device_peak = node.device_peak.max(in_use);
    }

    /// So many nodes from this number on, each after its parent; number 0 is nowhere. What a device's outermost node has in use,
    /// and had, is not said.
    pub(super) fn nodes(&mut self, first: usize, count: usize) -> &[ScopeNode] {
        let first = first.min(self.nodes.len());
        let end = self.nodes.len().min(first + count);
        for at in first..end {
            // What came of the events below is told to all up to there.
            self.move_cursor(self.nodes[at].top);
        }
        &self.nodes[first..end]
    }

    /// Whether a node is another or lies inside it, by their paths: they may be on different devices.
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
