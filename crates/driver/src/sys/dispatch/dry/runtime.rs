//! Handles the CUDA runtime in programs that see several simulated GPUs. `gpumem run --cards` preloads a library whose functions call this
//! module.
//!
//! The runtime compares the devices that the driver shows with a list that it gets from the driver, and does not start if they differ.
//! Libraries that contain a copy of the runtime, such as cuBLAS and NCCL, do the same. Therefore, in a program of the runtime, the driver
//! shows the devices of the machine (`cards::show_machine`), and the GPUs are simulated in those functions of the runtime that name
//! devices. All simulated GPUs share the primary context of device 0: handles, kernels and small blocks work on each of them, and a library
//! that makes a device current changes nothing. A thread selects its GPU here. The account, the hooks and gpumem's own calls use this GPU
//! (`cuda::card_of_thread`).
//!
//! Functions of the runtime that are not in the table reject the other GPUs. So does a copy of the runtime in the program itself.

use std::{
    ffi::{CStr, CString},
    mem,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use cudarc::driver::sys;
use libloading::os::unix::{Library, RTLD_LAZY};

use super::{
    cards::{self, CUDA_ERROR_INVALID_DEVICE, cards},
    state::{SUCCESS, memory},
};
use crate::{
    inbox::{Primitives, Std},
    sys::{cuda, dl, loader, print},
};

// The driver uses the same numbers for these errors.
const CUDA_ERROR_NOT_INITIALIZED: u32 = 3;
const CUDA_ERROR_SYMBOL_NOT_FOUND: u32 = 500;
const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
const CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: u32 = 705;

/// A function of NVML (12 and 13) or of the CUDA runtime. All NVML functions, and the runtime functions that are replaced, have up to six
/// arguments. These are numbers, addresses, or a struct of one word. The functions return an int or an address. A function does not read
/// the registers of arguments that it does not take.
pub(super) type Function = unsafe extern "C-unwind" fn(usize, usize, usize, usize, usize, usize) -> usize;
pub(super) type Arguments = [usize; 6];

/// # Safety
/// The function must take these arguments.
pub(super) unsafe fn pass_to(function: Function, [first, second, third, fourth, fifth, sixth]: Arguments) -> usize {
    // SAFETY: the function takes these arguments, by the contract of this function.
    unsafe { function(first, second, third, fourth, fifth, sixth) }
}

#[derive(Clone, Copy)]
enum RuntimeCall {
    Count,
    /// Returns the GPU of the thread.
    Current,
    Select,
    /// These arguments are devices.
    Devices(&'static [usize]),
    /// The first argument is a struct in which the ints at these places are devices.
    DevicesIn([usize; 2]),
    Properties,
    Pointer,
    Stream,
    EnablePeer,
    DisablePeer,
    Reset,
    /// The driver's function with this name has the same effect and the same arguments.
    Driver(&'static str),
}

/// Names and arguments come from `cuda_runtime_api.h` (11 to 13).
const TABLE: [(&str, RuntimeCall); 35] = [
    ("cudaGetDevice", RuntimeCall::Current),
    ("cudaSetDevice", RuntimeCall::Select),
    ("cudaGetDeviceCount", RuntimeCall::Count),
    ("cudaInitDevice", RuntimeCall::Devices(&[0])),
    ("cudaKernelSetAttributeForDevice", RuntimeCall::Devices(&[3])),
    ("cudaGetDeviceProperties", RuntimeCall::Properties),
    ("cudaGetDeviceProperties_v2", RuntimeCall::Properties),
    ("cudaDeviceGetAttribute", RuntimeCall::Driver("cuDeviceGetAttribute")),
    ("cudaDeviceGetPCIBusId", RuntimeCall::Driver("cuDeviceGetPCIBusId")),
    ("cudaDeviceGetByPCIBusId", RuntimeCall::Driver("cuDeviceGetByPCIBusId")),
    ("cudaDeviceCanAccessPeer", RuntimeCall::Driver("cuDeviceCanAccessPeer")),
    ("cudaDeviceGetP2PAttribute", RuntimeCall::Driver("cuDeviceGetP2PAttribute")),
    ("cudaDeviceEnablePeerAccess", RuntimeCall::EnablePeer),
    ("cudaDeviceDisablePeerAccess", RuntimeCall::DisablePeer),
    ("cudaMemcpyPeer", RuntimeCall::Devices(&[1, 3])),
    ("cudaMemcpyPeerAsync", RuntimeCall::Devices(&[1, 3])),
    ("cudaMemcpy3DPeer", RuntimeCall::DevicesIn([64, 136])),
    ("cudaMemcpy3DPeer_ptds", RuntimeCall::DevicesIn([64, 136])),
    ("cudaMemcpy3DPeerAsync", RuntimeCall::DevicesIn([64, 136])),
    ("cudaMemcpy3DPeerAsync_ptsz", RuntimeCall::DevicesIn([64, 136])),
    ("cudaPointerGetAttributes", RuntimeCall::Pointer),
    ("cudaStreamGetDevice", RuntimeCall::Stream),
    ("cudaStreamGetDevice_ptsz", RuntimeCall::Stream),
    ("cudaDeviceGetDefaultMemPool", RuntimeCall::Driver("cuDeviceGetDefaultMemPool")),
    ("cudaDeviceGetMemPool", RuntimeCall::Driver("cuDeviceGetMemPool")),
    ("cudaDeviceSetMemPool", RuntimeCall::Driver("cuDeviceSetMemPool")),
    ("cudaMemPoolCreate", RuntimeCall::Driver("cuMemPoolCreate")),
    ("cudaMemPoolSetAccess", RuntimeCall::Driver("cuMemPoolSetAccess")),
    ("cudaMemPoolGetAccess", RuntimeCall::Driver("cuMemPoolGetAccess")),
    ("cudaDeviceGetGraphMemAttribute", RuntimeCall::Driver("cuDeviceGetGraphMemAttribute")),
    ("cudaDeviceSetGraphMemAttribute", RuntimeCall::Driver("cuDeviceSetGraphMemAttribute")),
    ("cudaDeviceGraphMemTrim", RuntimeCall::Driver("cuDeviceGraphMemTrim")),
    ("cudaDeviceGetTexture1DLinearMaxWidth", RuntimeCall::Devices(&[2])),
    ("cudaDeviceReset", RuntimeCall::Reset),
    ("cudaThreadExit", RuntimeCall::Reset),
];

/// Returns the names of the functions.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|(name, _)| *name)
}

/// The runtime's own functions, and the equivalent ones of the driver, by row. 0 before the look-up.
static OWN: [AtomicUsize; TABLE.len()] = [const { AtomicUsize::new(0) }; TABLE.len()];
static DRIVERS: [AtomicUsize; TABLE.len()] = [const { AtomicUsize::new(0) }; TABLE.len()];

/// Calls a function of the runtime, or answers instead of it.
///
/// # Safety
/// The arguments must belong to the function with this name.
pub unsafe fn call(words: Arguments, name: &CStr) -> u32 {
    let row = TABLE.iter().position(|(known, _)| known.as_bytes() == name.to_bytes());
    let Some((row, own)) = row.and_then(|row| Some((row, own(row)?))) else { return CUDA_ERROR_SYMBOL_NOT_FOUND };
    // SAFETY: it is the runtime's function of this name, and the caller passes its arguments.
    let real = |words: Arguments| unsafe { pass(own, words) };
    if Std::is_forked() {
        return real(words);
    }
    if !cards::start_runtime() {
        print::notice(
            "the CUDA runtime does not start: the program has contexts on several GPUs of --cards, which it created with the driver's functions",
        );
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if !cards::are_simulated() {
        // The driver starts the dry run when it is initialized, which the runtime does here.
        let Some(count) = TABLE.iter().position(|(name, _)| *name == "cudaGetDeviceCount").and_then(self::own) else {
            return CUDA_ERROR_SYMBOL_NOT_FOUND;
        };
        let mut devices = 0_u32;
        // SAFETY: the out-parameter is live.
        let code = unsafe { pass(count, [&raw mut devices as usize, 0, 0, 0, 0, 0]) };
        if code != SUCCESS || !cards::are_simulated() {
            return real(words);
        }
    }
    // SAFETY: the arguments belong to the function in this row, by the contract of this function.
    unsafe { answer(row, words, &real) }
}

/// # Safety
/// The arguments must belong to the function in this row, and `real` must call it.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
unsafe fn answer(row: usize, mut words: Arguments, real: &dyn Fn(Arguments) -> u32) -> u32 {
    let card = |word: usize| Some(word as u32).filter(|card| *card < cards::count());
    let after = |code: u32, out: usize, value: u32| {
        if code == SUCCESS {
            // SAFETY: the runtime has just written an int there.
            unsafe { (out as *mut u32).write_unaligned(value) };
        }
        code
    };
    match TABLE[row].1 {
        RuntimeCall::Count => after(real(words), words[0], cards::count()),
        RuntimeCall::Current => after(real(words), words[0], cuda::selected_card()),
        RuntimeCall::Select => {
            let selected = card(words[0]);
            let code = real([on_machine(words[0]), 0, 0, 0, 0, 0]);
            if let (SUCCESS, Some(card)) = (code, selected) {
                cuda::select_card(card);
            }
            code
        }
        RuntimeCall::Devices(devices) => {
            for at in devices {
                words[*at] = on_machine(words[*at]);
            }
            real(words)
        }
        RuntimeCall::DevicesIn(places) if words[0] != 0 => {
            // A `cudaMemcpy3DPeerParms` has 21 words.
            // SAFETY: the caller passes its address, and both places are in it.
            unsafe {
                let mut copy = (words[0] as *const [u64; 21]).read_unaligned();
                for place in places {
                    let device = (&raw mut copy).cast::<u32>().byte_add(place);
                    device.write_unaligned(on_machine(device.read_unaligned() as usize) as u32);
                }
                words[0] = &raw mut copy as usize;
                real(words)
            }
        }
        RuntimeCall::Properties => {
            let Some(card) = card(words[1]) else { return real([words[0], NO_DEVICE, 0, 0, 0, 0]) };
            let code = real([words[0], 0, 0, 0, 0, 0]);
            if code == SUCCESS {
                // SAFETY: the runtime has just written a `cudaDeviceProp` there, in which the UUID comes after a name of 256 bytes.
                unsafe {
                    *((words[0] + 256 + 15) as *mut u8) ^= card as u8;
                    let domain = (words[0] + offset_of_domain(TABLE[row].0)) as *mut u32;
                    domain.write_unaligned(domain.read_unaligned() + card);
                }
            }
            code
        }
        RuntimeCall::Pointer => {
            let code = real(words);
            let device = if code == SUCCESS { memory().device_of(words[1] as u64) } else { None };
            // The device is the second int of a `cudaPointerAttributes`.
            device.map_or(code, |device| after(code, words[0] + 4, device))
        }
        RuntimeCall::Stream => {
            let stream = cards::of_stream(words[0] as u64);
            after(real(words), words[1], stream.unwrap_or_else(cuda::selected_card))
        }
        RuntimeCall::EnablePeer | RuntimeCall::DisablePeer => {
            let here = cuda::selected_card();
            let Some(peer) = card(words[0]).filter(|peer| *peer != here) else { return CUDA_ERROR_INVALID_DEVICE };
            let (pair, peers) = ((here.into(), peer.into()), &mut cards().peers);
            match TABLE[row].1 {
                RuntimeCall::EnablePeer if !peers.insert(pair) => CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
                RuntimeCall::DisablePeer if !peers.remove(&pair) => CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
                _ => SUCCESS,
            }
        }
        RuntimeCall::Reset => reset(cuda::selected_card()),
        RuntimeCall::Driver(name) => driver(row, name).map_or(CUDA_ERROR_SYMBOL_NOT_FOUND, |driver| {
            // SAFETY: the driver's function takes the same arguments.
            cuda::own(|| unsafe { pass(driver, words) })
        }),
        RuntimeCall::DevicesIn(_) => real(words),
    }
}

/// A device that no machine has: the runtime rejects it.
const NO_DEVICE: usize = i32::MAX as usize;

/// Returns the machine's device for a simulated GPU.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
fn on_machine(card: usize) -> usize {
    if (card as u32) < cards::count() { 0 } else { NO_DEVICE }
}

/// Returns the offset of `pciDomainID` in a `cudaDeviceProp`. Version 13 has fewer fields before it.
fn offset_of_domain(name: &str) -> usize {
    let mut version = 0_u32;
    if name == "cudaGetDeviceProperties"
        && let Some(function) = lookup("cudaRuntimeGetVersion")
    {
        // SAFETY: the out-parameter is live.
        unsafe { pass(function, [&raw mut version as usize, 0, 0, 0, 0, 0]) };
    }
    if version >= 13_000 { 576 } else { 592 }
}

/// Frees the program's memory on this GPU. All GPUs share the context, so streams and events stay.
pub(super) fn reset(card: u32) -> u32 {
    if card >= cards::count() {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    let addresses: Vec<u64> = {
        let memory = memory();
        memory.blocks.iter().filter(|(_, block)| block.device == card).map(|(address, _)| *address).collect()
    };
    for address in addresses {
        // SAFETY: the program requested the end of all blocks of the card.
        let _ = unsafe { sys::cuMemFree_v2(address) }.result();
    }
    cards().peers.retain(|(one, other)| ![*one, *other].contains(&card.into()));
    cuda::reset_card(card);
    SUCCESS
}

/// # Safety
/// `function` must be the address of a function that takes these arguments.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
unsafe fn pass(function: usize, arguments: Arguments) -> u32 {
    // SAFETY: `function` is the address of a function that takes these arguments, by the contract of this function.
    unsafe { pass_to(mem::transmute::<usize, Function>(function), arguments) as u32 }
}

fn own(row: usize) -> Option<usize> {
    remembered(&OWN[row], || lookup(TABLE[row].0))
}

/// Returns the driver's function that programs call.
fn driver(row: usize, name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the symbol is a function, of which only the address is taken.
    remembered(&DRIVERS[row], || unsafe { dl::symbol(&["libcuda.so.1", "libcuda.so"], &name) })
}

fn remembered(place: &AtomicUsize, find: impl FnOnce() -> Option<usize>) -> Option<usize> {
    match place.load(Relaxed) {
        0 => find().inspect(|found| place.store(*found, Relaxed)),
        known => Some(known),
    }
}

/// Returns the runtime's own function of this name. The program has loaded the runtime, because it calls it.
fn lookup(name: &str) -> Option<usize> {
    loader::loaded_as(cards::RUNTIME).into_iter().find_map(|path| {
        // SAFETY: the library is loaded and initialized. The symbol is a function, of which only the address is taken.
        unsafe {
            let library = Library::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD).ok()?;
            let function = library.get::<usize>(name.as_bytes()).ok().map(|function| *function);
            // The address stays valid.
            mem::forget(library);
            function
        }
    })
}
