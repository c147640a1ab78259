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
use crate::model::{NumberHashBuilder, OwnerThread, ScopeId};

/// See the [module](self). The fields from `pending` to `counts` come first because each event uses them. This way an event
/// touches few cache lines.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ledger {
    /// The changes of the latest events, not yet applied to the tree, the meters and the groups.
    pending: PendingDelta,
    /// The threads, indexed by thread number. There are as many as ever ran at the same time.
    threads: Vec<Thread>,
    /// The time of the next allocation, in tenths of a second.
    tenths: u32,
    /// True if a budget watches other threads.
    is_watched: bool,
    /// True if a pool was registered.
    has_pools: bool,
    /// True if one of the two fields above is true. Driver blocks then need more work than the fast path does.
    is_special: bool,
    /// True if events are passed to a tap as well. The inbox sets this flag. It is stored here because each event reads this
    /// cache line anyway.
    pub(crate) is_tapped: bool,
    live: LiveBlocks,
    counts: Counts,
    /// The number of the driver's functions that other tools have replaced at the moment. They are part of `counts.lost`. A scope
    /// that opens while they are replaced reports them as well, because it misses their calls.
    displaced: u64,
    /// The open scopes. They are ordered, so that they can be read in parts, and boxed, because the map moves its
    /// values.
    scopes: BTreeMap<ScopeId, Box<Scope>>,
    /// The devices on which each open task allocated.
    tasks: HashMap<OwnerThread, AllocatedOn, NumberHashBuilder>,
    tree: ScopeTree,
    /// The number of the event that reset the summary last.
    summary_since: u64,
    meters: Meters,
    accounts: Accounts,
    /// The watches of budgets that depend on other threads.
    watched: Vec<Watched>,
    /// The last event, if a budget watches for it.
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
