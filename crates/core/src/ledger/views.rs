//! Reads the tree of scopes, the groups and the live blocks of the ledger in parts.

use std::ops::Bound;

use super::{
    Ledger,
    counts::{Counts, PART_LEN},
    groups::{AllocGroup, GroupState},
    live::Entry,
    meters::{DeviceStats, Meter},
    sums::Sums,
    thread::Thread,
    tree::{NodeId, ScopeNode},
};
use crate::model::{Bytes, CallsiteId, Device, Gauge, Key, MemKind, OwnerThread, ScopeId, ThreadId, Time};

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownBlock {
    /// Its key, which no other live block has.
    pub key: Key,
    /// The number of the event that allocated the block. This number is unique, whereas a key may be reused.
    pub number: u64,
    /// The owner thread of the scope in which the block was allocated, or of the thread that allocated it.
    pub thread: OwnerThread,
    /// The requested size.
    pub bytes: Bytes,
    /// The device.
    pub device: Device,
    /// Its allocation group.
    pub group: AllocGroup,
    /// The time of its allocation, to a tenth of a second.
    pub time: Time,
}

/// The time during which one scope was open. It selects the blocks that were allocated in that scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopePeriod {
    /// The paths that the scope had.
    nodes: Vec<NodeId>,
    /// The paths. `None` for all blocks that were allocated in this time, in any scope.
    owner: Option<OwnerThread>,
    /// True for a task, which also includes the blocks that its threads allocated in scopes opened elsewhere.
    is_task: bool,
    /// The numbers of the first and the last event.
    since: u64,
    until: u64,
}

/// The live blocks of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupUsage {
    /// The device.
    pub device: Device,
    /// The group.
    pub group: AllocGroup,
    /// The number of its live blocks.
    pub blocks: u64,
    /// The sum of their requested sizes.
    pub bytes: Bytes,
}

impl Ledger {
    /// Stores in the tree the highest memory of the device while the open scopes were open. Handles one part of these scopes,
    /// starting after the given one. Returns the last scope of the part; `None` if the part is empty.
    pub fn store_device_peaks(&mut self, after: Option<ScopeId>) -> Option<ScopeId> {
        self.sums.flush();
        let rest = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part = self.places.scopes.range(rest).take(PART_LEN);
        let stored = part.map(|(id, scope)| {
            self.sums.store_device_peak(scope.node, scope);
            *id
        });
        stored.last()
    }

    /// Returns one part of the live blocks, of [`BLOCK_PARTS`](super::BLOCK_PARTS): all of them, or those that were allocated in
    /// a scope. Leaves out blocks that only the driver's view contains.
    pub fn blocks(&self, part: usize, allocated_in: Option<&ScopePeriod>) -> Vec<KnownBlock> {
        self.blocks_of(part, allocated_in, |group| !group.is_of_pool_only() && !group.kind.is_taken_by_driver())
    }

    /// Like [`blocks`](Self::blocks), but with the memory that the driver takes for itself.
    pub fn taken_by_driver(&self, part: usize, taken_in: Option<&ScopePeriod>) -> Vec<KnownBlock> {
        self.blocks_of(part, taken_in, |group| group.kind.is_taken_by_driver())
    }

    fn blocks_of(
        &self,
        part: usize,
        allocated_in: Option<&ScopePeriod>,
        is_listed: impl Fn(&AllocGroup) -> bool,
    ) -> Vec<KnownBlock> {
        let entries = self.live.part(part).filter(|(_, entry)| is_listed(self.sums.groups.get(entry.group())));
        let selected =
            entries.filter(|(_, entry)| allocated_in.is_none_or(|period| self.sums.is_allocated_in(entry, period)));
        selected.map(|(key, entry)| self.sums.known_block(key, entry)).collect()
    }

    /// Returns the blocks of kind [`MemKind::Device`] on a device that are in one of [`BLOCK_PARTS`](super::BLOCK_PARTS) parts.
    pub fn mapped_blocks(&self, part: usize, device: Device) -> impl Iterator<Item = (Key, Bytes)> {
        let is_mapped = move |entry: &Entry| {
            let group = self.sums.groups.get(entry.group());
            group.kind == MemKind::Device && self.sums.device_of(entry) == device
        };
        self.live.part(part).filter(move |(_, entry)| is_mapped(entry)).map(|(key, entry)| (key, entry.bytes))
    }

    /// Returns the live block with this key.
    pub fn block(&self, key: Key) -> Option<KnownBlock> {
        self.live.get(key).map(|entry| self.sums.known_block(key, entry))
    }

    /// Returns the scopes of a path, the outermost first.
    pub fn path(&self, node: NodeId) -> Vec<CallsiteId> {
        self.sums.tree.path(node)
    }

    /// Returns the scopes that a thread is in, the outermost first.
    pub fn path_of(&mut self, thread: ThreadId) -> Vec<CallsiteId> {
        let (node, _) = self.place_of(thread);
        self.path(node)
    }

