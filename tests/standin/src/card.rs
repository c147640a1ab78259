//! The GPUs, with their settings and their memory.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard};

use crate::config::{Card, Config};
use crate::driver::lock;
use crate::pages::Pages;
use crate::taken::{Purpose, Taken};
use gpumem_core::device_model::{DeviceModel, ModelError};

/// One GPU.
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
    /// The UUID of the slice, if the GPU is split.
    pub(crate) mig: Option<Uuid>,
    memory: Mutex<Memory>,
}

impl Gpu {
    pub(crate) fn new(index: usize, card: Card, config: &Config) -> Result<Self, ModelError> {
        let mig = config.mig;
        let mut whole = DeviceModel::new(card.total).with_reserved(card.reserved);
        whole.hold(card.used)?;
        Ok(Self {
            name: format!("Stand-in GPU {index}"),
            uuid: Uuid::new(*b"stand-in gpu", index),
            mig: mig.then(|| Uuid::new(*b"stand-in mig", index)),
            memory: Mutex::new(Memory {
                whole,
                slice: mig.then(|| DeviceModel::new(card.total / 2)),
                others: card.used,
                retained: 0,
                taken: Taken::default(),
                pages: config.driver_memory.then(Pages::default),
                owners: HashMap::new(),
                pools: BTreeMap::new(),
                mapped: (0, 0),
            }),
        })
    }

    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }
}

/// The memory of a GPU.
pub(crate) struct Memory {
    whole: DeviceModel,
    slice: Option<DeviceModel>,
    /// The memory of other processes. It is not in the slice.
    others: u64,
    /// The memory that the driver took by itself.
    taken: Taken,
    /// The pages of blocks outside of pools, if they are counted by address. Otherwise, the model counts them.
    pages: Option<Pages>,
    /// The number of references to the primary context; it exists while this is not 0.
    pub(crate) retained: u32,
    /// The context with which each block ends.
    owners: HashMap<u64, usize>,
    /// The pools other than the default one, by the number in their addresses.
    pools: BTreeMap<u64, ExtraPool>,
    /// The number of bytes mapped for memory nodes of graphs, and its highest value.
    mapped: (u64, u64),
}

/// A pool that the program created. Its model has the size of the GPU and contains one pool. The GPU holds the memory
/// of this pool.
struct ExtraPool {
    model: DeviceModel,
    /// True if the pool was destroyed. It exists until its last block is freed.
    dying: bool,
}

/// A GPU's addresses: its model's, and above them the created pools'.
const POOLED_ADDRESSES: u64 = 0x7800_0000_0000;
const POOL_SPAN: u64 = 1 << 38;
const MOST_POOLS: u64 = 31;

/// Returns the pool that contains an address of the GPU, and the address in that pool's model.
fn pool_and_place(address: u64) -> (u64, u64) {
    let pool = address.checked_sub(POOLED_ADDRESSES).map_or(0, |above| above / POOL_SPAN);
    (pool, address - pool * POOL_SPAN)
}

impl Memory {
    /// Returns the part that CUDA uses: the slice, if the GPU is split.
    pub(crate) fn cuda(&mut self) -> &mut DeviceModel {
        self.slice.as_mut().unwrap_or(&mut self.whole)
    }

    /// Returns the model that contains this pool's blocks. Number 0 means the default pool and for all blocks
    /// outside of pools.
    pub(crate) fn pool(&mut self, pool: u64) -> Option<&mut DeviceModel> {
        if pool == 0 { Some(self.cuda()) } else { Some(&mut self.pools.get_mut(&pool)?.model) }
    }

    /// Changes a pool, and with it the memory that the GPU holds for the pool.
    pub(crate) fn in_pool<T>(
        &mut self,
        pool: u64,
        act: impl FnOnce(&mut DeviceModel) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        if pool == 0 {
            return act(self.cuda());
        }
        let extra = self.pools.get_mut(&pool).ok_or(ModelError::UnknownAddress)?;
        let before = extra.model.pool_reserved();
        let outcome = act(&mut extra.model);
        if extra.dying && extra.model.pool_used() == 0 {
            extra.model.synchronize();
            extra.model.trim_to(0);
        }
        let after = extra.model.pool_reserved();
        if extra.dying && after == 0 {
            self.pools.remove(&pool);
        }
        self.cuda().release(before.saturating_sub(after));
        self.cuda().hold(after.saturating_sub(before))?;
        outcome
    }

