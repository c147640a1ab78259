//! Queries of an inbox. Lists that grow with the number of scopes, groups or blocks are read in parts, and other threads get
//! their turn in between. Therefore each item of a result is correct for some moment during the call, but not all items belong to
//! the same moment.

use std::{collections::HashMap, ops::Range, time::Duration};

use super::{Clock, Inbox, Primitives, Tap};
use crate::{
    ledger::{
        BLOCK_PARTS, Counts, DevicePeaks, DeviceStats, GroupAtPeak, GroupUsage, KnownBlock, KnownPool, Ledger, NodeId,
        PART_LEN, PeakInterval, PeakTotal, ScopeNode, ScopePeriod,
    },
    model::{CallsiteId, Device, EventKind, Key, MappedPages, MemKind, PoolId, ScopeId, ThreadId},
};

/// The queries that reports make to an [`Inbox`] with any primitives.
pub trait LedgerView: Send + Sync {
    /// Returns the number of events that were recorded or lost so far.
    fn counts(&self) -> Counts;
    /// Returns the statistics of each device.
    fn stats(&self) -> Vec<DeviceStats>;
    /// Returns the tree of scope paths, read in parts. A path that was read before its inner paths may have less in use than they
    /// have. Its numbers are then raised to theirs.
    fn nodes(&self) -> Vec<(Option<Device>, ScopeNode)>;
    /// Returns the groups that have live blocks, read in parts.
    fn groups(&self) -> Vec<GroupUsage>;
    /// Keeps the peak of an open scope under the number `under`. Returns `false` if the scope does not record which
    /// allocations make its peak.
    fn keep_peak(&self, scope: ScopeId, under: ScopeId) -> bool;
    /// Like [`keep_peak`](Self::keep_peak), but for the highest sum of the live blocks of a device: ever, or since the last reset
    /// of the summary.
    fn keep_device_peak(&self, device: Device, under: ScopeId, since_reset: bool) -> bool;
    /// Releases a kept peak.
    fn release_peak(&self, under: ScopeId);
    /// Returns a kept peak and its groups, read in parts. Later events do not change them.
    fn kept_peak(&self, under: ScopeId) -> Option<(PeakTotal, Vec<GroupAtPeak>)>;
    /// Returns the live block with this key.
    fn block(&self, key: Key) -> Option<KnownBlock>;
    /// Returns the registered pools, and closed pools that still have blocks.
    fn pools(&self) -> Vec<KnownPool>;
    /// Returns the address ranges of the blocks of pools. Blocks that are known by their handles are not included.
    fn pool_blocks(&self) -> Vec<(PoolId, Range<u64>)>;
    /// Returns the scopes around the one with this period, the outermost first.
    fn scopes_around(&self, period: &ScopePeriod) -> Vec<CallsiteId>;
    /// Returns the live blocks, read in parts: all of them, or those that were allocated in a scope.
    fn blocks(&self, allocated_in: Option<&ScopePeriod>) -> Vec<KnownBlock>;
    /// Returns what the driver took for itself and has not returned: all, or what it took in a scope.
    fn taken_by_driver(&self, taken_in: Option<&ScopePeriod>) -> Vec<KnownBlock>;
}

impl<T: Tap, P: Primitives> LedgerView for Inbox<T, P>
where
    Self: Send + Sync,
{
    fn counts(&self) -> Counts {
        self.enter(0, |state, _| state.ledger.sums().counts()).unwrap_or_default()
    }

    fn stats(&self) -> Vec<DeviceStats> {
        self.decide();
        self.enter(0, |state, _| state.ledger.sums().stats()).unwrap_or_default()
    }

    fn nodes(&self) -> Vec<(Option<Device>, ScopeNode)> {
        self.decide();
        let mut last = None;
        while let Some(next) = self.enter(0, |state, _| state.ledger.store_device_peaks(last)).flatten() {
            last = Some(next);
        }
        let mut nodes = Vec::new();
        loop {
            let part = self.enter(0, |state, _| state.ledger.sums().nodes_from(nodes.len())).unwrap_or_default();
            let is_last = part.len() < PART_LEN;
            nodes.extend(part);
            if is_last {
                break;
            }
        }
        if nodes.len() > PART_LEN {
            raise_to_inner_paths(&mut nodes);
        }
        nodes
    }

    fn groups(&self) -> Vec<GroupUsage> {
        self.decide();
        let part = |first| self.enter(0, |state, _| state.ledger.sums().groups_from(first)).flatten();
        (0..).step_by(PART_LEN).map_while(part).flatten().collect()
    }

    fn keep_peak(&self, scope: ScopeId, under: ScopeId) -> bool {
        self.decide();
        self.enter(0, |state, _| state.ledger.keep_peak(scope, under)).flatten().is_some()
    }

    fn keep_device_peak(&self, device: Device, under: ScopeId, since_reset: bool) -> bool {
        self.decide();
        self.enter(0, |state, _| state.ledger.sums().keep_device_peak(device, under, since_reset)).flatten().is_some()
    }

    fn release_peak(&self, under: ScopeId) {
        self.enter(0, |state, _| state.ledger.sums().release_peak(under));
    }

    fn kept_peak(&self, under: ScopeId) -> Option<(PeakTotal, Vec<GroupAtPeak>)> {
        let peak = self.enter(0, |state, _| state.ledger.sums().kept_peak(under)).flatten()?;
        let parts =
            (0..).map_while(|part| self.enter(0, |state, _| state.ledger.sums().peak_part(under, part)).flatten());
        Some((peak, parts.flatten().collect()))
    }

    fn block(&self, key: Key) -> Option<KnownBlock> {
        self.enter(0, |state, _| state.ledger.block(key)).flatten()
    }

    fn pools(&self) -> Vec<KnownPool> {
        // The numbers of a pool include no undecided block, so this decides none. Reports call it in the middle of a recording.
        self.enter(0, |state, _| state.ledger.pools()).unwrap_or_default()
    }

    fn pool_blocks(&self) -> Vec<(PoolId, Range<u64>)> {
        self.enter(0, |state, _| state.ledger.pool_blocks()).unwrap_or_default()
    }

    fn scopes_around(&self, period: &ScopePeriod) -> Vec<CallsiteId> {
        self.enter(0, |state, _| state.ledger.scopes_around(period)).unwrap_or_default()
    }

    fn blocks(&self, allocated_in: Option<&ScopePeriod>) -> Vec<KnownBlock> {
        self.without_duplicates(|ledger, part| ledger.blocks(part, allocated_in))
    }

    fn taken_by_driver(&self, taken_in: Option<&ScopePeriod>) -> Vec<KnownBlock> {
        self.without_duplicates(|ledger, part| ledger.taken_by_driver(part, taken_in))
    }
}

