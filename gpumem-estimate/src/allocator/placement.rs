//! Where blocks lie.

/// Where a block is, and how many bytes it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// What the allocator needs to free it.
    pub(super) block: u32,
}
