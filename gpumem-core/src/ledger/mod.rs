//! The ledger applies events in their order. It keeps the live blocks, the bytes in use and the peak of each open scope. It
//! has no clock, no lock and no I/O, so that a live run and a replayed run give the same figures.

mod adopters;
mod adoption;
mod blocks;
mod counts;
mod delta;
mod events;
mod groups;
mod guests;
mod intervals;
mod kept_peaks;
mod kept_range;
mod live;
mod meters;
mod moved_out;
mod noticed;
mod observer;
mod open_traces;
mod others;
mod own_level;
mod own_scopes;
mod peaks;
mod pending;
mod pool_table;
mod pools;
mod scope;
mod scopes;
mod stats;
mod thread;
mod thread_level;
mod thread_levels;
mod threads;
mod tree;
mod undecided;
mod views;
mod watermark;

use std::collections::{BTreeMap, HashMap};

use self::{
    adopters::Adopters,
    groups::AllocGroups,
    guests::Guests,
    kept_range::KeptRange,
    live::LiveBlocks,
    meters::{Meters, UsageLevel},
    noticed::Watched,
    own_level::OwnScopes,
    pending::PendingDelta,
    pool_table::Pools,
    scope::Scope,
    thread::Thread,
    thread_level::ThreadLevels,
    tree::ScopeTree,
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
use crate::model::{ScopeId, Trace};

/// See the [module](self). The fields from `pending` to `counts` are first, because each event uses them: so an event
/// touches few cache lines.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ledger {
    /// The changes of the newest events, which the tree, the meters and the groups do not have yet.
    pending: PendingDelta,
    /// Indexed by thread number. There are as many as threads ran at the same time.
    threads: Vec<Thread>,
    /// The time of the next allocation, in tenths of a second.
    tenths: u32,
    /// Some scope counts one thread only, or only what is allocated in it, or a budget must know what other threads do.
    has_thread_scopes: bool,
    /// A pool was registered.
    has_pools: bool,
    /// One of the two is so: blocks of the driver are not only counted like the newest ones.
    is_special: bool,
    /// Some block is undecided, or a pool waits for a block; see `undecided.rs`.
    has_open_questions: bool,
    /// Events are passed to a tap as well. The inbox sets it; it is here because each event reads this cache line anyway.
    pub(crate) is_tapped: bool,
    live: LiveBlocks,
    counts: Counts,
    /// How many of the driver's functions other tools have replaced at the moment. They are part of `counts.lost`, and a
    /// scope that opens now reports them as well, because it misses their calls.
    displaced: u64,
    /// The open scopes. Ordered, so that they can be read in parts. Boxed, because the map moves its values.
    scopes: BTreeMap<ScopeId, Box<Scope>>,
    /// The result of the newest query. It is not part of [`apply`](Self::apply)'s return value, so that allocations stay
    /// cheap.
    last_trace: Option<Trace>,
    tree: ScopeTree,
    meters: Meters,
    thread_levels: ThreadLevels,
    /// Nothing is in use. Its peaks have the memory of a level that is no longer needed, for the next one.
    spare_level: UsageLevel,
    /// The scopes that count only what is allocated in them.
    own_scopes: OwnScopes,
    /// Some of them may have counted blocks with lower numbers while they counted the whole process.
    separated_before: u64,
    /// Some budget must know what other threads do.
    watched: Vec<Watched>,
    /// The newest event, if it is such.
    noticed: Option<Noticed>,
    groups: AllocGroups,
    /// How many owner threads were created.
    owner_threads: u32,
    guests: Guests,
    /// Peaks that are read while their scopes go on, or after they are closed.
    kept_peaks: HashMap<ScopeId, KeptRange>,
    pools: Pools,
    adopters: Adopters,
}

#[cfg(test)]
mod tests;
