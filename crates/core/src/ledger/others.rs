//! Notices the allocations and frees that a budget watches: those that it does not count, or those of other threads.

use super::{
    Ledger,
    groups::AllocGroup,
    live::Entry,
    noticed::{Noticed, Noticing, Watched},
};
use crate::model::{Device, Gauge, ThreadId};

impl Ledger {
    /// Starts to [notice](Self::noticed) these allocations and frees on the device. While a watch exists, events are counted one
    /// by one.
    pub fn watch(&mut self, id: u64, device: Device, noticing: Noticing, thread: ThreadId) {
        let meter = self.meters.index(device, Gauge::Exact);
        let thread = self.thread(thread).own;
        self.watched.push(Watched { id, meter, noticing, thread });
        self.update_is_special();
    }

    /// Ends the [`watch`](Self::watch) with this id.
    pub fn unwatch(&mut self, id: u64) {
        self.watched.retain(|watched| watched.id != id);
        self.update_is_special();
    }

    pub(super) fn update_is_special(&mut self) {
        self.is_watched = !self.watched.is_empty();
        self.is_special = self.is_watched || self.has_pools;
    }

    /// Takes the last event, if it was noticed.
    #[inline]
    pub fn noticed(&mut self) -> Option<Noticed> {
        // The flag is on a cache line that each event reads anyway.
        if self.is_watched { self.noticed.take() } else { None }
    }

    /// Notes that `thread` allocated or freed this block.
    #[cold]
    pub(super) fn notice(&mut self, entry: &Entry, is_free: bool, thread: ThreadId) {
        let group = *self.groups.get(entry.group());
        let AllocGroup { meter, node, .. } = group;
        if !group.is_in_program() || self.watched.iter().all(|watched| watched.meter != meter) {
            return;
        }
        let own = self.thread(thread).own;
        let (node, owner) = if is_free { self.place_of(thread) } else { (node, entry.attribution().owner()) };
        let Self { guests, watched, tree, .. } = self;
        // A thread in a scope that another thread opened works for that thread.
        let host = guests.hosts(owner).last().unwrap_or(owner);
        let concerns = |watched: &Watched| {
            watched.meter == meter
                && match watched.noticing {
                    Noticing::AllocationsOfOthers => !is_free && host == own && own != watched.thread,
                    Noticing::OfOthers => host != watched.thread,
                }
        };
        if watched.iter().any(concerns) {
            let is_in_scope = tree.is_in_scope(node);
            let device = self.meters.0[usize::from(meter)].device;
            let bytes = entry.bytes;
            self.noticed = Some(Noticed { device, thread: own, bytes, is_free, is_in_scope, is_guest: host != own });
        }
    }
}
