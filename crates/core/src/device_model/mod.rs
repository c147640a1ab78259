//! A model of the memory of one GPU. Its behaviour was measured on a real one. It has no clock, no lock and no I/O.
//!
//! The simulated device wraps this model in guards; the stand-in driver of the tests wraps it in the C ABI. Therefore it
//! uses only `std` and counts bytes as `u64`.
//!
//! The amounts are defined as in version 2 of NVML's memory info: `total = free + used + reserved`.

mod blocks;
mod pool;
mod units;

pub use self::units::ModelError;
use self::{
    blocks::{Blocks, addresses},
    pool::StreamPool,
    units::{LARGEST, PAGE, POOL_STEP, add, packed, round_up},
};

/// The memory of one device: blocks, one stream-ordered pool, and the memory of other processes.
#[derive(Debug, Clone)]
pub struct DeviceModel {
    total: u64,
    reserved: u64,
    held: u64,
    blocks: Blocks,
    /// The pages of all blocks of at least a page.
    large_backing: u64,
    /// The sum of all smaller blocks. They share pages, packed without gaps.
    small_bytes: u64,
    pool: StreamPool,
}

impl DeviceModel {
    /// The largest memory of a device. On a larger one, some bytes would not have an address.
    pub const LARGEST: u64 = LARGEST;

    /// Creates a device with no memory in use.
    pub fn new(total: u64) -> Self {
        let [blocks, pooled] = addresses(total);
        Self {
            total,
            reserved: 0,
            held: 0,
            blocks: Blocks::within(blocks),
            large_backing: 0,
            small_bytes: 0,
            pool: StreamPool::within(pooled),
        }
    }

    /// Sets the memory that the driver reserves for itself. It is neither free nor used.
    #[must_use]
    pub fn with_reserved(mut self, bytes: u64) -> Self {
        self.reserved = bytes.min(self.total);
        self
    }

    /// Returns the end of the device's addresses.
    pub fn addresses_end(&self) -> u64 {
        let [_, pooled] = addresses(self.total);
        pooled.end
    }

    /// Returns the total memory of the device.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns all pages in use, as NVML shows them. This is more than the sum of the requested bytes.
    pub fn used(&self) -> u64 {
        self.held + self.large_backing + self.small_backing() + self.pool.reserved
    }

    /// Returns the memory that is not in use.
    pub fn free(&self) -> u64 {
        self.total - self.reserved - self.used()
    }

    /// Returns the memory that the driver reserves for itself.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Allocates like `cuMemAlloc`. Like a real driver, it reuses the address of the last freed block of this size.
    ///
    /// # Errors
    /// Returns an error if `bytes` is 0, or if less memory is free.
    pub fn alloc(&mut self, bytes: u64) -> Result<u64, ModelError> {
        if bytes == 0 {
            return Err(ModelError::ZeroBytes);
        }
        let growth = if bytes < PAGE {
            round_up(self.small_bytes + packed(bytes)?, PAGE)? - self.small_backing()
        } else {
            round_up(bytes, PAGE)?
        };
        if growth > self.free() {
            return Err(ModelError::OutOfMemory);
        }
        let address = self.blocks.insert(bytes)?;
        if bytes < PAGE {
            self.small_bytes += packed(bytes)?;
        } else {
            self.large_backing += growth;
        }
        Ok(address)
    }

    /// Frees like `cuMemFree`: the memory is free immediately. Returns the requested bytes.
    ///
    /// # Errors
    /// Returns an error if no live block starts at this address.
    pub fn free_block(&mut self, address: u64) -> Result<u64, ModelError> {
        let bytes = self.blocks.remove(address)?;
        if bytes < PAGE {
            self.small_bytes -= packed(bytes)?;
        } else {
            self.large_backing -= round_up(bytes, PAGE)?;
        }
        Ok(bytes)
    }

