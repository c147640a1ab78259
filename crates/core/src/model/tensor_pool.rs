use super::Bytes;

/// A pool that divides memory of the driver among tensors.
pub trait TensorPool {
    /// The pool holds this block of the driver, which it may have taken before gpumem recorded blocks.
    fn has_block(&self, address: u64, size: Bytes);
    /// A tensor was allocated. The size is that of its block, which may be larger than the request.
    fn allocated(&self, address: u64, size: Bytes);
    /// A tensor was freed.
    fn freed(&self, address: u64);
    /// The allocator now holds this much memory of the driver.
    fn set_reserved(&self, size: Bytes);
}