    /// Maps memory for graphs, up to this number of bytes in total.
    pub(crate) fn map_for_graphs(&mut self, bytes: u64) -> Result<(), ModelError> {
        let (mapped, most) = self.mapped;
        if bytes > mapped {
            self.cuda().hold(bytes - mapped)?;
            self.mapped = (bytes, most.max(bytes));
        }
        Ok(())
    }

    /// Reduces the memory mapped for graphs to this number of bytes.
    pub(crate) fn unmap_for_graphs(&mut self, bytes: u64) {
        let (mapped, most) = self.mapped;
        if bytes < mapped {
            self.cuda().release(mapped - bytes);
            self.mapped = (bytes, most);
        }
    }

    pub(crate) fn reset_mapped_high(&mut self) {
        self.mapped.1 = self.mapped.0;
    }

    pub(crate) fn mapped_for_graphs(&self) -> (u64, u64) {
        self.mapped
    }

    /// Returns the number of the pool that contains an address of the GPU; 0 is the default pool. `None` if the address
    /// is in no pool.
    pub(crate) fn pool_at(address: u64) -> Option<u64> {
        (address >= POOLED_ADDRESSES).then(|| pool_and_place(address).0)
    }

    /// Returns the context in which a block was allocated.
    pub(crate) fn owner_of(&self, address: u64) -> usize {
        self.owners.get(&address).copied().unwrap_or(0)
    }

    pub(crate) fn create_pool(&mut self) -> Result<u64, ModelError> {
        let number = (1..=MOST_POOLS).find(|number| !self.pools.contains_key(number)).ok_or(ModelError::OutOfMemory)?;
        let model = DeviceModel::new(self.cuda().total());
        self.pools.insert(number, ExtraPool { model, dying: false });
        Ok(number)
    }

    pub(crate) fn destroy_pool(&mut self, pool: u64) {
        if let Some(extra) = self.pools.get_mut(&pool) {
            extra.dying = true;
        }
        // This call only removes the pool if it is destroyed and empty.
        _ = self.in_pool(pool, |_| Ok(()));
    }

    /// Allocates outside of pools.
    pub(crate) fn alloc(&mut self, bytes: u64, owner: usize) -> Result<u64, ModelError> {
        let model = self.slice.as_mut().unwrap_or(&mut self.whole);
        let address = match &mut self.pages {
            Some(pages) => pages.alloc(model, bytes)?,
            None => model.alloc(bytes)?,
        };
        self.owners.insert(address, owner);
        Ok(address)
    }

    pub(crate) fn alloc_in_pool(&mut self, pool: u64, bytes: u64, owner: usize) -> Result<u64, ModelError> {
        let before = self.pools.get(&pool).map(|extra| extra.model.clone());
        let outcome = self.in_pool(pool, |model| model.alloc_async(bytes));
        if let (Err(_), Some(before), Some(extra)) = (&outcome, before, self.pools.get_mut(&pool)) {
            // The GPU may not have had enough free memory for the pool.
            extra.model = before;
        }
        let address = outcome? + pool * POOL_SPAN;
        self.owners.insert(address, owner);
        Ok(address)
    }

    /// Frees a block in stream order, if it is in a pool.
    pub(crate) fn free_async(&mut self, address: u64) -> Result<(), ModelError> {
        let (pool, place) = pool_and_place(address);
        self.in_pool(pool, |model| model.free_async(place))?;
        self.owners.remove(&address);
        Ok(())
    }

