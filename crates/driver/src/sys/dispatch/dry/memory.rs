//! Keeps account of a program's allocations on GPUs that are smaller or larger than the real ones, and of blocks without memory.
//!
//! This module has no lock and calls nothing. The functions of the driver are in `functions`.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use super::{
    contents::{Content, Contents},
    places::{PAGE, Places},
    shared::{Shared, number_of},
};
use crate::{
    device_model::{DeviceModel, ModelError},
    settings::CONTEXT,
};

/// The backing of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// The driver has allocated memory for the block.
    Real,
    /// The block has memory, which gpumem has mapped among the addresses of dry blocks.
    Placed,
    /// The block has no memory. It is a range of addresses that must not be read or written.
    Dry,
    /// The driver allocates memory for the block when it is touched. Kernels do not touch it.
    Managed,
}

impl Backing {
    /// Returns whether the driver does not know the block.
    pub(super) fn is_ours(self) -> bool {
        matches!(self, Self::Dry | Self::Placed)
    }

    /// Returns whether kernels and copies may use the memory.
    pub(super) fn is_real(self) -> bool {
        matches!(self, Self::Real | Self::Placed)
    }
}

/// A block at an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) backing: Backing,
    pub(super) device: u32,
    pub(super) context: u64,
    /// The id of a dry block, in the order of allocation.
    pub(super) number: u64,
    /// The address in the model of the GPU; `None` if the block takes no memory there.
    model: Option<u64>,
    is_pooled: bool,
}

impl Block {
    /// Returns the size of the block with the rest of its last page, if that belongs to it.
    fn taken(&self) -> u64 {
        if self.backing.is_ours() { self.bytes.next_multiple_of(PAGE) } else { self.bytes }
    }
}

/// Physical memory that a program maps itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Physical {
    pub(super) bytes: u64,
    pub(super) device: u32,
    pub(super) is_dry: bool,
    /// The words of the handle's `CUmemAllocationProp`.
    pub(super) properties: [u64; 4],
    /// True if the memory belongs to another process: it then does not count for this process on the GPU.
    is_imported: bool,
    references: u32,
    mappings: u32,
}

/// Physical memory that is mapped at an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) handle: u64,
    pub(super) backing: Backing,
}

/// All memory of the process.
#[derive(Debug)]
pub(super) struct ProcessMemory {
    /// The total memory of each GPU.
    card: u64,
    cards: BTreeMap<u32, DeviceModel>,
    /// The memory of other processes on the same GPUs.
    shared: Option<Shared>,
    pub(super) blocks: BTreeMap<u64, Block>,
    pub(super) physical: HashMap<u64, Physical>,
    pub(super) mapped: BTreeMap<u64, Mapping>,
    pub(super) places: Places,
    /// The places of addresses that the program reserves.
    pub(super) program_places: Places,
    /// The memory that is held for the driver itself, by device, if it was measured.
    driver: BTreeMap<u32, u64>,
    /// The bytes of real blocks, by device.
    real: BTreeMap<u32, u64>,
    /// The number of allocations and frees of real memory that have started, and of those that have ended.
    started: u64,
    ended: u64,
    contents: Contents,
    /// The size and the context of pinned blocks, by address.
    pub(super) pinned: BTreeMap<u64, (u64, u64)>,
    /// The number of dry blocks and dry handles so far.
    dry: u64,
}

/// A part of a GPU's memory, reserved for a block that does not have its address yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    device: u32,
    model: u64,
    is_pooled: bool,
}

impl ProcessMemory {
    pub(super) fn new(card: u64, shared: Option<Shared>) -> Self {
        let (cards, blocks, physical, mapped, driver) = Default::default();
        let (places, program_places) = (Places::OF_BLOCKS, Places::OF_PROGRAM);
        Self {
            card,
            cards,
            shared,
            blocks,
            physical,
            mapped,
            places,
            program_places,
            driver,
            real: BTreeMap::new(),
            started: 0,
            ended: 0,
            contents: Contents::default(),
            pinned: BTreeMap::new(),
            dry: 0,
        }
    }

