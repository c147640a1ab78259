//! The data that the ledger keeps for each open scope.

use std::collections::BTreeMap;

use super::{account_id::AccountId, counts::Counts, peaks::WatchedScope, tree::NodeId, watermark::Mark};
use crate::model::{Counted, Gauge, OwnerThread, ScopeId, ScopeSpec, ThreadId};

/// The open scopes. They are ordered, so that they can be read in parts, and boxed, because the map moves its
/// values.
pub(super) type Scopes = BTreeMap<ScopeId, Box<Scope>>;

/// An open scope.
#[derive(Debug)]
pub(super) struct Scope {
    pub(super) spec: ScopeSpec,
    pub(super) meter: u16,
    /// The account that the scope reads; `None` if the scope counts the whole process.
    pub(super) account: Option<AccountId>,
    /// The account that the scope would have, if its numbers are those of the whole device.
    pub(super) whole: Option<AccountId>,
    pub(super) node: NodeId,
    /// The earlier paths of this scope, from before an outer scope was closed first.
    pub(super) previous_nodes: Vec<NodeId>,
    /// The meter of [`Gauge::Exact`](crate::model::Gauge::Exact) on its device.
    pub(super) exact_meter: u16,
    /// The owner thread of its allocations.
    pub(super) owner: OwnerThread,
    /// The thread that opened it.
    pub(super) opener: ThreadId,
    /// The opener's own owner thread. The opener may have ended, and another thread may reuse its number.
    pub(super) own: OwnerThread,
    /// The number of the event that opened it.
    pub(super) number: u64,
    /// The number of the event from which `Trace::allocated_on` starts to look: the opening, or the last reset that was not
    /// between two statements of a function.
    pub(super) devices_since: u64,
    pub(super) start: ScopeStart,
    /// The watch on the scope's peak, if its allocations were requested.
    pub(super) watched: Option<WatchedScope>,
}

impl Scope {
    /// Returns whether the scope counts a task. `false` if there was no owner thread left for the task, which then has no account.
    pub(super) fn is_task(&self) -> bool {
        self.spec.counts == Counted::Task && self.account.is_some()
    }

    /// Returns whether the scope is measured by samples. There is a gap between each sample and the one before.
    pub(super) fn is_sampled(&self) -> bool {
        self.spec.gauge == Gauge::Sampled
    }

    /// Returns the earlier paths of the scope and its current path.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.previous_nodes.iter().copied().chain([self.node])
    }
}

/// The values at the start of a scope, or at its last reset.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScopeStart {
    /// The number of the event.
    pub(super) number: u64,
    pub(super) in_use: i64,
    pub(super) peak: Mark,
    /// The bytes in use on the device by [`Gauge::Exact`](crate::model::Gauge::Exact).
    pub(super) device_in_use: i64,
    /// The peak of the device by [`Gauge::Exact`](crate::model::Gauge::Exact).
    pub(super) device_peak: Mark,
    /// The bytes in use in the driver's view, and its peak.
    pub(super) driver: Option<(i64, Mark)>,
    pub(super) gap: Mark,
    /// The number of earlier samples of the device. The sample at the start of the scope belongs to the scope.
    pub(super) samples_before: u64,
    /// True if the device could not be read at this moment, which can happen at a reset. The values at the start are then not
    /// known.
    pub(super) is_unread: bool,
    pub(super) before: Counts,
}
