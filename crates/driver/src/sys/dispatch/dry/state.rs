//! The state that the functions share: the account, the driver below them, and the kinds of addresses.

use std::{
    cell::Cell,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use cudarc::driver::sys;
use once_cell::sync::{Lazy, OnceCell};

use super::{
    cards,
    contents::Content,
    memory::{Block, Physical, ProcessMemory},
    mode::{MODE, Mode, OBSERVER, is_dry_run},
    places::PAGE,
    shared::{self, Shared},
};
use crate::{model::Bytes, sys::cuda};

pub(super) const SUCCESS: u32 = 0;
pub(super) const CUDA_ERROR_INVALID_VALUE: u32 = 1;
pub(super) const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;
pub(super) const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

/// Makes a call of the program on the real driver.
pub(super) type Real<'a> = &'a dyn Fn() -> u32;

static MEMORY: Lazy<Mutex<ProcessMemory>> = Lazy::new(|| Mutex::new(ProcessMemory::new(card(), SHARED.get().copied())));

/// The slot of this process, if it shares its GPUs with others.
pub(super) static SHARED: OnceCell<Shared> = OnceCell::new();

/// The range of all dry addresses since the process started. Most words are outside this range, so checking them needs no lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// The same for real memory.
static LOWEST_REAL: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST_REAL: AtomicU64 = AtomicU64::new(0);

/// The same for pinned memory.
static LOWEST_PINNED: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST_PINNED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// True while the thread is in a driver function that one of ours has called. Calls made by that function are the driver's own.
    pub(super) static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Makes a driver call. Calls through other slots during it count as the driver's own.
pub(super) fn inside<T>(call: impl FnOnce() -> T) -> T {
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            IS_INSIDE.set(self.0);
        }
    }

    let _restore = Restore(IS_INSIDE.replace(true));
    call()
}

/// Locks the account. The lock is held for a few steps, and never during a driver call.
pub(super) fn memory() -> MutexGuard<'static, ProcessMemory> {
    number_devices();
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The UUIDs of the devices, without `GPU-` or `MIG-`, in an order that all processes of a run share. Processes number the devices
/// differently if their `CUDA_VISIBLE_DEVICES` differ.
static DEVICES: OnceCell<Vec<String>> = OnceCell::new();

/// Sets the UUIDs by which processes share the devices.
#[cfg(feature = "capture")]
pub(super) fn share_by_uuid(devices: Vec<String>) {
    _ = DEVICES.set(devices);
}

/// Determines once which of these devices the process uses.
fn number_devices() {
    let Some(devices) = DEVICES.get().filter(|_| !cards::are_simulated()) else { return };
    if shared::are_numbered() || IS_INSIDE.get() {
        return;
    }
    // Before `cuInit` has returned, the driver cannot be queried.
    let Ok(own) = inside(cuda::initialised_devices) else { return };
    let place = |at: usize, uuid: String| devices.iter().position(|device| *device == uuid).unwrap_or(at);
    let places = own.into_iter().enumerate().map(|(at, device)| place(at, device.uuid()));
    shared::number(places.filter_map(|place| u32::try_from(place).ok()).collect());
}

/// Returns the memory of this process on a GPU.
#[cfg(feature = "capture")]
pub(super) fn used_here(card: u32) -> u64 {
    Lazy::get(&MEMORY).map_or(0, |_| memory().used(card))
}

/// Returns the total memory of each GPU.
pub(super) fn card() -> u64 {
    let real = || {
        let mut bytes = 0;
        // SAFETY: the out-parameter is live. Without a device, the call fails.
        inside(|| unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, 0) }).result().map_or(0, |()| bytes as u64)
    };
    match MODE.get() {
        Some(Mode::Dry { card: Some(card), .. }) => card.get(),
        // A limit cannot exceed the memory of the real GPU.
        Some(Mode::Limit { card }) => card.get().min(real()),
        _ => real(),
    }
}

/// The part of a dry run's memory that is real.
#[derive(Clone, Copy, Debug)]
struct RealPart {
    /// The size of the largest real block.
    largest: u64,
    /// The size of all of them.
    all: u64,
}

/// Does not change after the first block.
static REAL_PART: OnceCell<RealPart> = OnceCell::new();

/// Blocks of up to this size are always real, because PyTorch's segments for small tensors have it.
pub(super) const ALWAYS_REAL: u64 = 2 << 20;

/// Unless the user chooses it, the largest real block is this part of the GPU's free memory, and at most [`MOST_REAL`].
const REAL_OF_FREE: u64 = 64;

/// cuBLAS allocates 128.25 MiB for itself (on an H200). If that was dry, cuSOLVER's kernels, which use it, would be skipped, and its results
/// would be errors.
const MOST_REAL: u64 = 160 << 20;

/// Returns the part of a dry run's memory that is real. `None` if the GPU's memory cannot be read yet.
fn real_part() -> Option<RealPart> {
    let part = REAL_PART.get_or_try_init(|| {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out-parameters are live.
        inside(|| unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }).result().map_err(drop)?;
        let free = free as u64;
        let chosen = match MODE.get() {
            Some(Mode::Dry { real, .. }) => real.map(Bytes::get),
            _ => None,
        };
        let by_memory = || (free / REAL_OF_FREE / PAGE * PAGE).min(MOST_REAL);
        let largest = chosen.unwrap_or_else(by_memory).min(free / 2).max(ALWAYS_REAL);
        if let Some(observer) = OBSERVER.get() {
            (observer.real_part)(Bytes::new(largest));
        }
        Ok::<_, ()>(RealPart { largest, all: free / 2 })
    });
    part.ok().copied()
}

