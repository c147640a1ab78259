//! Where a block is.

/// The address of a block, and the bytes that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The id that the allocator needs to free the block.
    pub(super) block: u32,
}
