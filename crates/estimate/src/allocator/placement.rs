//! The interface of the models of allocators.

/// The address of a block, and the bytes that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The id that the allocator needs to free the block.
    pub(super) block: u32,
}

/// A model of an allocator.
pub(crate) trait Allocator: std::fmt::Debug {
    /// Allocates a block. `None` if there is not enough memory.
    fn alloc(&mut self, bytes: u64) -> Option<Placement>;

    fn free(&mut self, placement: Placement);

    /// Returns the most memory that the allocator held from the driver.
    fn reserved_peak(&self) -> u64;
}
