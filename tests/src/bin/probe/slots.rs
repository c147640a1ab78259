//! Acts as another tool in this process, which intercepts the driver as gpumem does, through the slots of the stubs.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::{mem, ptr, slice};

use cudarc::driver::sys;
use gpumem_tests::Stub;

use crate::Trouble;

type Slot = AtomicPtr<()>;

/// The next function of a hook, and its number of calls.
struct Hook {
    /// The function that was in the slot before.
    next: Slot,
    calls: AtomicU64,
}

const MOST: usize = 16;
static HOOKS: [Hook; MOST] = [const { Hook { next: Slot::new(ptr::null_mut()), calls: AtomicU64::new(0) } }; MOST];

type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> c_int;

/// Replaces a function of the driver. The hook passes on six integers, because no function takes more.
///
/// # Safety
/// The caller must follow the contract of the replaced function.
#[allow(clippy::many_single_char_names)] // They have no other: each function calls them otherwise.
unsafe extern "C" fn hook<const N: usize>(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> c_int {
    let hook = &HOOKS[N];
    hook.calls.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the slot pointed at a function of the driver, or at an earlier hook; the arguments are the caller's.
    unsafe { mem::transmute::<*mut (), Function>(hook.next.load(Ordering::Acquire))(a, b, c, d, e, f) }
}

#[rustfmt::skip]
const ENTRIES: [Function; MOST] = [
    hook::<0>, hook::<1>, hook::<2>, hook::<3>, hook::<4>, hook::<5>, hook::<6>, hook::<7>, hook::<8>, hook::<9>,
    hook::<10>, hook::<11>, hook::<12>, hook::<13>, hook::<14>, hook::<15>,
];

/// The functions of the hooks, in the order of the hooks. A hook is used once, because a thread may still call it after it was
/// removed.
static USED: Mutex<Vec<Use>> = Mutex::new(Vec::new());

struct Use {
    function: String,
    /// True if the hook was not removed from the slot.
    is_in_slot: bool,
}

/// Takes an unused hook for the function. Returns the hook's number.
fn take(function: &str) -> Result<usize, Trouble> {
    let mut used = USED.lock().map_err(|_| "a command panicked")?;
    if used.len() == MOST {
        return Err("there are no more hooks".into());
    }
    used.push(Use { function: function.to_owned(), is_in_slot: true });
    Ok(used.len() - 1)
}

/// Points the slot of a function at a hook, which calls the function that was there. A slot can be replaced several times.
fn replace(function: &str) -> Result<(), Trouble> {
    let (slot, number) = (slot(function)?, take(function)?);
    HOOKS[number].next.store(slot.load(Ordering::Acquire), Ordering::Release);
    slot.store(ENTRIES[number] as *mut (), Ordering::Release);
    Ok(())
}

/// Writes back the pointer that the function's latest hook found, whatever the slot contains now.
fn restore(function: &str) -> Result<(), Trouble> {
    let slot = slot(function)?;
    let mut used = USED.lock().map_err(|_| "a command panicked")?;
    let latest = used.iter().rposition(|hook| hook.function == function && hook.is_in_slot);
    let number = latest.ok_or("there is no such hook")?;
    used[number].is_in_slot = false;
    slot.store(HOOKS[number].next.load(Ordering::Acquire), Ordering::Release);
    Ok(())
}

/// The functions whose slots a tool noted, each with the content of its slot at that time.
static NOTED: Mutex<Vec<(String, usize)>> = Mutex::new(Vec::new());

/// Notes the content of a slot, as a tool does.
fn note(function: &str) -> Result<(), Trouble> {
    let now = slot(function)?.load(Ordering::Acquire);
    NOTED.lock().map_err(|_| "a command panicked")?.push((function.to_owned(), now.expose_provenance()));
    Ok(())
}

fn noted(function: &str) -> Result<*mut (), Trouble> {
    let noted = NOTED.lock().map_err(|_| "a command panicked")?;
    let found = noted.iter().find(|(of, _)| of == function).ok_or("nothing was noted")?;
    Ok(ptr::with_exposed_provenance_mut(found.1))
}

/// Points the slot at a hook that calls the noted function, and not the one in the slot now.
fn replace_past(function: &str) -> Result<(), Trouble> {
    let (slot, number) = (slot(function)?, take(function)?);
    HOOKS[number].next.store(noted(function)?, Ordering::Release);
    slot.store(ENTRIES[number] as *mut (), Ordering::Release);
    Ok(())
}

/// Returns the number of calls that the function's hooks saw.
fn calls(function: &str) -> Result<u64, Trouble> {
    let used = USED.lock().map_err(|_| "a command panicked")?;
    let hooks = used.iter().zip(&HOOKS).filter(|(hook, _)| hook.function == function);
    Ok(hooks.map(|(_, hook)| hook.calls.load(Ordering::Relaxed)).sum())
}

/// Returns the owner of the function in a slot.
fn owner(function: &str) -> Result<&'static str, Trouble> {
    let target = slot(function)?.load(Ordering::Acquire).cast_const();
    let is_hook = ENTRIES.iter().any(|entry| ptr::addr_eq(*entry as *const (), target));
    let driver = module_of(symbol(function)?.cast()).ok_or("the driver is in no file")?;
    Ok(match module_of(target) {
        _ if is_hook => "tool",
        Some(module) if module == driver => "driver",
        _ => "other",
    })
}

