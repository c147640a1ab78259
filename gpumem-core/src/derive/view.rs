//! What reports ask of a ledger.

use crate::{
    inbox::{Inbox, Primitives, Tap},
    ledger::{Counts, DeviceStats, GroupAtPeak, GroupUsage, KnownBlock, PeakTotal, ScopeNode, ScopePeriod},
    model::{Device, Key, ScopeId},
};

/// An [`Inbox`], whatever it is built of.
pub trait LedgerView: Send + Sync {
    /// What was observed so far.
    fn counts(&self) -> Counts;
    /// What the allocators of each device have done.
    fn stats(&self) -> Vec<DeviceStats>;
    /// The tree of scopes. A node stands after its parent.
    fn nodes(&self) -> Vec<(Option<Device>, ScopeNode)>;
    /// What is live, by where it comes from.
    fn groups(&self) -> Vec<GroupUsage>;
    /// The live block with this key.
    fn block(&self, key: Key) -> Option<KnownBlock>;
    /// The live blocks: all, or what was allocated within a scope.
    fn blocks(&self, within: Option<&ScopePeriod>) -> Vec<KnownBlock>;
    /// Keeps which groups make the peak of an open scope, under a number of its own: false if that is not known.
    fn keep_peak(&self, scope: ScopeId, under: ScopeId) -> bool;
    /// As [`keep_peak`](Self::keep_peak), of the most that was live on a device.
    fn keep_device_peak(&self, device: Device, under: ScopeId) -> bool;
    /// A kept peak, and the groups that it is made of.
    fn kept_peak(&self, under: ScopeId) -> Option<(PeakTotal, Vec<GroupAtPeak>)>;
    /// A kept peak is not needed any more.
    fn release_peak(&self, under: ScopeId);
}

impl<T: Tap, P: Primitives> LedgerView for Inbox<T, P>
where
    Self: Send + Sync,
{
    fn counts(&self) -> Counts {
        self.counts()
    }

    fn stats(&self) -> Vec<DeviceStats> {
        self.stats()
    }

    fn nodes(&self) -> Vec<(Option<Device>, ScopeNode)> {
        self.nodes()
    }

    fn groups(&self) -> Vec<GroupUsage> {
        self.groups()
    }

    fn block(&self, key: Key) -> Option<KnownBlock> {
        self.block(key)
    }

    fn blocks(&self, within: Option<&ScopePeriod>) -> Vec<KnownBlock> {
        self.blocks(within)
    }

    fn keep_peak(&self, scope: ScopeId, under: ScopeId) -> bool {
        self.keep_peak(scope, under)
    }

    fn keep_device_peak(&self, device: Device, under: ScopeId) -> bool {
        self.keep_device_peak(device, under)
    }

    fn kept_peak(&self, under: ScopeId) -> Option<(PeakTotal, Vec<GroupAtPeak>)> {
        self.kept_peak(under)
    }

    fn release_peak(&self, under: ScopeId) {
        self.release_peak(under);
    }
}
