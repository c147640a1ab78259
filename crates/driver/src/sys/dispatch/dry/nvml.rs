//! Answers NVML calls in programs whose GPUs are not the real ones. `gpumem run` preloads a library whose functions call this module.
//!
//! If there are several simulated GPUs, the first has the handle of the real GPU. The others have their own handles, and NVML gets the real
//! one instead.

use std::{
    ffi::{CStr, OsStr, c_char},
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::atomic::{AtomicU8, AtomicU64},
};

use libloading::os::unix::{Library, RTLD_LAZY};
use once_cell::sync::OnceCell;

use super::{
    Mode, SHARED_WORDS,
    card_calls::move_domain,
    is_running,
    runtime::{Arguments, Function, pass_to},
    shared::Shared,
    state,
};
use crate::sys::ring_memory::words_of;

const SUCCESS: u32 = 0;
const NVML_ERROR_INVALID_ARGUMENT: u32 = 2;
const NVML_ERROR_NOT_FOUND: u32 = 6;
const NVML_ERROR_LIBRARY_NOT_FOUND: u32 = 12;
const NVML_ERROR_FUNCTION_NOT_FOUND: u32 = 13;
const NVML_ERROR_UNKNOWN: u32 = 999;

/// `NVML_STRUCT_VERSION(Memory, 2)`
const MEMORY_V2: u64 = 0x0200_0028;

/// The requested GPUs.
#[derive(Debug)]
pub struct Cards {
    /// See [`start`](super::start).
    pub mode: Mode,
    /// See [`share`](super::share).
    pub segment: Option<u64>,
    /// The UUIDs of CUDA's devices, without `GPU-` or `MIG-`.
    pub devices: Vec<String>,
}

/// The handles of the simulated GPUs after the first are addresses in this array. NVML gets the real handle instead. If a program passes
/// such a handle inside a struct, NVML reads zeros there, and no other memory. The elements are atomic, because constants would be in the
/// library's file.
static HANDLES: [[AtomicU8; HANDLE]; 64] = [const { [const { AtomicU8::new(0) }; HANDLE] }; 64];
const HANDLE: usize = 1 << 16;

/// Returns the simulated GPU of a handle, unless it is the first one.
fn card_of(handle: usize) -> Option<u32> {
    let card = handle.checked_sub(HANDLES.as_ptr().addr())? / HANDLE;
    u32::try_from(card).ok().filter(|_| card < HANDLES.len())
}

/// Calls an NVML function, or answers instead of it. `what` is the name of the function, a space, and the path of the real library.
///
/// # Safety
/// The arguments must belong to this function.
pub unsafe fn call(cards: Option<&Cards>, arguments: Arguments, what: &CStr) -> usize {
    static REAL: OnceCell<Option<Library>> = OnceCell::new();

    let mut words = what.to_bytes().splitn(2, |byte| *byte == b' ');
    let (name, path) = (words.next().unwrap_or_default(), OsStr::from_bytes(words.next().unwrap_or_default()));
    // SAFETY: the library whose function was called depends on this one, so it is loaded and initialized.
    let real = REAL.get_or_init(|| unsafe { Library::open(Some(path), RTLD_LAZY) }.ok());
    let Some(real) = real else { return NVML_ERROR_LIBRARY_NOT_FOUND as usize };
    let nvml = Nvml { real, cards };
    let name = str::from_utf8(name).unwrap_or_default();
    // SAFETY: the arguments belong to the function with this name, by the contract of this function.
    let answer = || unsafe { nvml.answer(name, arguments) };
    // Nothing unwinds into C.
    let answered = catch_unwind(AssertUnwindSafe(answer)).unwrap_or(Some(NVML_ERROR_UNKNOWN));
    // SAFETY: as above.
    answered.map_or_else(|| unsafe { nvml.pass(name, arguments) }, |code| code as usize)
}

struct Nvml<'a> {
    real: &'a Library,
    cards: Option<&'a Cards>,
}

