//! The units of memory on a device, and the errors of the model.

/// The size of a page: `used` changes in steps of this size.
pub(super) const PAGE: u64 = 2 << 20;
/// The backing of a stream-ordered pool changes in steps of this size.
pub(super) const POOL_STEP: u64 = 32 << 20;
/// Each address is a multiple of this.
pub(super) const ALIGNMENT: u64 = 512;
/// The largest device that has an address for each byte: its addresses are below 2^57, where user space ends.
pub(super) const LARGEST: u64 = 1 << 54;

/// The reason why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelError {
    /// The operation needs more memory than is free.
    OutOfMemory,
    /// No live block starts at this address.
    UnknownAddress,
    /// 0 bytes were requested. CUDA calls this an invalid value.
    ZeroBytes,
}

/// Returns the size of a block with its alignment.
pub(super) fn packed(bytes: u64) -> Result<u64, ModelError> {
    round_up(bytes, ALIGNMENT)
}

pub(super) fn add(a: u64, b: u64) -> Result<u64, ModelError> {
    a.checked_add(b).ok_or(ModelError::OutOfMemory)
}

pub(super) fn round_up(bytes: u64, step: u64) -> Result<u64, ModelError> {
    bytes.checked_next_multiple_of(step).ok_or(ModelError::OutOfMemory)
}
