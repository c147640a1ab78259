//! Watched allocations and frees, and the threads that watch for them.

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