/// Returns the size of the largest block that is real in this dry run.
pub(super) fn largest_real() -> u64 {
    real_part().map_or(ALWAYS_REAL, |part| part.largest)
}

/// Returns whether a new block is real.
pub(super) fn is_real(bytes: u64) -> bool {
    if !is_dry_run() {
        return true;
    }
    // The first block of any size decides.
    let part = real_part();
    let has_room = |part: RealPart| bytes <= part.largest && memory().real() + bytes <= part.all;
    bytes <= ALWAYS_REAL || part.is_some_and(has_room)
}

/// Returns whether this address must not be used: it has no memory, or it would get memory if it were touched.
pub(super) fn is_dry(address: u64) -> bool {
    may_be_dry(address) && memory().backing(address).is_some_and(|backing| !backing.is_real())
}

/// Returns whether a block or a mapping contains this address.
pub(super) fn is_on_card(address: u64) -> bool {
    let is_near = may_be_dry(address) || (LOWEST_REAL.load(Relaxed)..HIGHEST_REAL.load(Relaxed)).contains(&address);
    is_near && memory().backing(address).is_some()
}

/// Returns the word at an address in pinned memory.
pub(super) fn in_pinned(address: u64) -> Option<u64> {
    if !(LOWEST_PINNED.load(Relaxed)..HIGHEST_PINNED.load(Relaxed)).contains(&address) || !address.is_multiple_of(8) {
        return None;
    }
    let memory = memory();
    let (start, (bytes, _)) = memory.pinned.range(..=address).next_back()?;
    // SAFETY: the word is in a pinned block. A block is removed from this list before the driver frees it, and the lock of the list is held.
    (address + 8 <= start + bytes).then(|| unsafe { get(address) })
}

/// Makes [`in_pinned`] check these addresses.
pub(super) fn watch_pinned(address: u64, bytes: u64) {
    LOWEST_PINNED.fetch_min(address, Relaxed);
    HIGHEST_PINNED.fetch_max(address.saturating_add(bytes), Relaxed);
}

/// Makes [`is_on_card`] check these addresses of real memory.
pub(super) fn watch_real(address: u64, bytes: u64) {
    LOWEST_REAL.fetch_min(address, Relaxed);
    HIGHEST_REAL.fetch_max(address.saturating_add(bytes), Relaxed);
}

/// Returns whether no kernel may use this address: it is dry, or memory of another GPU, which the context of this GPU cannot reach, or it
/// contains dry addresses and the kernel reads them.
pub(super) fn is_out_of_reach(address: u64, is_read: bool) -> bool {
    if !may_be_dry(address) {
        return false;
    }
    let owner = {
        let memory = memory();
        match memory.backing(address) {
            Some(backing) if !backing.is_real() => return true,
            Some(_) if is_read && memory.content(address) == Some(Content::Table) => return true,
            Some(_) if cards::are_apart() => memory.device_of(address),
            _ => return false,
        }
    };
    owner.is_some_and(|card| card != here().1)
}

/// Returns whether there has been any dry block.
pub(super) fn has_any_dry() -> bool {
    HIGHEST.load(Relaxed) > 0
}

/// Returns false if no block at this address has ever been dry.
pub(super) fn may_be_dry(address: u64) -> bool {
    (LOWEST.load(Relaxed)..HIGHEST.load(Relaxed)).contains(&address)
}

/// Makes [`is_dry`] check these addresses.
pub(super) fn watch(address: u64, bytes: u64) {
    LOWEST.fetch_min(address, Relaxed);
    HIGHEST.fetch_max(address.saturating_add(bytes.next_multiple_of(PAGE)), Relaxed);
}

pub(super) fn physical(handle: u64) -> Option<Physical> {
    memory().physical.get(&handle).copied()
}

pub(super) fn is_dry_handle(handle: u64) -> bool {
    physical(handle).is_some_and(|physical| physical.is_dry)
}

/// # Safety
/// `address` must be valid for reading a word.
pub(super) unsafe fn get(address: u64) -> u64 {
    // SAFETY: required by this function's contract.
    unsafe { (address as *const u64).read_unaligned() }
}

/// # Safety
/// `address` must be valid for writing a word.
pub(super) unsafe fn put(address: u64, value: u64) {
    // SAFETY: required by this function's contract.
    unsafe { (address as *mut u64).write_unaligned(value) }
}

/// Returns the current context of the thread, and its device.
pub(super) fn here() -> (u64, u32) {
    inside(|| {
        let context = cuda::current_context().map_or(0, |context| context as u64);
        if cards::are_of_runtime() {
            return (context, cuda::card_of_thread());
        }
        let card = cards::of_context(context).or_else(cuda::current_ordinal);
        (context, card.unwrap_or(0))
    })
}

/// Returns the block or the mapping that contains an address, and its start address. `None` if it is the driver's.
pub(super) fn own_block(address: u64) -> Option<(u64, Block)> {
    if !may_be_dry(address) {
        return None;
    }
    let memory = memory();
    let block = memory.block_at(address).map(|(start, block)| (start, *block));
    block.or_else(|| memory.mapped_as_block(address)).filter(|(_, block)| block.backing.is_ours())
}