    /// Runs `action` with the model of a GPU, which gets a context if it has none. The model does not contain the memory of other
    /// processes.
    pub(super) fn on_card<T>(&mut self, device: u32, action: impl FnOnce(&mut DeviceModel) -> T) -> T {
        let size = self.card;
        let card = self.cards.entry(device).or_insert_with(|| {
            let mut model = DeviceModel::new(size);
            // On a GPU that is smaller than a context, nothing is left.
            _ = model.hold(CONTEXT.get().min(size));
            model
        });
        let done = action(card);
        if let Some(shared) = &self.shared {
            shared.publish(number_of(device), card.used());
        }
        done
    }

    /// Returns the free and the total memory of a GPU.
    pub(super) fn free_and_total(&mut self, device: u32) -> (u64, u64) {
        self.forget_ended();
        let (free, total) = self.on_card(device, |card| (card.free(), card.total()));
        (free.saturating_sub(self.others(device)), total)
    }

    /// Returns the memory of this process on a GPU.
    #[cfg(feature = "capture")]
    pub(super) fn used(&self, device: u32) -> u64 {
        self.cards.get(&device).map_or(0, DeviceModel::used)
    }

    fn others(&self, device: u32) -> u64 {
        self.shared.map_or(0, |shared| shared.others(number_of(device)))
    }

    fn forget_ended(&self) -> bool {
        self.shared.is_some_and(|shared| shared.forget_ended())
    }

    /// Reserves a part of a GPU's memory that no process uses.
    fn take<T: Copy>(
        &mut self,
        device: u32,
        take: impl Fn(&mut DeviceModel) -> Result<T, ModelError>,
        release: impl Fn(&mut DeviceModel, T),
    ) -> Result<T, ModelError> {
        let attempt = |memory: &mut Self| {
            let others = memory.others(device);
            let taken = memory.on_card(device, |card| {
                let others = others.min(card.free());
                card.hold(others)?;
                let taken = take(card);
                card.release(others);
                taken
            })?;
            // Another process may have taken the same part at the same time. Then both may fail, but they never both succeed. If no other
            // process has taken anything, the block uses memory that this process already held.
            let is_left = memory.on_card(device, |card| card.free()) >= memory.others(device);
            if is_left || memory.others(device) == others {
                return Ok(taken);
            }
            memory.on_card(device, |card| release(card, taken));
            Err(ModelError::OutOfMemory)
        };
        match attempt(self) {
            Err(ModelError::OutOfMemory) if self.forget_ended() => attempt(self),
            attempted => attempted,
        }
    }

    /// Returns a place on the card for a block.
    pub(super) fn grant(&mut self, device: u32, bytes: u64, is_pooled: bool) -> Result<Grant, ModelError> {
        let take = |card: &mut DeviceModel| if is_pooled { card.alloc_async(bytes) } else { card.alloc(bytes) };
        let model = self.take(device, take, |card, model| end_block(card, model, is_pooled))?;
        Ok(Grant { device, model, is_pooled })
    }

    /// Releases the reservation, because the driver did not allocate the block.
    pub(super) fn withdraw(&mut self, Grant { device, model, is_pooled }: Grant) {
        self.on_card(device, |card| end_block(card, model, is_pooled));
    }

    /// Adds a block. `grant` is `None` for memory that is not on a GPU.
    pub(super) fn insert(
        &mut self,
        address: u64,
        bytes: u64,
        backing: Backing,
        context: u64,
        device: u32,
        grant: Option<Grant>,
    ) {
        self.dry += u64::from(backing.is_ours());
        let (model, is_pooled) = (grant.map(|grant| grant.model), grant.is_some_and(|grant| grant.is_pooled));
        let block = Block { bytes, backing, device, context, number: self.dry, model, is_pooled };
        if backing.is_real() {
            *self.real.entry(device).or_default() += block.taken();
            self.contents.forget(address..address + bytes);
        }
        if let Some(older) = self.blocks.insert(address, block) {
            self.withdraw_block(address, older);
        }
    }

