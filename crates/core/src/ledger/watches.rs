//! The allocations and frees that budgets watch: those that a budget does not count, or those of other threads.

use crate::model::{Bytes, Device, OwnerThread};

/// The allocations and frees on a device that are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noticing {
    /// The allocations of threads other than the watching one that are in no scope of another thread.
    AllocationsOfOthers,
    /// The allocations and frees of threads other than the watching one that are in no scope of it.
    OfOthers,
}

/// An allocation or a free that is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noticed {
    /// The device.
    pub device: Device,
    /// The thread that allocated or freed.
    pub thread: OwnerThread,
    /// The size of the block.
    pub bytes: Bytes,
    /// True if it is a free.
    pub is_free: bool,
    /// True if the thread is in a scope that it opened itself.
    pub is_in_scope: bool,
    /// True if the thread is in a scope that another thread opened, and therefore works for that thread.
    pub is_guest: bool,
}

/// A device that is watched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watched {
    pub(super) id: u64,
    pub(super) meter: u16,
    pub(super) noticing: Noticing,
    /// The thread that watches.
    pub(super) thread: OwnerThread,
}

/// The watches of budgets that depend on other threads.
#[derive(Debug, Default)]
pub(super) struct Watches {
    all: Vec<Watched>,
    /// The last event, if a budget watches for it.
    noticed: Option<Noticed>,
}

impl Watches {
    pub(super) fn add(&mut self, watched: Watched) {
        self.all.push(watched);
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.all.retain(|watched| watched.id != id);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns whether the device of this meter is watched.
    pub(super) fn are_on(&self, meter: u16) -> bool {
        self.all.iter().any(|watched| watched.meter == meter)
    }

    /// Keeps an event on the device of this meter, if a budget watches for it. The thread works for the thread `host`, which may be
    /// itself.
    pub(super) fn notice(&mut self, event: Noticed, meter: u16, host: OwnerThread) {
        let concerns = |watched: &Watched| {
            watched.meter == meter
                && match watched.noticing {
                    Noticing::AllocationsOfOthers => !event.is_free && !event.is_guest && host != watched.thread,
                    Noticing::OfOthers => host != watched.thread,
                }
        };
        if self.all.iter().any(concerns) {
            self.noticed = Some(event);
        }
    }

    /// Takes the last event, if it was noticed.
    pub(super) fn take(&mut self) -> Option<Noticed> {
        self.noticed.take()
    }
}