    /// Frees any block immediately.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), ModelError> {
        let model = self.slice.as_mut().unwrap_or(&mut self.whole);
        let freed = match &mut self.pages {
            Some(pages) => pages.free(model, address),
            None => model.free_block(address).map(drop),
        };
        if freed.is_err() {
            self.free_async(address)?;
            self.synchronize();
        }
        self.owners.remove(&address);
        Ok(())
    }

    /// Returns the block that an address points into.
    pub(crate) fn block_at(&mut self, address: u64) -> Option<(u64, u64)> {
        if let Some(pages) = self.pages.as_ref().filter(|_| Self::pool_at(address).is_none()) {
            return pages.block_at(address);
        }
        let (pool, place) = pool_and_place(address);
        let (start, bytes) = self.pool(pool)?.block_at(place)?;
        Some((start + pool * POOL_SPAN, bytes))
    }

    pub(crate) fn synchronize(&mut self) {
        self.cuda().synchronize();
        for pool in self.pools.keys().copied().collect::<Vec<_>>() {
            _ = self.in_pool(pool, |model| {
                model.synchronize();
                Ok(())
            });
        }
    }

    /// Frees all blocks of a context that ends.
    pub(crate) fn end(&mut self, owner: usize) {
        let ending = self.owners.iter().filter(|(_, block_owner)| **block_owner == owner).map(|(address, _)| *address);
        for address in ending.collect::<Vec<_>>() {
            // Each block is live, because other blocks have no owner.
            _ = self.free(address);
        }
        self.synchronize();
        let model = self.slice.as_mut().unwrap_or(&mut self.whole);
        self.taken.end(model, owner);
    }

    /// Gives back the memory that the pools keep.
    pub(crate) fn empty_pools(&mut self) {
        self.cuda().trim_to(0);
        for pool in self.pools.keys().copied().collect::<Vec<_>>() {
            _ = self.in_pool(pool, |model| {
                model.trim_to(0);
                Ok(())
            });
        }
    }

    /// Takes memory for the driver: the total for this purpose in this context is then `bytes`.
    pub(crate) fn take(&mut self, purpose: Purpose, bytes: u64) -> Result<(), ModelError> {
        let model = self.slice.as_mut().unwrap_or(&mut self.whole);
        self.taken.set(model, purpose, bytes)
    }

    pub(crate) fn taken(&self, purpose: Purpose) -> u64 {
        self.taken.bytes(purpose)
    }

    /// Returns the memory that NVML counts for this process. `None` if the process has no context.
    pub(crate) fn used_by_process(&mut self) -> Option<u64> {
        let others = if self.slice.is_some() { 0 } else { self.others };
        let not_its = others + self.taken.of_device();
        self.taken.has_context().then(|| self.cuda().used() - not_its)
    }

    /// Takes more memory for other processes, if it is free.
    pub(crate) fn grow_others(&mut self, bytes: u64) {
        _ = self.set_others(self.others.saturating_add(bytes));
    }

    /// Sets the memory of other processes.
    pub(crate) fn set_others(&mut self, bytes: u64) -> Result<(), ModelError> {
        self.whole.release(self.others);
        let outcome = self.whole.hold(bytes);
        match outcome {
            Ok(()) => self.others = bytes,
            // This memory was free just now.
            Err(_) => self.whole.hold(self.others)?,
        }
        outcome
    }

    /// Returns NVML's values for the slice, or for the whole GPU.
    pub(crate) fn memory_info(&self, slice: bool) -> MemoryInfo {
        let of = |model: &DeviceModel| MemoryInfo {
            total: model.total(),
            free: model.free(),
            used: model.used(),
            reserved: model.reserved(),
        };
        let whole = of(&self.whole);
        match &self.slice {
            Some(model) if slice => of(model),
            // The memory that the slice uses also counts as used on the GPU.
            Some(model) => MemoryInfo { used: whole.used + model.used(), free: whole.free - model.used(), ..whole },
            None => whole,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryInfo {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
    pub(crate) reserved: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

impl Uuid {
    fn new(kind: [u8; 12], index: usize) -> Self {
        let mut bytes = [0; 16];
        bytes[..12].copy_from_slice(&kind);
        bytes[15] = u8::try_from(index).unwrap_or(u8::MAX);
        Self(bytes)
    }

    /// Returns the UUID as NVML and `CUDA_VISIBLE_DEVICES` write it: `GPU-7374616e-642d-696e-2067-707500000000`.
    pub(crate) fn spelled(self, prefix: &str) -> String {
        let mut text = prefix.to_owned();
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            _ = write!(text, "{dash}{byte:02x}");
        }
        text
    }
}