    /// Returns the real block or mapping that contains this address.
    fn real_block(&self, address: u64) -> Option<Range<u64>> {
        let block = self.block_at(address).map(|(start, block)| (start, *block));
        let (start, block) = block.or_else(|| self.mapped_as_block(address))?;
        block.backing.is_real().then_some(start..start + block.bytes)
    }

    /// Returns what is known about this address. `None` if it is not in real memory.
    pub(super) fn content(&self, address: u64) -> Option<Content> {
        Some(self.contents.at(self.real_block(address)?.start, address))
    }

    /// Returns what is known about a range as a whole. `None` if it is not in real memory.
    pub(super) fn content_of(&self, range: Range<u64>) -> Option<Content> {
        Some(self.contents.of_range(self.real_block(range.start)?.start, range))
    }

    /// Sets what is known from an address on, if it is in real memory.
    pub(super) fn set_content(&mut self, address: u64, content: Content) {
        if self.real_block(address).is_some() {
            self.contents.set(address, content);
        }
    }

    /// Sets what is known about a range. Returns false if it is not in real memory.
    pub(super) fn set_contents(&mut self, range: Range<u64>, content: Content) -> bool {
        let block = self.real_block(range.start);
        block.map(|block| self.contents.set_range(&block, range, content)).is_some()
    }

    /// Returns the bytes of blocks and handles on a device that have their own memory.
    pub(super) fn taken(&self, device: u32) -> u64 {
        let handles = self.physical.values().filter(|physical| physical.device == device && !physical.is_dry);
        let bytes = self.real.get(&device).copied().unwrap_or(0);
        bytes.next_multiple_of(PAGE) + handles.map(|physical| physical.bytes).sum::<u64>()
    }

    /// Holds as much memory of a device as the driver takes for itself. Before the first call, it is that of a context.
    pub(super) fn set_driver_memory(&mut self, device: u32, bytes: u64) {
        let before = self.driver.get(&device).copied();
        let held = self.on_card(device, |card| {
            let before = before.unwrap_or_else(|| CONTEXT.get().min(card.total()));
            card.release(before.saturating_sub(bytes));
            // On a full GPU, the driver returns an error to the program.
            let more = bytes.saturating_sub(before).min(card.free());
            _ = card.hold(more);
            before.min(bytes) + more
        });
        self.driver.insert(device, held);
    }

    /// Returns the bytes of real blocks.
    pub(super) fn real(&self) -> u64 {
        self.real.values().sum()
    }

    /// Counts an allocation or a free of real memory that starts. Until it ends, the driver and the account may differ.
    pub(super) fn start_change(&mut self) {
        self.started += 1;
    }

    /// Counts its end.
    pub(super) fn end_change(&mut self) {
        self.ended += 1;
    }

    /// Returns the number of changes so far. `None` while one is being made.
    pub(super) fn changes(&self) -> Option<u64> {
        (self.started == self.ended).then_some(self.ended)
    }

