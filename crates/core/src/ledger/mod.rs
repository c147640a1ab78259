//! The ledger applies events in their order. It keeps the live blocks, the bytes in use and the peak of each open scope. It
//! has no clock, no lock and no I/O, so that a live run and a replayed run give the same figures.

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
mod moved_out;
mod noticed;
mod observer;
mod others;
mod peaks;
mod pending;
mod pool_table;
mod pools;
mod scope;
mod scopes;
mod stats;
mod thread;
mod threads;
mod tree;
mod undecided;
mod views;
mod watermark;

use std::collections::{BTreeMap, HashMap};

use self::{
    accounts::Accounts, adopters::Adopters, allocated_on::AllocatedOn, groups::AllocGroups, guests::Guests,
    live::LiveBlocks, meters::Meters, noticed::Watched, peaks::KeptRange, pending::PendingDelta, pool_table::Pools,
    scope::Scope, thread::Thread, tree::ScopeTree,
};
pub use self::{
    counts::{Counts, PART_LEN},
    groups::AllocGroup,
    intervals::{DevicePeaks, PeakInterval},
    kept_peaks::{GroupAtPeak, PeakTotal},
    live::BLOCK_PARTS,
    meters::DeviceStats,
    noticed::{Noticed, Noticing},
    observer::{BlockChange, BlockChangeKind, Observer},
    pool_table::{KnownPool, WrongCalls},
    stats::Stat,
    tree::{NodeId, ScopeNode},
    views::{GroupUsage, KnownBlock, ScopePeriod},
};
use crate::model::{NumberHashBuilder, OwnerThread, ScopeId, Trace};

/// See the [module](self). The fields from `pending` to `counts` are first, because each event uses them: so an event
/// touches few cache lines.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ledger {
    /// The changes of the newest events that the tree, the meters and the groups do not have yet.
    pending: PendingDelta,
    /// The threads by their number. There are as many as ran at the same time.
    threads: Vec<Thread>,
    /// The time of the next allocation, in tenths of a second.
    tenths: u32,
    /// True if a budget must know of other threads.
    is_watched: bool,
    /// True if a pool was registered.
    has_pools: bool,
    /// True if one of the two fields above is true: blocks of the driver are not only counted like the newest ones.
    is_special: bool,
    /// True if events are passed to a tap as well. The inbox sets it. It is here because each event reads this cache line
    /// anyway.
    pub(crate) is_tapped: bool,
    live: LiveBlocks,
    counts: Counts,
    /// The number of the driver's functions that other tools have replaced at the moment. They are part of
    /// `counts.lost`, and a scope that opens now reports them as well, because it misses their calls.
    displaced: u64,
    /// The open scopes. They are ordered, so that they can be read in parts, and boxed, because the map moves its
    /// values.
    scopes: BTreeMap<ScopeId, Box<Scope>>,
    /// The devices on which each open task allocated.
    tasks: HashMap<OwnerThread, AllocatedOn, NumberHashBuilder>,
    /// The result of the newest query. It is not part of [`apply`](Self::apply)'s return value, so that allocations stay
    /// cheap.
    last_trace: Option<Trace>,
    tree: ScopeTree,
    /// The number of the event that reset the summary last.
    summary_since: u64,
    meters: Meters,
    accounts: Accounts,
    /// The watches of budgets that must know of other threads.
    watched: Vec<Watched>,
    /// The newest event, if a budget must know of it.
    noticed: Option<Noticed>,
    groups: AllocGroups,
    /// The number of owner threads that were created.
    owner_threads: u32,
    guests: Guests,
    /// The peaks that are read while their scopes stay open, or after they are closed.
    kept_peaks: HashMap<ScopeId, KeptRange>,
    pools: Pools,
    adopters: Adopters,
}

#[cfg(test)]
mod tests;