impl Nvml<'_> {
    /// Calls the real function, with the real handle instead of a simulated GPU's.
    ///
    /// # Safety
    /// The arguments must belong to this function.
    unsafe fn pass(&self, name: &str, mut arguments: Arguments) -> usize {
        // No function has handles in other arguments.
        for argument in &mut arguments[..2] {
            if card_of(*argument).is_some() {
                match self.first() {
                    Ok(first) => *argument = first,
                    Err(code) => return code as usize,
                }
            }
        }
        // SAFETY: each function can be called as one of this type, as `Function` explains.
        match unsafe { self.real.get::<Function>(name) } {
            // SAFETY: the arguments belong to the function with this name, by the contract of this function.
            Ok(function) => unsafe { pass_to(*function, arguments) },
            Err(_) => NVML_ERROR_FUNCTION_NOT_FOUND as usize,
        }
    }

    /// Runs [`pass`](Self::pass) for a function that returns an error code, which is an int.
    ///
    /// # Safety
    /// The same as for [`pass`](Self::pass).
    #[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
    unsafe fn ask<const N: usize>(&self, name: &str, arguments: [usize; N]) -> Result<(), u32> {
        let all = std::array::from_fn(|at| arguments.get(at).copied().unwrap_or(0));
        // SAFETY: the arguments belong to the function with this name, by the contract of this function.
        match unsafe { self.pass(name, all) } as u32 {
            SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    /// Returns the real handle of the GPU behind the cards: CUDA's first device.
    fn first(&self) -> Result<usize, u32> {
        let uuid = self.cards.and_then(|cards| cards.devices.first()).ok_or(NVML_ERROR_NOT_FOUND)?;
        let find = |prefix| {
            let (text, mut found) = (format!("{prefix}-{uuid}\0"), 0_usize);
            // SAFETY: the arguments are a C string and a place for a handle.
            unsafe { self.ask("nvmlDeviceGetHandleByUUID", [text.as_ptr().addr(), (&raw mut found).addr(), 0]) }?;
            Ok(found)
        };
        find("GPU").or_else(|code| find("MIG").map_err(|_| code))
    }

    fn handle(&self, card: u32) -> Result<usize, u32> {
        if card == 0 { self.first() } else { Ok(HANDLES.as_ptr().addr() + card as usize * HANDLE) }
    }

    /// Returns the error code of a function that is not passed to NVML unchanged.
    ///
    /// # Safety
    /// The same as for [`call`].
    #[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
    unsafe fn answer(&self, name: &str, arguments: Arguments) -> Option<u32> {
        let cards = self.cards?;
        let count = match cards.mode {
            Mode::Dry { cards, .. } => cards,
            Mode::Limit { .. } => 0,
        };
        let [first, second, ..] = arguments;
        let card = card_of(first).unwrap_or(0);
        // SAFETY: the arguments belong to the function with this name, by the contract of this function. Where NVML has succeeded, it
        // has written to the same places.
        let result = unsafe {
            match name {
                "nvmlDeviceGetMemoryInfo" | "nvmlDeviceGetMemoryInfo_v2" => self.memory(cards, name, arguments),
                _ if count == 0 => return None,
                "nvmlDeviceGetCount" | "nvmlDeviceGetCount_v2" => {
                    self.ask(name, arguments).map(|()| put_int(first, count))
                }
                "nvmlDeviceGetHandleByIndex" | "nvmlDeviceGetHandleByIndex_v2" if second != 0 => {
                    // NVML returns an error if it is not initialized.
                    self.first().and_then(|_| match first as u32 {
                        index if index < count => self.handle(index).map(|handle| put(second, handle)),
                        _ => Err(NVML_ERROR_INVALID_ARGUMENT),
                    })
                }
                "nvmlDeviceGetHandleByUUID" if first != 0 && second != 0 => {
                    self.by_text(name, arguments, count, &|text, card| change_uuid(text, card))
                }
                "nvmlDeviceGetHandleByPciBusId" | "nvmlDeviceGetHandleByPciBusId_v2" if first != 0 && second != 0 => {
                    self.by_text(name, arguments, count, &|text, card| move_domain(text, card.wrapping_neg()))
                }
                "nvmlDeviceGetIndex" => self.ask(name, arguments).map(|()| put_int(second, card)),
                "nvmlDeviceGetUUID" => self.ask(name, arguments).map(|()| change_uuid(second as *mut u8, card)),
                "nvmlDeviceGetPciInfo" | "nvmlDeviceGetPciInfo_v2" => self.bus(name, arguments, card, 16, &[0]),
                "nvmlDeviceGetPciInfo_v3" => self.bus(name, arguments, card, 16, &[0, 36]),
                "nvmlDeviceGetPciInfoExt" => self.bus(name, arguments, card, 4, &[32]),
                _ => return None,
            }
        };
        Some(result.err().unwrap_or(SUCCESS))
    }

    /// Finds a simulated GPU by a text. `to_first` turns a GPU's text into the first GPU's.
    ///
    /// # Safety
    /// The first argument must be a C string, and the second one valid for writing a handle.
    unsafe fn by_text(
        &self,
        name: &str,
        [text, out, ..]: Arguments,
        count: u32,
        to_first: &dyn Fn(*mut u8, u32),
    ) -> Result<(), u32> {
        let first = self.first()?;
        for card in 0..count {
            // SAFETY: the first argument is a C string, by the contract of this function. The copy is a C string as well.
            let mut text = unsafe { CStr::from_ptr(text as *const c_char) }.to_bytes_with_nul().to_vec();
            to_first(text.as_mut_ptr(), card);
            let mut found = 0_usize;
            // SAFETY: the place is live.
            let answer = unsafe { self.ask(name, [text.as_ptr().addr(), (&raw mut found).addr()]) };
            if answer.is_ok() && found == first {
                let handle = self.handle(card)?;
                // SAFETY: the second argument is a place for a handle, by the contract of this function.
                unsafe { put(out, handle) };
                return Ok(());
            }
        }
        Err(NVML_ERROR_NOT_FOUND)
    }

    /// Reads the bus from NVML, and changes it to the simulated GPU's. In the struct, its domain is a number in one place, and a text
    /// in others.
    ///
    /// # Safety
    /// The second argument must be such a struct.
    unsafe fn bus(
        &self,
        name: &str,
        arguments: Arguments,
        card: u32,
        number: usize,
        texts: &[usize],
    ) -> Result<(), u32> {
        // SAFETY: the second argument is a struct with these places, by the contract of this function.
        unsafe {
            self.ask(name, arguments)?;
            let domain = (arguments[1] + number) as *mut u32;
            domain.write_unaligned(domain.read_unaligned() + card);
            for text in texts {
                move_domain((arguments[1] + text) as *mut u8, card);
            }
        }
        Ok(())
    }

    /// Reads the memory of a GPU from NVML, and changes it to the simulated GPU's.
    ///
    /// # Safety
    /// The arguments must belong to this function.
    unsafe fn memory(&self, cards: &Cards, name: &str, arguments: Arguments) -> Result<(), u32> {
        // SAFETY: the arguments belong to the function with this name, by the contract of this function. NVML returns the error of the
        // call.
        unsafe { self.ask(name, arguments) }?;
        let [handle, out, ..] = arguments;
        let card = match card_of(handle) {
            Some(card) => Some(card),
            None if matches!(cards.mode, Mode::Dry { cards: 1.., .. }) => Some(0),
            None => self.ordinal(cards, handle)?,
        };
        // The program does not use this GPU.
        let Some(card) = card else { return Ok(()) };
        // All simulated GPUs are as large as the first one. The words are the version, and the total, reserved, free and used bytes.
        let handle = self.first()?;
        let mut real = [MEMORY_V2, 0, 0, 0, 0_u64];
        // SAFETY: the array is as long as the struct.
        if unsafe { self.ask("nvmlDeviceGetMemoryInfo_v2", [handle, real.as_mut_ptr().addr()]) }.is_err() {
            // SAFETY: the first version is the first word of these three. Drivers that have only this one count reserved bytes as used.
            unsafe { self.ask("nvmlDeviceGetMemoryInfo", [handle, (&raw mut real[1]).addr()]) }?;
            real[2] = 0;
        }
        let [_, total, reserved, ..] = real;
        let usable = total.saturating_sub(reserved);
        let (size, reserved) = match cards.mode {
            Mode::Dry { card: Some(card), .. } => (card.get(), 0),
            Mode::Limit { card } if card.get() < usable => (card.get(), 0),
            _ => (usable, reserved),
        };
        let used = used(cards.segment, card).ok_or(NVML_ERROR_UNKNOWN)?.min(size);
        let (total, free) = (size + reserved, size - used);
        // SAFETY: NVML has written as many words there. In the first version, reserved bytes count as used.
        unsafe {
            if name.ends_with("_v2") {
                (out as *mut [u64; 4]).byte_add(8).write_unaligned([total, reserved, free, used]);
            } else {
                (out as *mut [u64; 3]).write_unaligned([total, free, used + reserved]);
            }
        }
        Ok(())
    }

    /// Returns the CUDA ordinal of a GPU, or `None` if the program does not use the GPU.
    fn ordinal(&self, cards: &Cards, handle: usize) -> Result<Option<u32>, u32> {
        let mut text = [0_u8; 96];
        // SAFETY: NVML writes a C string that is not longer.
        unsafe { self.ask("nvmlDeviceGetUUID", [handle, text.as_mut_ptr().addr(), text.len()]) }?;
        let uuid = CStr::from_bytes_until_nul(&text).ok().and_then(|text| Some(text.to_str().ok()?.split_once('-')?.1));
        let ordinal = cards.devices.iter().position(|device| Some(device.as_str()) == uuid);
        Ok(ordinal.and_then(|ordinal| u32::try_from(ordinal).ok()))
    }
}

/// Returns the memory of all processes that share a GPU, or this process's memory if it is not shared. `None` if it cannot be read.
fn used(segment: Option<u64>, card: u32) -> Option<u64> {
    static WORDS: OnceCell<&[AtomicU64]> = OnceCell::new();

    let Some(segment) = segment else { return Some(state::used_here(card)) };
    let words = WORDS.get_or_try_init(|| words_of(segment, SHARED_WORDS)).ok()?;
    let all = Shared::watch(words, is_running);
    all.forget_ended();
    Some(all.others(card))
}

/// Changes a real UUID to a simulated GPU's. The UUIDs differ in their last byte, like the ones that CUDA returns.
///
/// # Safety
/// `text` must be a C string that is valid for writes.
#[allow(clippy::cast_possible_truncation, reason = "there are 64 cards at most")]
unsafe fn change_uuid(text: *mut u8, card: u32) {
    // SAFETY: a C string is there, by the contract of this function.
    let uuid = unsafe { CStr::from_ptr(text.cast()) }.to_bytes();
    let last = uuid.len().checked_sub(2).and_then(|at| Some((at, str::from_utf8(&uuid[at..]).ok()?)));
    if let Some((at, byte)) = last.and_then(|(at, last)| Some((at, u8::from_str_radix(last, 16).ok()?))) {
        let changed = format!("{:02x}", byte ^ card as u8);
        // SAFETY: the string has these two bytes.
        unsafe { ptr::copy_nonoverlapping(changed.as_ptr(), text.add(at), changed.len()) };
    }
}

/// # Safety
/// `out` must be valid for writing an int.
unsafe fn put_int(out: usize, value: u32) {
    // SAFETY: required by this function's contract.
    unsafe { (out as *mut u32).write_unaligned(value) };
}

/// # Safety
/// `out` must be valid for writing a handle.
unsafe fn put(out: usize, handle: usize) {
    // SAFETY: required by this function's contract.
    unsafe { (out as *mut usize).write_unaligned(handle) };
}