    /// Removes a block. Returns `None` if it is not known.
    pub(super) fn remove(&mut self, address: u64) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        self.withdraw_block(address, block);
        Some(block)
    }

    /// Releases what a block has taken that was at this address.
    pub(super) fn withdraw_block(&mut self, address: u64, block: Block) {
        let Block { bytes, backing, device, model, is_pooled, .. } = block;
        if backing.is_real() {
            let real = self.real.entry(device).or_default();
            *real = real.saturating_sub(block.taken());
            self.contents.forget(address..address + bytes);
        }
        if backing.is_ours() {
            self.places.release(address, bytes);
        }
        if let Some(model) = model {
            self.withdraw(Grant { device, model, is_pooled });
        }
    }

    /// Returns the addresses of a context's blocks that gpumem has placed.
    pub(super) fn placed_of(&self, context: u64) -> Vec<u64> {
        let is_placed = |block: &Block| block.context == context && block.backing == Backing::Placed;
        self.blocks.iter().filter(|(_, block)| is_placed(block)).map(|(address, _)| *address).collect()
    }

    /// Removes all blocks of a context that has ended.
    pub(super) fn remove_all_of(&mut self, context: u64) {
        // A pool outlives the context.
        let gone = |(_, block): &(&u64, &Block)| block.context == context && !block.is_pooled;
        let gone: Vec<_> = self.blocks.iter().filter(gone).map(|(at, _)| *at).collect();
        for address in gone {
            self.remove(address);
        }
    }

    /// Returns a new handle for dry physical memory. No handle of the driver has the same highest bits.
    pub(super) fn dry_handle(&mut self) -> u64 {
        self.dry += 1;
        0xd5 << 56 | self.dry
    }

    /// Reserves this much physical memory of the GPU, and returns whether enough was free.
    pub(super) fn hold(&mut self, device: u32, bytes: u64) -> bool {
        let bytes = bytes.next_multiple_of(PAGE);
        self.take(device, |card| card.hold(bytes), |card, ()| card.release(bytes)).is_ok()
    }

    /// Releases memory that [`hold`](Self::hold) reserved.
    pub(super) fn release_held(&mut self, device: u32, bytes: u64) {
        self.on_card(device, |card| card.release(bytes.next_multiple_of(PAGE)));
    }

    pub(super) fn create(&mut self, handle: u64, bytes: u64, device: u32, is_dry: bool, properties: [u64; 4]) {
        let (is_imported, references, mappings) = (false, 1, 0);
        let physical = Physical { bytes, device, is_dry, properties, is_imported, references, mappings };
        self.physical.insert(handle, physical);
    }

    /// Adds dry physical memory of another process. Returns its handle.
    pub(super) fn import(&mut self, bytes: u64, device: u32, properties: [u64; 4]) -> u64 {
        let handle = self.dry_handle();
        self.create(handle, bytes, device, true, properties);
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.is_imported = true;
        }
        handle
    }

    /// Adds a reference to a handle. Returns whether the handle is known.
    pub(super) fn retain(&mut self, handle: u64) -> bool {
        self.physical.get_mut(&handle).map(|physical| physical.references += 1).is_some()
    }

    pub(super) fn release(&mut self, handle: u64) {
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.references = physical.references.saturating_sub(1);
            self.end_unused(handle);
        }
    }

    /// Returns whether the program has a reference to a handle.
    pub(super) fn has_reference(&self, handle: u64) -> bool {
        self.physical.get(&handle).is_some_and(|physical| physical.references > 0)
    }

    /// Returns whether all of a handle can be mapped to these addresses.
    pub(super) fn can_map(&self, address: u64, bytes: u64, handle: u64) -> bool {
        let is_whole = self.physical.get(&handle).is_some_and(|physical| physical.bytes == bytes);
        let end = address.checked_add(bytes).filter(|_| address != 0 && address.is_multiple_of(PAGE));
        let before = end.and_then(|end| self.mapped.range(..end).next_back());
        let is_free = before.is_none_or(|(start, mapping)| start + mapping.bytes <= address);
        is_whole && end.is_some() && is_free && self.has_reference(handle)
    }

    pub(super) fn map(&mut self, address: u64, bytes: u64, handle: u64) {
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.mappings += 1;
            let backing = if physical.is_dry { Backing::Dry } else { Backing::Real };
            self.mapped.insert(address, Mapping { bytes, handle, backing });
        }
    }

    /// Returns the mappings that start in a range.
    pub(super) fn mapped_in(&self, address: u64, bytes: u64) -> Vec<(u64, Mapping)> {
        let range = self.mapped.range(address..address.saturating_add(bytes));
        range.map(|(address, mapping)| (*address, *mapping)).collect()
    }

    pub(super) fn unmap(&mut self, address: u64) {
        if let Some(mapping) = self.mapped.remove(&address) {
            self.contents.forget(address..address + mapping.bytes);
            if let Some(physical) = self.physical.get_mut(&mapping.handle) {
                physical.mappings = physical.mappings.saturating_sub(1);
            }
            self.end_unused(mapping.handle);
        }
    }

    /// Frees the memory if it has no references and no mappings.
    fn end_unused(&mut self, handle: u64) {
        if let Some(physical) =
            self.physical.get(&handle).copied().filter(|physical| physical.references == 0 && physical.mappings == 0)
        {
            self.physical.remove(&handle);
            if !physical.is_imported {
                self.release_held(physical.device, physical.bytes);
            }
        }
    }

    /// Makes pools release their unused memory, because all work is done.
    pub(super) fn synchronize(&mut self) {
        let devices: Vec<_> = self.cards.keys().copied().collect();
        for device in devices {
            self.on_card(device, DeviceModel::synchronize);
        }
    }

    /// Returns the block that contains this address, and its start address. A block that the driver does not know includes all addresses of
    /// its last page.
    pub(super) fn block_at(&self, address: u64) -> Option<(u64, &Block)> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        (address < start + block.taken()).then_some((*start, block))
    }

    /// Returns the mapping that contains this address.
    pub(super) fn mapped_around(&self, address: u64) -> Option<Mapping> {
        let (start, mapping) = self.mapped.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some(*mapping)
    }

    /// Returns the mapping that contains this address as a block, and its start address.
    pub(super) fn mapped_as_block(&self, address: u64) -> Option<(u64, Block)> {
        let (start, Mapping { bytes, handle, backing }) = self.mapped.range(..=address).next_back()?;
        let device = self.physical.get(handle)?.device;
        let block = Block {
            bytes: *bytes,
            backing: *backing,
            device,
            context: 0,
            number: handle & u64::MAX >> 8,
            model: None,
            is_pooled: false,
        };
        (address - start < *bytes).then_some((*start, block))
    }

    /// Returns the backing of this address, and whether all of these bytes are in one block or in adjacent mappings. Returns `None` if the
    /// address is not known.
    pub(super) fn around(&self, address: u64, bytes: u64) -> Option<(Backing, bool)> {
        if let Some((start, block)) = self.block_at(address) {
            return Some((block.backing, bytes <= (start + block.bytes).saturating_sub(address)));
        }
        let backing = self.mapped_around(address)?.backing;
        let mut end = address;
        while let Some((start, mapping)) = self.mapped.range(..=end).next_back()
            && end - start < mapping.bytes
            && end - address < bytes
        {
            end = start + mapping.bytes;
        }
        Some((backing, bytes <= end - address))
    }

    /// Returns the number of dry blocks and handles so far.
    pub(super) fn dry_so_far(&self) -> u64 {
        self.dry
    }

    /// Returns the backing of this address in blocks and mappings. Returns `None` if the address is not known, because it is on the host or
    /// belongs to other memory.
    pub(super) fn backing(&self, address: u64) -> Option<Backing> {
        let block = self.block_at(address).map(|(_, block)| block.backing);
        block.or_else(|| self.mapped_around(address).map(|mapping| mapping.backing))
    }

    /// Returns the device of the block or mapping that contains this address.
    pub(super) fn device_of(&self, address: u64) -> Option<u32> {
        let block = self.block_at(address).map(|(_, block)| block.device);
        block.or_else(|| Some(self.mapped_as_block(address)?.1.device))
    }
}