/// Returns the address of the function that the driver exports.
fn symbol(function: &str) -> Result<*const u8, Trouble> {
    // SAFETY: as in `raw::invoke`; the address is only looked at.
    let found = unsafe { sys::culib().get::<Function>(function.as_bytes()) }?;
    Ok(*found as *const u8)
}

/// Returns the code at a function's address.
fn code(function: &str, count: usize) -> Result<&'static [u8], Trouble> {
    // SAFETY: the driver stays loaded, and its exported functions are followed by more code than the scripts read.
    Ok(unsafe { slice::from_raw_parts(symbol(function)?, count) })
}

fn slot(function: &str) -> Result<&'static Slot, Trouble> {
    let stub = Stub::read(code(function, Stub::BYTES)?, symbol(function)?.addr() as u64);
    let slot = ptr::with_exposed_provenance::<Slot>(usize::try_from(stub.ok_or("the function is not a stub")?.slot)?);
    if !slot.is_aligned() {
        return Err("the slot is not aligned".into());
    }
    // SAFETY: a stub of the driver reads the slot, and the driver stays loaded. All code here writes to the slot atomically.
    unsafe { slot.as_ref() }.ok_or_else(|| "the slot is null".into())
}

/// Returns the file that contains the address.
fn module_of(address: *const ()) -> Option<String> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: this function of the C library does not read the memory at the address, and writes only to `info`.
    let is_found = unsafe { libc::dladdr(address.cast(), info.as_mut_ptr()) } != 0;
    // SAFETY: the struct consists of pointers, which may be null.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !is_found || name.is_null() {
        return None;
    }
    // SAFETY: the name of a loaded module ends with a zero.
    Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// Returns the answer to a command of this file. `None` if it is another command.
pub(crate) fn answer(verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
    let (function, number) = argument.split_once(' ').unwrap_or((argument, ""));
    Ok(Some(match verb {
        "slot_replace" | "slot_restore" | "slot_note" | "slot_write_back" | "slot_replace_past" => {
            for function in argument.split(' ') {
                match verb {
                    "slot_replace" => replace(function)?,
                    "slot_restore" => restore(function)?,
                    "slot_note" => note(function)?,
                    "slot_write_back" => slot(function)?.store(noted(function)?, Ordering::Release),
                    _ => replace_past(function)?,
                }
            }
            "done".to_owned()
        }
        "slot_calls" => calls(function)?.to_string(),
        "slot_is" => owner(function)?.to_owned(),
        "stub_bytes" => {
            let bytes = code(function, number.parse()?)?.iter();
            bytes.map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
        }
        _ => return Ok(None),
    }))
}