    /// Allocates like `cuMemAllocAsync` from the device's pool. The model has one stream.
    ///
    /// # Errors
    /// Returns an error if `bytes` is 0, or if less memory is free.
    pub fn alloc_async(&mut self, bytes: u64) -> Result<u64, ModelError> {
        if bytes == 0 {
            return Err(ModelError::ZeroBytes);
        }
        let pool = &self.pool;
        let used = add(pool.used, bytes)?;
        // Memory that was freed in stream order can be reused in stream order, even without a synchronization.
        let freed = pool.freed.saturating_sub(bytes);
        let backing = round_up(add(used, freed)?, POOL_STEP)?;
        if backing.saturating_sub(pool.reserved) > self.free() {
            return Err(ModelError::OutOfMemory);
        }
        let address = self.pool.blocks.insert(bytes)?;
        self.pool.used = used;
        self.pool.freed = freed;
        self.pool.reserved = self.pool.reserved.max(backing);
        self.pool.used_high = self.pool.used_high.max(used);
        self.pool.reserved_high = self.pool.reserved_high.max(self.pool.reserved);
        Ok(address)
    }

    /// Frees like `cuMemFreeAsync`: the usage of the pool falls immediately, and its backing stays. Returns the requested
    /// bytes.
    ///
    /// # Errors
    /// Returns an error if no live block starts at this address.
    pub fn free_async(&mut self, address: u64) -> Result<u64, ModelError> {
        let bytes = self.pool.blocks.remove(address)?;
        self.pool.used -= bytes;
        self.pool.freed += bytes;
        Ok(bytes)
    }

    /// Waits for all work: unused backing above the release threshold is returned to the device.
    pub fn synchronize(&mut self) {
        self.pool.freed = 0;
        self.pool.shrink_to(self.pool.release_threshold);
    }

    /// Trims like `cuMemPoolTrimTo`. Memory that was freed since the last synchronization may still be used by work in
    /// flight, so it is not returned.
    pub fn trim_to(&mut self, keep: u64) {
        self.pool.shrink_to(keep);
    }

    /// Returns the bytes in use in the pool.
    pub fn pool_used(&self) -> u64 {
        self.pool.used
    }

    /// Returns the backing of the pool.
    pub fn pool_reserved(&self) -> u64 {
        self.pool.reserved
    }

    /// Returns the highest usage of the pool since the last reset.
    pub fn pool_used_high(&self) -> u64 {
        self.pool.used_high
    }

    /// Returns the largest backing of the pool since the last reset.
    pub fn pool_reserved_high(&self) -> u64 {
        self.pool.reserved_high
    }

    /// Sets the high-water mark to the current usage.
    pub fn reset_pool_used_high(&mut self) {
        self.pool.used_high = self.pool.used;
    }

    /// Sets the high-water mark to the current backing.
    pub fn reset_pool_reserved_high(&mut self) {
        self.pool.reserved_high = self.pool.reserved;
    }

    /// Returns the unused backing that a synchronization leaves to the pool; 0 by default.
    pub fn pool_release_threshold(&self) -> u64 {
        self.pool.release_threshold
    }

    /// Sets the release threshold.
    pub fn set_pool_release_threshold(&mut self, bytes: u64) {
        self.pool.release_threshold = bytes;
    }

    /// Uses memory that is not a block of this process, such as a context or another process.
    ///
    /// # Errors
    /// Returns an error if less memory is free.
    pub fn hold(&mut self, bytes: u64) -> Result<(), ModelError> {
        if bytes > self.free() {
            return Err(ModelError::OutOfMemory);
        }
        self.held += bytes;
        Ok(())
    }

    /// Frees memory that [`hold`](Self::hold) uses; at most all of it.
    pub fn release(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }

    /// Frees all blocks, as the end of a context does.
    pub fn clear(&mut self) {
        let (total, reserved, held) = (self.total, self.reserved, self.held);
        *self = Self { held, ..Self::new(total).with_reserved(reserved) };
    }

    /// Returns the start and size of the live block that contains this address, like `cuMemGetAddressRange`.
    pub fn block_at(&self, address: u64) -> Option<(u64, u64)> {
        self.blocks.containing(address).or_else(|| self.pool.blocks.containing(address))
    }

    fn small_backing(&self) -> u64 {
        self.small_bytes.next_multiple_of(PAGE)
    }
}

#[cfg(test)]
mod tests;