    /// Returns the path of the scope that a thread entered by the event with this number, if the thread is still in it.
    pub fn path_entered(&self, thread: ThreadId, number: u64) -> Option<Vec<CallsiteId>> {
        let Thread { entered, .. } = self.places.threads.known(thread)?;
        let at = entered.binary_search_by_key(&number, |entered| entered.number).ok()?;
        Some(self.sums.tree.path(entered[at].node))
    }

    /// Returns the scopes around the one with this period, the outermost first.
    pub fn scopes_around(&self, period: &ScopePeriod) -> Vec<CallsiteId> {
        let mut path = period.nodes.last().map(|node| self.sums.tree.path(*node)).unwrap_or_default();
        path.pop();
        path
    }

    /// Keeps the peak of an open scope under the id `under` until it is [released](Sums::release_peak). When a scope closes, the
    /// ledger does this automatically, under the scope's own id. `None` if the scope was not opened with `at_peak`.
    pub fn keep_peak(&mut self, scope: ScopeId, under: ScopeId) -> Option<()> {
        self.sums.flush();
        self.sums.keep(under, self.places.scopes.get(&scope)?)
    }

    /// Returns the period of an open scope until the event with the number `now`.
    pub fn scope_period(&self, scope: ScopeId, now: u64) -> Option<ScopePeriod> {
        let scope = self.places.scopes.get(&scope)?;
        let (nodes, is_task) = (scope.nodes().collect(), scope.is_task());
        Some(ScopePeriod { nodes, owner: Some(scope.owner), is_task, since: scope.number, until: now })
    }
}

impl Sums {
    /// Returns the number of events that were applied or missed so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the statistics of each device on which allocations were observed.
    pub fn stats(&self) -> Vec<DeviceStats> {
        let exact = self.meters.0.iter().filter(|meter| meter.gauge == Gauge::Exact);
        let stats = |Meter { device, on_device, kinds, driver_measured_by, .. }: &Meter| DeviceStats {
            device: *device,
            on_device: *on_device,
            kinds: *kinds,
            driver_measured_by: *driver_measured_by,
        };
        exact.map(stats).collect()
    }

    /// Returns one part of the scope paths, starting at this number, each with its device. Number 0 stands for no path and has no
    /// device. The part is empty after the last path.
    pub fn nodes_from(&mut self, first: usize) -> Vec<(Option<Device>, ScopeNode)> {
        let meters = &self.meters.0;
        let with_device = |node: &ScopeNode| {
            let Some(Meter { device, on_device, peaks, .. }) = meters.get(usize::from(node.meter)) else {
                return (None, *node);
            };
            let mut node = *node;
            if node.parent == NodeId::NONE {
                (node.in_use, node.peak) = (on_device.bytes.current.cast_signed(), peaks.record());
            }
            (Some(*device), node)
        };
        self.tree.nodes(first, PART_LEN).iter().map(with_device).collect()
    }

    /// Returns one part of the groups, from this number on. Leaves out groups without live blocks and groups that only the
    /// driver's view contains. `None` after the last group.
    pub fn groups_from(&mut self, first: usize) -> Option<Vec<GroupUsage>> {
        let usage = |state: &GroupState| GroupUsage {
            device: self.meters.0[usize::from(state.group.meter)].device,
            group: state.group,
            blocks: state.blocks,
            bytes: Bytes::new(state.bytes),
        };
        let part = self.groups.range(first, PART_LEN)?;
        Some(part.iter().filter(|state| state.blocks > 0 && !state.group.is_of_pool_only()).map(usage).collect())
    }

    fn known_block(&self, key: Key, entry: &Entry) -> KnownBlock {
        let group = *self.groups.get(entry.group());
        let device = self.meters.0[usize::from(group.meter)].device;
        let owner = entry.attribution().owner();
        KnownBlock {
            key,
            number: entry.number(),
            thread: self.guests.hosts(owner).last().unwrap_or(owner),
            bytes: entry.bytes,
            device,
            group,
            time: entry.time(),
        }
    }

    fn is_allocated_in(&self, entry: &Entry, period: &ScopePeriod) -> bool {
        let node = self.groups.get(entry.group()).node;
        let owner = entry.attribution().owner();
        let is_of = |period_owner| {
            if period.is_task {
                return self.guests.threads(owner).any(|task| task == period_owner);
            }
            self.guests.hosts(owner).any(|owner| owner == period_owner)
                && period.nodes.iter().any(|outer| self.tree.is_inside(node, *outer))
        };
        (period.since..=period.until).contains(&entry.number()) && period.owner.is_none_or(is_of)
    }
}

impl ScopePeriod {
    /// Returns the same period for the blocks that any thread allocated in any scope.
    #[must_use]
    pub fn of_all_threads(self) -> Self {
        Self { owner: None, ..self }
    }
}