fn end_block(card: &mut DeviceModel, model: u64, is_pooled: bool) {
    _ = if is_pooled { card.free_async(model) } else { card.free_block(model) };
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, sync::atomic::AtomicU64};

    use super::{super::shared::SHARED_WORDS, *};

    impl ProcessMemory {
        fn free(&mut self) -> u64 {
            self.free_and_total(0).0
        }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn physical_memory_lives_while_it_is_mapped_or_referred_to() {
        let mut memory = ProcessMemory::new(1024 * MIB, None);
        let handle = memory.dry_handle();
        assert!(memory.hold(0, 20 * MIB) && !memory.hold(0, 1024 * MIB));
        memory.create(handle, 20 * MIB, 0, true, [0; 4]);
        let can_map = |memory: &ProcessMemory, address, bytes| memory.can_map(address, bytes, handle);
        let wrong = [(64, 22), (64, 18), (0, 20)].map(|(at, mib)| can_map(&memory, at * MIB, mib * MIB));
        assert_eq!(
            (wrong, can_map(&memory, 64 * MIB + 4096, 20 * MIB), can_map(&memory, u64::MAX - PAGE + 1, 20 * MIB)),
            ([false; 3], false, false)
        );
        assert!(can_map(&memory, 64 * MIB, 20 * MIB));
        memory.map(64 * MIB, 20 * MIB, handle);
        let other = [44, 46, 64, 82, 84].map(|at| can_map(&memory, at * MIB, 20 * MIB));
        assert_eq!(other, [true, false, false, false, true], "mappings do not overlap");
        assert!(memory.retain(handle) && !memory.retain(1));
        memory.release(handle);
        assert!(memory.has_reference(handle));
        memory.release(handle);
        assert!(!memory.has_reference(handle) && !can_map(&memory, 84 * MIB, 20 * MIB));
        assert_eq!(memory.free(), 477 * MIB);
        assert_eq!(memory.backing(84 * MIB - 1), Some(Backing::Dry));
        assert_eq!(memory.mapped_in(60 * MIB, 5 * MIB).len(), 1);
        // A copy may reach from one mapping into the next.
        let next = memory.dry_handle();
        memory.create(next, 2 * MIB, 0, true, [0; 4]);
        memory.map(84 * MIB, 2 * MIB, next);
        let is_inside = |bytes| memory.around(70 * MIB, bytes) == Some((Backing::Dry, true));
        assert_eq!([14 * MIB, 16 * MIB, 16 * MIB + 1, u64::MAX].map(is_inside), [true, true, false, false]);
        memory.unmap(84 * MIB);
        memory.unmap(64 * MIB);
        assert_eq!((memory.free(), memory.backing(64 * MIB)), (497 * MIB, None));
    }

    #[test]
    fn what_the_driver_takes_comes_back() {
        let mut memory = ProcessMemory::new(1024 * MIB, None);
        let frees = [527, 600, 2000, 600, 520].map(|mib| {
            memory.set_driver_memory(0, mib * MIB);
            memory.free() / MIB
        });
        assert_eq!(frees, [497, 424, 0, 424, 504]);
    }

    #[test]
    fn processes_share_a_card() {
        let words = (0..SHARED_WORDS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak();
        // The process with the number 3 has ended.
        let process = |number| ProcessMemory::new(2048 * MIB, Shared::join(words, number, |owner| owner != 3));
        let (mut one, mut other, mut ended) = (process(2), process(4), process(3));
        // Each has a context.
        assert_eq!([one.free(), other.free(), one.free()], [1521 * MIB, 994 * MIB, 994 * MIB]);
        let grant = one.grant(0, 600 * MIB, true).unwrap();
        assert_eq!(other.grant(0, 400 * MIB, false).unwrap_err(), ModelError::OutOfMemory);
        // A pool grows in steps of 32 MiB.
        assert!(!other.hold(0, 388 * MIB) && other.hold(0, 386 * MIB));
        assert_eq!([one.free(), other.free()], [0, 0]);
        one.withdraw(grant);
        one.synchronize();
        assert_eq!(other.free(), 608 * MIB);
        _ = ended.on_card(0, |card| card.hold(500 * MIB));
        assert!(other.grant(0, 600 * MIB, false).is_ok(), "what an ended process had is free");
        // Both take the last 8 MiB at the same moment.
        assert_eq!(one.free(), 8 * MIB);
        let second = RefCell::new(other);
        let take = |card: &mut DeviceModel| {
            second.borrow_mut().on_card(0, |card| card.hold(8 * MIB))?;
            card.hold(8 * MIB)
        };
        assert_eq!(one.take(0, take, |card, ()| card.release(8 * MIB)), Err(ModelError::OutOfMemory));
    }
}