impl<T: Tap, P: Primitives> Inbox<T, P> {
    /// Returns the time since the inbox was created.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Reads blocks in parts. A block may move to another part while the parts are read, but is returned only once.
    fn without_duplicates(&self, read: impl Fn(&Ledger, usize) -> Vec<KnownBlock>) -> Vec<KnownBlock> {
        let part = |part| self.enter(0, |state, _| read(&state.ledger, part)).unwrap_or_default();
        let blocks: HashMap<Key, KnownBlock> =
            (0..BLOCK_PARTS).flat_map(part).map(|block| (block.key, block)).collect();
        blocks.into_values().collect()
    }

    /// Decides who owns the driver's blocks, as each query does; see `ledger/undecided.rs`. The decision is an event, so that a
    /// replay decides the same.
    fn decide(&self) {
        if self.has_undecided() {
            self.post(&EventKind::PoolsQueried);
        }
    }

    /// Returns whether the owner of any block is not known yet.
    pub fn has_undecided(&self) -> bool {
        self.enter(0, |state, _| state.ledger.has_undecided()).unwrap_or(false)
    }

    /// Returns the number of the calling thread; 0 if the thread is already inside the inbox.
    pub fn this_thread(&self) -> ThreadId {
        self.enter(0, |_, thread| thread).unwrap_or_default()
    }

    /// See [`Sums::start_interval`](crate::ledger::Sums::start_interval). `None` if the thread is inside the inbox already.
    pub fn start_interval(&self, device: Device) -> Option<PeakInterval> {
        self.enter(0, |state, _| state.ledger.sums().start_interval(device))
    }

    /// See [`Sums::next_interval`](crate::ledger::Sums::next_interval).
    pub fn next_interval(&self, interval: &mut PeakInterval) -> Option<DevicePeaks> {
        self.decide();
        self.enter(0, |state, _| state.ledger.sums().next_interval(interval))
    }

    /// See [`Sums::end_interval`](crate::ledger::Sums::end_interval).
    pub fn end_interval(&self, interval: PeakInterval) {
        self.enter(0, |state, _| state.ledger.sums().end_interval(interval));
    }

    /// Returns the live bytes of each kind on a device, and the number of allocations and frees so far. Unlike other queries, this one
    /// does not decide who owns blocks: hooks call it.
    pub fn live_kinds(&self, device: Device) -> ([u64; MemKind::ALL.len()], u64) {
        self.enter(0, |state, _| {
            let sums = state.ledger.sums();
            let of_device = sums.stats().into_iter().find(|stats| stats.device == device);
            let kinds = of_device.map(|stats| stats.kinds.map(|kind| kind.bytes.current)).unwrap_or_default();
            (kinds, sums.counts().events)
        })
        .unwrap_or_default()
    }

    /// Returns the bytes that the driver maps for the live blocks of a device in addition to their sizes. `None` if there are too many
    /// blocks for a query that is made once a second.
    pub fn rounding(&self, device: Device) -> Option<u64> {
        const MOST_BLOCKS: u64 = 100_000;
        let blocks = |state: &mut Ledger| {
            let stats = state.sums().stats();
            let of_device = stats.iter().find(|stats| stats.device == device);
            of_device.map_or(0, |stats| stats.kinds[MemKind::Device as usize].blocks.current)
        };
        let blocks = self.enter(0, |state, _| blocks(&mut state.ledger))?;
        if blocks > MOST_BLOCKS {
            return None;
        }
        let mut pages = MappedPages::default();
        for part in (0..BLOCK_PARTS).filter(|_| blocks > 0) {
            self.enter(0, |state, _| {
                state
                    .ledger
                    .mapped_blocks(part, device)
                    .for_each(|(key, bytes)| pages.add(key, bytes, MemKind::Device));
            });
        }
        Some(pages.rounding().get())
    }

    /// Returns the scopes that the calling thread is in, the outermost first.
    pub fn path_of_this_thread(&self) -> Vec<CallsiteId> {
        self.enter(0, |state, thread| state.ledger.path_of(thread)).unwrap_or_default()
    }

    /// Returns the period of an open scope until now, which selects the blocks that were allocated in it.
    pub fn scope_period(&self, scope: ScopeId) -> Option<ScopePeriod> {
        self.enter(0, |state, _| state.ledger.scope_period(scope, state.number)).flatten()
    }
}

/// Raises `in_use` of each path to the sum of its inner paths, and `peak` to the largest of theirs. Each path is after its parent
/// in the list.
fn raise_to_inner_paths(nodes: &mut [(Option<Device>, ScopeNode)]) {
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
