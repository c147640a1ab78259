//! Simulates several GPUs on one device. The program's device 3 is the fourth simulated GPU. Each GPU except the first has its own contexts
//! and its own pool on the driver's device 0, so everything real (small blocks, streams, kernels) works as usual.
//!
//! In a program that uses the CUDA runtime, all simulated GPUs share the primary context of device 0 instead, and a thread selects its GPU:
//! see [`runtime`](super::runtime).
//!
//! Ordinals are translated here: the program and all libraries use the simulated GPUs' ordinals, and the driver gets 0.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
};

use crate::sys::{cuda, loader};

pub(super) const CUDA_ERROR_INVALID_DEVICE: u32 = 101;
pub(super) const CU_MEM_LOCATION_TYPE_DEVICE: u64 = 1;

/// The number of simulated GPUs; 0 if the program sees the devices of the machine.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// True if the program uses the CUDA runtime.
static OF_RUNTIME: AtomicBool = AtomicBool::new(false);

/// The number of devices of the machine. 0 until a library that must see them requests it.
static MACHINE: AtomicU32 = AtomicU32::new(0);

/// The contexts, pools and streams of the simulated GPUs after the first.
#[derive(Default)]
pub(super) struct Cards {
    /// The GPU of each context, of each pool, and of each stream.
    pub(super) contexts: BTreeMap<u64, u32>,
    pub(super) pools: BTreeMap<u64, u32>,
    pub(super) streams: BTreeMap<u64, u32>,
    pub(super) primary: BTreeMap<u32, Primary>,
    /// The default pool of each GPU, and its current one.
    pub(super) default_pool: BTreeMap<u32, u64>,
    pub(super) current_pool: BTreeMap<u32, u64>,
    /// Pairs of contexts; the first of each may use memory of the second. In a program that uses the CUDA runtime, these are GPUs instead
    /// of contexts.
    pub(super) peers: BTreeSet<(u64, u64)>,
}

/// A primary context. It exists only while there are references.
#[derive(Clone, Copy, Default)]
pub(super) struct Primary {
    pub(super) context: u64,
    pub(super) references: u32,
    pub(super) flags: u64,
}

static CARDS: Mutex<Cards> = Mutex::new(Cards {
    contexts: BTreeMap::new(),
    pools: BTreeMap::new(),
    streams: BTreeMap::new(),
    primary: BTreeMap::new(),
    default_pool: BTreeMap::new(),
    current_pool: BTreeMap::new(),
    peers: BTreeSet::new(),
});

/// Locks the state. The lock is held for a few steps, and never during a driver call.
pub(super) fn cards() -> MutexGuard<'static, Cards> {
    CARDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the number of simulated GPUs.
pub(super) fn start(count: u32) {
    COUNT.store(count, Relaxed);
}

/// Returns the number of simulated GPUs, or 0 if the program sees the devices of the machine.
pub(super) fn count() -> u32 {
    COUNT.load(Relaxed)
}

/// Returns whether the program's devices are simulated.
pub(super) fn are_simulated() -> bool {
    count() > 0
}

/// Returns whether simulated GPUs cannot access each other's memory, because each has its own context.
pub(super) fn are_apart() -> bool {
    are_simulated() && !are_of_runtime()
}

/// Returns the simulated GPU of a context, unless it is the first one.
pub(super) fn of_context(context: u64) -> Option<u32> {
    are_simulated().then(|| cards().contexts.get(&context).copied())?
}

/// Returns the simulated GPU of a pool.
pub(super) fn of_pool(pool: u64) -> Option<u32> {
    are_simulated().then(|| cards().pools.get(&pool).copied())?
}

/// Returns the simulated GPU on which a stream was created.
pub(super) fn of_stream(stream: u64) -> Option<u32> {
    are_simulated().then(|| cards().streams.get(&stream).copied())?
}

/// Returns whether the program uses simulated GPUs through the CUDA runtime.
pub(super) fn are_of_runtime() -> bool {
    are_simulated() && OF_RUNTIME.load(Relaxed)
}

/// Lets the program use the simulated GPUs through the CUDA runtime. Returns whether this is possible: it is not once a simulated GPU has
/// its own context.
pub(super) fn start_runtime() -> bool {
    let is_possible = OF_RUNTIME.load(Relaxed) || {
        let cards = cards();
        cards.contexts.is_empty() && cards.primary.values().all(|primary| primary.references == 0)
    };
    OF_RUNTIME.fetch_or(is_possible, Relaxed);
    is_possible
}

/// Checks whether the program has loaded the CUDA runtime, because it then uses it.
pub(super) fn look_for_runtime() {
    if !OF_RUNTIME.load(Relaxed) && !loader::loaded_as(RUNTIME).is_empty() {
        start_runtime();
    }
}

/// The prefix of the file names of the CUDA runtime.
pub(super) const RUNTIME: &str = "libcudart";

/// Returns whether the caller must see the devices of the machine. The runtime compares them with a list that it gets from the driver, and
/// so do libraries that contain a copy of the runtime, such as cuBLAS. The caller is not known, so this is true for all callers except
/// gpumem.
pub(super) fn show_machine() -> bool {
    are_of_runtime() && !cuda::is_own()
}

/// Notes the number of devices of the machine.
pub(super) fn note_machine(devices: u32) {
    MACHINE.store(devices, Relaxed);
}

/// Returns whether this ordinal is one of the machine's devices. The first of these is also the first simulated GPU.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) fn is_of_machine(ordinal: u64) -> bool {
    show_machine() && (ordinal as u32) < MACHINE.load(Relaxed)
}

