//! The ledger applies events in order. It keeps the live blocks, the bytes in use and the peak of each open scope. The ledger has
//! no clock, no lock and no I/O, so a live run and a replayed run give the same results.

mod account_id;
mod accounts;
mod adopters;
mod adoption;
mod allocated_on;
mod blocks;
mod counts;
mod delta;
mod events;
mod groups;
mod guests;
mod intervals;
mod kept_peaks;
mod live;
mod meters;
mod observer;
mod peaks;
mod pending;
mod places;
mod pool_events;
mod pool_sums;
mod pools;
mod scope;
mod scopes;
mod stats;
mod sums;
mod thread;
mod threads;
mod traces;
mod tree;
mod undecided;
mod views;
mod watches;
mod watermark;

pub use self::{
    counts::{Counts, PART_LEN},
    groups::AllocGroup,
    intervals::{DevicePeaks, PeakInterval},
    kept_peaks::{GroupAtPeak, PeakTotal},
    live::BLOCK_PARTS,
    meters::DeviceStats,
    observer::{BlockChange, BlockChangeKind, Observer},
    pools::{KnownPool, WrongCalls},
    stats::Stat,
    sums::Sums,
    tree::{NodeId, ScopeNode},
    views::{GroupUsage, KnownBlock, ScopePeriod},
    watches::{Noticed, Noticing},
};
use self::{
    live::{Entry, LiveBlocks},
    places::Places,
    pools::Pools,
    watches::{Watched, Watches},
};
use crate::model::{Device, Gauge, ThreadId};

/// See the [module](self). An event is applied to one part after the other. Each event reads the list of threads, which `places` ends
/// with, the two flags, and the first fields of `live`. They are in one cache line; a test compares their offsets.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ledger {
    /// What the events add up to.
    sums: Sums,
    /// The threads, and the open scopes that they are in.
    places: Places,
    fast_path: FastPath,
    /// True if events are passed to a tap as well. The inbox sets this flag. It is stored here because each event reads this
    /// cache line anyway.
    pub(crate) is_tapped: bool,
    live: LiveBlocks,
    pools: Pools,
    watches: Watches,
}

/// The allocations and frees that may take the fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FastPath {
    #[default]
    All,
    /// A pool was registered, so blocks of the driver need more work.
    OnlyParts,
    /// A budget watches other threads.
    Closed,
}

impl Ledger {
    /// Updates what depends on the pools and the watches, but must be in the cache line that each event reads.
    fn update_fast_path(&mut self) {
        self.fast_path = match (self.watches.is_empty(), self.pools.is_empty()) {
            (false, _) => FastPath::Closed,
            (true, false) => FastPath::OnlyParts,
            (true, true) => FastPath::All,
        };
    }

    /// Returns whether parts of pools may take the fast path.
    #[inline]
    fn has_fast_parts(&self) -> bool {
        self.fast_path != FastPath::Closed && !self.pools.has_undecided()
    }

    /// Returns the sums of all events so far.
    pub fn sums(&mut self) -> &mut Sums {
        self.sums.flush();
        &mut self.sums
    }

    /// Starts a thread that reuses the id of an ended thread.
    pub fn start_thread(&mut self, thread: ThreadId) {
        self.places.threads.start(thread);
    }

    /// Returns whether the thread's name is needed to find who adopts its allocations and is not known yet.
    pub fn needs_name(&mut self, thread: ThreadId) -> bool {
        self.places.needs_name(thread)
    }

    /// Starts to [notice](Self::noticed) these allocations and frees on the device. While a watch exists, events are counted one
    /// by one.
    pub fn watch(&mut self, id: u64, device: Device, noticing: Noticing, thread: ThreadId) {
        let meter = self.sums.meters.index(device, Gauge::Exact);
        let thread = self.places.threads.get(thread).own;
        self.watches.add(Watched { id, meter, noticing, thread });
        self.update_fast_path();
    }

    /// Ends the [`watch`](Self::watch) with this id.
    pub fn unwatch(&mut self, id: u64) {
        self.watches.remove(id);
        self.update_fast_path();
    }

    /// Takes the last event, if it was noticed.
    #[inline]
    pub fn noticed(&mut self) -> Option<Noticed> {
        if self.fast_path == FastPath::Closed { self.watches.take() } else { None }
    }

    /// Notes that `thread` allocated or freed this block, if a budget watches its device.
    #[cold]
    fn notice(&mut self, entry: &Entry, is_free: bool, thread: ThreadId) {
        let group = *self.sums.groups.get(entry.group());
        if !group.is_in_program() || !self.watches.are_on(group.meter) {
            return;
        }
        let own = self.places.threads.get(thread).own;
        let (node, owner) = if is_free { self.place_of(thread) } else { (group.node, entry.attribution().owner()) };
        let Sums { guests, tree, .. } = &self.sums;
        // A thread in a scope that another thread opened works for that thread.
        let host = guests.hosts(owner).last().unwrap_or(owner);
        let (device, is_in_scope) = (self.sums.device_of(entry), tree.is_in_scope(node));
        let event = Noticed { device, thread: own, bytes: entry.bytes, is_free, is_in_scope, is_guest: host != own };
        self.watches.notice(event, group.meter, host);
    }
}

#[cfg(test)]
mod tests;
