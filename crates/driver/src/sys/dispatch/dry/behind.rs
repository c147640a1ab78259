//! The memory behind dry addresses.
//!
//! Code on the GPU may use a dry address that gpumem does not see, for example through a table that a kernel has written. Such an access
//! must not end the program. Therefore blocks of physical memory are mapped behind all dry addresses, the same ones again and again: they
//! take 126 MiB at most, and what is written there has no meaning. On an H100, a block of 64 MiB behind 1 TiB takes 0.6 s.
//!
//! A real block has its own memory behind such an address.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys;
use once_cell::sync::Lazy;

use super::{
    cards,
    places::PAGE,
    state::{inside, may_be_dry, memory},
    work::clear,
};

/// The largest block. The driver maps only whole blocks, so there is one block of each power of two from a page to this size.
const LARGEST: u64 = 64 << 20;

/// `CU_MEM_LOCATION_TYPE_DEVICE`
const DEVICE: u64 = 1;

static BEHIND: Lazy<Mutex<Behind>> = Lazy::new(Mutex::default);

#[derive(Default)]
struct Behind {
    /// The handle of each block, by the device and the size. `None` if the GPU has too little memory for it.
    blocks: BTreeMap<(u64, u64), Option<u64>>,
    /// The size of each mapping, by its address.
    mapped: BTreeMap<u64, u64>,
}

fn behind() -> MutexGuard<'static, Behind> {
    BEHIND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps memory behind addresses that were reserved in whole pages. If the GPU does not have a page for it, an access still faults.
pub(super) fn put(address: u64, bytes: u64, device: u32) {
    if let Ok(location) = location_of(device) {
        behind().fill(address..address + bytes, location);
    }
}

/// Returns the location of a GPU's memory, as the driver numbers it.
fn location_of(device: u32) -> Result<u64, u32> {
    cards::location_on_driver(u64::from(device) << 32 | DEVICE)
}

/// Makes memory usable that was just mapped at these addresses.
#[allow(clippy::cast_possible_truncation, reason = "a size is as wide as `usize` on these targets")]
fn allow_access(range: Range<u64>, location: u64) -> bool {
    // `CUmemAccessDesc`: the location, and the flags for reading and writing.
    let access = [location, 3];
    let bytes = (range.end - range.start) as usize;
    // SAFETY: gpumem has mapped these addresses, and the descriptor is as long as the struct.
    inside(|| unsafe { sys::cuMemSetAccess(range.start, bytes, access.as_ptr().cast(), 1) }).result().is_ok()
}

/// Maps new memory at the place of a block instead of the memory that is behind it. Returns whether the GPU has enough.
pub(super) fn put_own(address: u64, bytes: u64, device: u32) -> bool {
    let Ok(location) = location_of(device) else { return false };
    let Some(block) = create(bytes, location) else { return false };
    let own = address..address + bytes;
    // No other thread may place a block nearby while the memory around this one is unmapped.
    let mut behind = behind();
    let around = behind.unmap(own.clone());
    let is_usable = behind.map_block(own.start, bytes, block) && allow_access(own.clone(), location);
    // SAFETY: the block was just created. Without the handle, it lives as long as the mapping.
    _ = inside(|| unsafe { sys::cuMemRelease(block) });
    if is_usable {
        behind.fill(around.start..own.start, location);
        behind.fill(own.end..around.end, location);
    } else {
        behind.unmap(own);
        behind.fill(around, location);
    }
    is_usable
}

/// Unmaps a block's own memory.
pub(super) fn put_back(address: u64, bytes: u64, device: u32) {
    let mut behind = behind();
    let around = behind.unmap(address..address + bytes);
    if let Ok(location) = location_of(device) {
        behind.fill(around, location);
    }
}

