use super::Bytes;

/// A pool that divides memory of the driver among tensors.
pub trait TensorPool {
    /// The pool has this block of the driver. It may have taken it before gpumem saw any.
    fn has_block(&self, address: u64, size: Bytes);
    /// A tensor was allocated. The size contains what the allocator has added to the request.
    fn allocated(&self, address: u64, size: Bytes);
    /// A tensor was freed.
    fn freed(&self, address: u64);
    /// The allocator now holds this much memory of the driver.
    fn set_reserved(&self, size: Bytes);
}
