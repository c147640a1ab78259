//! An allocation or a free that is noticed, and who wants to know of it.

use crate::model::{Bytes, Device, OwnerThread};

/// Which allocations and frees on a device are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noticing {
    /// The allocations of threads that are not the one that began to watch, nor in a scope of another thread.
    AllocationsOfOthers,
    /// What threads allocate and free that are not the one that began to watch, nor in a scope of it.
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
    /// It is a free.
    pub is_free: bool,
    /// The thread is in a scope that it opened itself.
    pub is_in_scope: bool,
    /// The thread is in a scope that another thread opened, and works for that one.
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