/// Returns the bytes that the blocks take on a device.
pub(super) fn taken(device: u32) -> u64 {
    let location = cards::location_on_driver(u64::from(device) << 32 | DEVICE);
    let is_there = |((on, _), handle): &(&(u64, u64), &Option<u64>)| Ok(*on) == location && handle.is_some();
    behind().blocks.iter().filter(is_there).map(|((_, bytes), _)| bytes).sum()
}

/// Returns whether this address belongs to a dry block that was freed.
pub(super) fn is_freed(address: u64) -> bool {
    let is_behind =
        || behind().mapped.range(..=address).next_back().is_some_and(|(start, size)| address - start < *size);
    may_be_dry(address) && memory().backing(address).is_none() && is_behind()
}

/// Unmaps the memory behind these addresses, which the program unmaps.
pub(super) fn take_away(address: u64, bytes: u64) {
    behind().unmap(address..address + bytes);
}

impl Behind {
    /// Maps shared blocks behind a range that has no memory. Each is the largest one that fits.
    fn fill(&mut self, range: Range<u64>, location: u64) {
        let (mut at, mut new) = (range.start, Vec::new());
        while let Some((size, is_new)) = self.map(at, range.end - at, location) {
            new.extend(is_new.then_some((at, size)));
            at += size;
        }
        if at > range.start {
            allow_access(range.start..at, location);
        }
        for (at, size) in new {
            clear(at, size);
        }
    }

    /// Unmaps all blocks that overlap a range, because the driver unmaps only whole blocks. Returns the range that has no memory afterwards:
    /// the given one, or a larger one.
    #[allow(clippy::cast_possible_truncation, reason = "a size is as wide as `usize` on these targets")]
    fn unmap(&mut self, range: Range<u64>) -> Range<u64> {
        let mapped = self.mapped.range(..range.end).rev().map(|(at, size)| (*at, *size));
        let mapped = mapped.take_while(|(at, size)| at + size > range.start).collect::<Vec<_>>();
        mapped.into_iter().fold(range, |around, (at, size)| {
            self.mapped.remove(&at);
            // SAFETY: this module has mapped the block. Any other dry block in the range gets memory again.
            _ = inside(|| unsafe { sys::cuMemUnmap(at, size as usize) });
            around.start.min(at)..around.end.max(at + size)
        })
    }

    /// Maps the largest shared block that fits. Returns its size, and whether its content is not yet known.
    fn map(&mut self, at: u64, bytes: u64, location: u64) -> Option<(u64, bool)> {
        let sizes = (0..).map(|half| LARGEST >> half).take_while(|size| *size >= PAGE);
        for size in sizes.filter(|size| *size <= bytes) {
            let is_new = !self.blocks.contains_key(&(location, size));
            let block = *self.blocks.entry((location, size)).or_insert_with(|| create(size, location));
            if block.is_some_and(|block| self.map_block(at, size, block)) {
                return Some((size, is_new));
            }
        }
        None
    }

    #[allow(clippy::cast_possible_truncation, reason = "a size is as wide as `usize` on these targets")]
    fn map_block(&mut self, at: u64, bytes: u64, block: u64) -> bool {
        // SAFETY: the range was reserved for a dry block, nothing is mapped there, and the block has this size.
        let mapped = inside(|| unsafe { sys::cuMemMap(at, bytes as usize, 0, block, 0) }).result();
        if mapped.is_ok() {
            self.mapped.insert(at, bytes);
        }
        mapped.is_ok()
    }
}

#[allow(clippy::cast_possible_truncation, reason = "a size is as wide as `usize` on these targets")]
fn create(bytes: u64, location: u64) -> Option<u64> {
    // `CUmemAllocationProp`: pinned memory without handles for other processes, the location, and flags.
    let (properties, mut handle) = ([1_u64, location, 0, 0], 0);
    // SAFETY: the out-parameter is live, and the properties are as long as the struct.
    let created =
        inside(|| unsafe { sys::cuMemCreate(&raw mut handle, bytes as usize, properties.as_ptr().cast(), 0) });
    created.result().ok().map(|()| handle)
}