/// Removes a destroyed context.
pub(super) fn forget(context: u64) {
    let mut cards = cards();
    cards.contexts.remove(&context);
    cards.peers.retain(|(one, other)| *one != context && *other != context);
}

/// Returns the driver's device for an ordinal of the program. A negative ordinal is the host.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
fn on_driver(ordinal: u64) -> Result<u64, u32> {
    match (ordinal as i32).try_into() {
        Ok(card) if u32::lt(&card, &count()) => Ok(0),
        Ok(_) => Err(CUDA_ERROR_INVALID_DEVICE),
        Err(_) => Ok(ordinal),
    }
}

/// Like [`on_driver`], but for a `CUmemLocation`, whose first int is the kind of the second.
pub(super) fn location_on_driver(location: u64) -> Result<u64, u32> {
    match location & 0xffff_ffff {
        CU_MEM_LOCATION_TYPE_DEVICE if are_simulated() => {
            Ok(on_driver(location >> 32)? << 32 | CU_MEM_LOCATION_TYPE_DEVICE)
        }
        _ => Ok(location),
    }
}

/// Calls the driver with its own device wherever the program names a simulated GPU. The name of an argument determines its meaning:
/// `device` and `location` are values; `place` is the address of a location; the structs at `properties` and `pool_properties` have a
/// location as their second word; `descriptors` is a list of `CUmemAccessDesc`, and the next argument is its length.
///
/// # Safety
/// The words must be the arguments of a call, and have these names. The memory at their addresses must be readable.
pub(super) unsafe fn with_drivers_device(names: &[&str], words: &[u64], call: &dyn Fn(&[u64]) -> u32) -> u32 {
    if !are_simulated() {
        return call(words);
    }
    let mut words = words.to_vec();
    // The longest struct is `CUmemPoolProps`.
    let mut copy = [0_u64; 11];
    let descriptors;
    for (at, name) in names.iter().enumerate() {
        let (length, second) = match *name {
            "device" if is_of_machine(words[at]) => continue,
            "device" | "location" => {
                let place = if *name == "device" { on_driver(words[at]) } else { location_on_driver(words[at]) };
                match place {
                    Ok(place) => words[at] = place,
                    Err(code) => return code,
                }
                continue;
            }
            "descriptors" if words[at] != 0 => {
                // SAFETY: the caller passes this number of them.
                descriptors = match unsafe { descriptors_on_driver(words[at], words[at + 1]) } {
                    Ok(descriptors) => descriptors,
                    Err(code) => return code,
                };
                (words[at], words[at + 1]) = (descriptors.as_ptr() as u64, descriptors.len() as u64);
                break;
            }
            "place" => (1, 0),
            "properties" => (4, 1),
            "pool_properties" => (11, 1),
            _ => continue,
        };
        if words[at] != 0 {
            // SAFETY: the struct has this number of words.
            (0..length).for_each(|word| copy[word] = unsafe { (words[at] as *const u64).add(word).read_unaligned() });
            match location_on_driver(copy[second]) {
                Ok(location) => copy[second] = location,
                Err(code) => return code,
            }
            words[at] = copy.as_ptr() as u64;
        }
    }
    call(&words)
}

/// Reads a list of `CUmemAccessDesc`, each of which is three ints, two of them a location. The result contains each location once, with its
/// last access.
///
/// # Safety
/// `at` must be valid for reads of `count` descriptors.
#[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
pub(super) unsafe fn descriptors_on_driver(at: u64, count: u64) -> Result<Vec<[u32; 3]>, u32> {
    let mut places: Vec<[u32; 3]> = Vec::new();
    for index in 0..count {
        // SAFETY: by the contract of this function, `count` descriptors can be read at `at`.
        let [sort, id, access] = unsafe { ((at + index * 12) as *const [u32; 3]).read_unaligned() };
        let id = (location_on_driver(u64::from(id) << 32 | u64::from(sort))? >> 32) as u32;
        places.retain(|[known, other, _]| (*known, *other) != (sort, id));
        places.push([sort, id, access]);
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_gets_its_own_device() {
        start(4);
        let (location, host) = (3 << 32 | 1, 1_u64 << 32 | 2);
        let properties = [1, location, 0, 0];
        let descriptors = [[1_u32, 2, 3], [1, 3, 1], [2, 1, 3]];
        let names = ["properties", "device", "location", "descriptors", "count"];
        let words = |device: u64| {
            [properties.as_ptr() as u64, device, location, descriptors.as_ptr() as u64, descriptors.len() as u64]
        };
        let call = |words: &[u64]| {
            // SAFETY: these are the addresses from above, or of copies of what is there.
            let (second, list) = unsafe {
                (
                    (words[0] as *const u64).add(1).read_unaligned(),
                    std::slice::from_raw_parts(words[3] as *const [u32; 3], usize::try_from(words[4]).unwrap()),
                )
            };
            assert_eq!((second, words[2], list), (1, 1, &[[1, 0, 1], [2, 1, 3]][..]));
            u32::try_from(words[1] & 0xff).unwrap()
        };
        // SAFETY: as above. -1 is the host, and 4 is not a card.
        let made =
            [2, u64::from(u32::MAX), 4].map(|device| unsafe { with_drivers_device(&names, &words(device), &call) });
        assert_eq!(made, [0, 0xff, CUDA_ERROR_INVALID_DEVICE]);
        assert_eq!(location_on_driver(host), Ok(host));
        start(0);
    }
}
