//! What can be asked of an inbox. What grows with the number of scopes, groups or blocks is read in parts, and other threads are
//! served in between.

use std::{collections::HashMap, time::Duration};

use super::{Clock, Inbox, Primitives, Tap};
use crate::{
    ledger::{AtPeak, Counts, DeviceStats, GroupUsage, KnownBlock, NodeId, PARTS, PeakOf, SLICE, ScopeNode, Within},
    model::{CallsiteId, Device, Key, ScopeId, ThreadId},
};

impl<T: Tap, P: Primitives> Inbox<T, P> {
    pub fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// What was observed so far.
    pub fn counts(&self) -> Counts {
        self.enter(0, |state, _| state.ledger.counts()).unwrap_or_default()
    }

    /// What the allocators of each device have done.
    pub fn stats(&self) -> Vec<DeviceStats> {
        self.enter(0, |state, _| state.ledger.stats()).unwrap_or_default()
    }

    /// The tree of scopes. Other threads are served in between: each path is as it was at some moment of the call, and where
    /// that makes a difference, raised to what the paths inside it come to.
    pub fn nodes(&self) -> Vec<(Option<Device>, ScopeNode)> {
        let mut last = None;
        while let Some(next) = self.enter(0, |state, _| state.ledger.note_device_peaks(last)).flatten() {
            last = Some(next);
        }
        let mut nodes = Vec::new();
        loop {
            let part = self.enter(0, |state, _| state.ledger.nodes_from(nodes.len())).unwrap_or_default();
            let is_last = part.len() < SLICE;
            nodes.extend(part);
            if is_last {
                break;
            }
        }
        if nodes.len() > SLICE {
            raise_to_what_is_inside(&mut nodes);
        }
        nodes
    }

    /// How many records of threads the ledger keeps: as many as ever ran at one time.
    pub fn thread_records(&self) -> usize {
        self.enter(0, |state, _| state.ledger.threads()).unwrap_or_default()
    }

    /// The calling thread's number; 0 if it is inside already.
    pub fn this_thread(&self) -> ThreadId {
        self.enter(0, |_, thread| thread).unwrap_or_default()
    }

    /// The scopes that the calling thread is in, the outermost first.
    pub fn path_of_this_thread(&self) -> Vec<CallsiteId> {
        self.enter(0, |state, thread| state.ledger.path_of(thread)).unwrap_or_default()
    }

    /// What is live, by where it comes from. As in [`blocks`](Self::blocks), each is as it was at some moment of the call.
    pub fn groups(&self) -> Vec<GroupUsage> {
        let part = |first| self.enter(0, |state, _| state.ledger.groups_from(first)).flatten();
        (0..).step_by(SLICE).map_while(part).flatten().collect()
    }

    /// What tells the blocks that were allocated in an open scope until now.
    pub fn within(&self, scope: ScopeId) -> Option<Within> {
        self.enter(0, |state, _| state.ledger.within(scope, state.number)).flatten()
    }

    /// Keeps what the peak of an open scope is made of, under a number of its own: false if that is not known.
    pub fn keep_peak(&self, scope: ScopeId, under: ScopeId) -> bool {
        self.enter(0, |state, _| state.ledger.keep_peak(scope, under)).flatten().is_some()
    }

    /// As [`keep_peak`](Self::keep_peak), of the most that was live on a device.
    pub fn keep_device_peak(&self, device: Device, under: ScopeId) -> bool {
        self.enter(0, |state, _| state.ledger.keep_device_peak(device, under)).flatten().is_some()
    }

    pub fn release_peak(&self, under: ScopeId) {
        self.enter(0, |state, _| state.ledger.release_peak(under));
    }

    /// A kept peak and the groups that it is made of. Other threads are served in between: it does not change.
    pub fn kept_peak(&self, under: ScopeId) -> Option<(PeakOf, Vec<AtPeak>)> {
        let peak = self.enter(0, |state, _| state.ledger.kept_peak(under)).flatten()?;
        let parts = (0..).map_while(|part| self.enter(0, |state, _| state.ledger.peak_part(under, part)).flatten());
        Some((peak, parts.flatten().collect()))
    }

    /// The live block of that key.
    pub fn block(&self, key: Key) -> Option<KnownBlock> {
        self.enter(0, |state, _| state.ledger.block(key)).flatten()
    }

    /// The live blocks: all, or what was allocated within a scope. Other threads are served in between, so that nobody
    /// waits for a million of them: each block was live at some moment of the call.
    pub fn blocks(&self, within: Option<&Within>) -> Vec<KnownBlock> {
        let part = |part| self.enter(0, |state, _| state.ledger.blocks(part, within)).unwrap_or_default();
        // Removes duplicates: a block may move to another part during the scan.
        let met: HashMap<Key, KnownBlock> = (0..PARTS).flat_map(part).map(|held| (held.key, held)).collect();
        met.into_values().collect()
    }
}

/// What each path has in use, and had, is no less than what those inside it have. Paths stand after their parents.
fn raise_to_what_is_inside(nodes: &mut [(Option<Device>, ScopeNode)]) {
    let mut inside = vec![0; nodes.len()];
    for at in (0..nodes.len()).rev() {
        let (_, node) = &mut nodes[at];
        node.in_use = node.in_use.max(inside[at]);
        node.peak = node.peak.max(node.in_use);
        let ScopeNode { parent, in_use, peak, .. } = *node;
        if parent != NodeId::NONE {
            let parent = parent.0 as usize;
            inside[parent] += in_use;
            nodes[parent].1.peak = nodes[parent].1.peak.max(peak);
        }
    }
}
