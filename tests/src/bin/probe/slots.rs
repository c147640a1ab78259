//! Another tool in this process, which intercepts the driver as gpumem does, through the slots of the stubs, or writes a jump over a
//! stub, as UCX does.

use std::backtrace::Backtrace;
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::{fs, mem, ptr, slice};

use cudarc::driver::sys;
use gpumem_tests::Stub;

use crate::Trouble;

type Slot = AtomicPtr<()>;

/// What a hook goes on to, and what it saw.
struct Hook {
    /// What was in the slot before.
    next: Slot,
    /// Where to look for that at each call, if not in `next`.
    through: AtomicPtr<Slot>,
    calls: AtomicU64,
    is_walking: AtomicBool,
    /// Whether a walk of the stack came to this program's `main`.
    reached_main: AtomicBool,
}

impl Hook {
    const fn unused() -> Self {
        Self {
            next: Slot::new(ptr::null_mut()),
            through: AtomicPtr::new(ptr::null_mut()),
            calls: AtomicU64::new(0),
            is_walking: AtomicBool::new(false),
            reached_main: AtomicBool::new(false),
        }
    }

    fn go_on_to(&self) -> *mut () {
        // SAFETY: a slot of the driver's, which is never unloaded.
        let slot = unsafe { self.through.load(Ordering::Acquire).as_ref() };
        slot.unwrap_or(&self.next).load(Ordering::Acquire)
    }
}

const MOST: usize = 16;
static HOOKS: [Hook; MOST] = [const { Hook::unused() }; MOST];

type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> c_int;

/// What is called in the place of the driver's function. It hands on six integers, as many as any of the functions takes.
///
/// # Safety
/// As that function.
#[allow(clippy::many_single_char_names)] // They have no other: each function calls them otherwise.
unsafe extern "C" fn hook<const N: usize>(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> c_int {
    let hook = &HOOKS[N];
    hook.calls.fetch_add(1, Ordering::Relaxed);
    if hook.is_walking.swap(false, Ordering::Relaxed) {
        let stack = Backtrace::force_capture().to_string();
        hook.reached_main.store(stack.contains("probe::main"), Ordering::Relaxed);
    }
    // SAFETY: what the slot pointed at, or points at, is a function of the driver's, or another hook before it; the arguments are
    // the caller's.
    unsafe { mem::transmute::<*mut (), Function>(hook.go_on_to())(a, b, c, d, e, f) }
}

#[rustfmt::skip]
const ENTRIES: [Function; MOST] = [
    hook::<0>, hook::<1>, hook::<2>, hook::<3>, hook::<4>, hook::<5>, hook::<6>, hook::<7>, hook::<8>, hook::<9>,
    hook::<10>, hook::<11>, hook::<12>, hook::<13>, hook::<14>, hook::<15>,
];

/// What the hooks are for, in their order. A hook is used once: somebody may still call it after it was taken out.
static USED: Mutex<Vec<Use>> = Mutex::new(Vec::new());

struct Use {
    function: String,
    /// Whether it can be taken out of the slot.
    is_in_slot: bool,
}

/// Takes an unused hook for the function; the hook's number.
fn take(function: &str, is_in_slot: bool) -> Result<usize, Trouble> {
    let mut used = USED.lock().map_err(|_| "a command panicked")?;
    if used.len() == MOST {
        return Err("there are no more hooks".into());
    }
    used.push(Use { function: function.to_owned(), is_in_slot });
    Ok(used.len() - 1)
}

/// Points the slot of a function at a hook, which goes on to what was there. May be done again and again.
fn replace(function: &str, is_walking: bool) -> Result<(), Trouble> {
    let slot = slot(function)?;
    let number = take(function, true)?;
    HOOKS[number].is_walking.store(is_walking, Ordering::Relaxed);
    HOOKS[number].next.store(slot.load(Ordering::Acquire), Ordering::Release);
    slot.store(ENTRIES[number] as *mut (), Ordering::Release);
    Ok(())
}

/// Writes back what the function's newest hook found, whatever is there now.
fn restore(function: &str) -> Result<(), Trouble> {
    let slot = slot(function)?;
    let mut used = USED.lock().map_err(|_| "a command panicked")?;
    let newest = used.iter().rposition(|hook| hook.function == function && hook.is_in_slot);
    let number = newest.ok_or("there is no such hook")?;
    used[number].is_in_slot = false;
    slot.store(HOOKS[number].next.load(Ordering::Acquire), Ordering::Release);
    Ok(())
}

/// What was in slots when a tool noted it, with their functions.
static NOTED: Mutex<Vec<(String, usize)>> = Mutex::new(Vec::new());

/// What a tool does with what is in a slot now.
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

/// Points the slot at a hook that goes on to what was noted, past whoever is in the slot now.
fn replace_past(function: &str) -> Result<(), Trouble> {
    let (slot, number) = (slot(function)?, take(function, true)?);
    HOOKS[number].next.store(noted(function)?, Ordering::Release);
    slot.store(ENTRIES[number] as *mut (), Ordering::Release);
    Ok(())
}

/// Writes a jump to a hook over the stub, which goes on through the slot, as the stub would.
fn overwrite(function: &str) -> Result<(), Trouble> {
    const PAGE: usize = 4096;
    const ALL: c_int = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let (slot, code) = (slot(function)?, symbol(function)?);
    let number = take(function, false)?;
    HOOKS[number].through.store(ptr::from_ref(slot).cast_mut(), Ordering::Release);
    // `jmp qword ptr [rip]`, and the address behind it.
    let mut jump = [0; 14];
    jump[..2].copy_from_slice(&[0xff, 0x25]);
    jump[6..].copy_from_slice(&(ENTRIES[number] as usize as u64).to_le_bytes());
    let page = code.map_addr(|address| address / PAGE * PAGE);
    // SAFETY: the stub is longer than the jump, and the pages that the jump is in are the driver's code. No other thread is in
    // the stub: the scripts call nothing meanwhile.
    unsafe {
        if libc::mprotect(page.cast_mut().cast(), 2 * PAGE, ALL) != 0 {
            return Err("the code cannot be made writable".into());
        }
        code.cast_mut().cast::<[u8; 14]>().write(jump);
    }
    Ok(())
}

/// What the function's hooks saw.
fn seen<T>(function: &str, look: impl Fn(&Hook) -> T) -> Result<Vec<T>, Trouble> {
    let used = USED.lock().map_err(|_| "a command panicked")?;
    Ok(used.iter().zip(&HOOKS).filter(|(hook, _)| hook.function == function).map(|(_, hook)| look(hook)).collect())
}

/// Attribution the function is that a slot points at.
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

/// How the memory of a function's slot may be accessed, such as `rw-p`.
fn access(function: &str) -> Result<String, Trouble> {
    let slot = slot_address(function)?;
    for line in fs::read_to_string("/proc/self/maps")?.lines() {
        let (range, rest) = line.split_once(' ').ok_or("a strange line")?;
        let (start, end) = range.split_once('-').ok_or("a strange line")?;
        if (usize::from_str_radix(start, 16)?..usize::from_str_radix(end, 16)?).contains(&slot) {
            return Ok(rest.split(' ').next().unwrap_or_default().to_owned());
        }
    }
    Err("the slot is in no memory".into())
}

/// The address of the function that the driver exports.
fn symbol(function: &str) -> Result<*const u8, Trouble> {
    // SAFETY: as in `raw::invoke`; the address is only looked at.
    let found = unsafe { sys::culib().get::<Function>(function.as_bytes()) }?;
    Ok(*found as *const u8)
}

/// What is in the code at a function's address.
fn code(function: &str, count: usize) -> Result<&'static [u8], Trouble> {
    // SAFETY: the driver stays loaded, and behind its exported functions is more code than the scripts ask for.
    Ok(unsafe { slice::from_raw_parts(symbol(function)?, count) })
}

fn stub(function: &str) -> Result<Stub, Trouble> {
    let stub = Stub::read(code(function, Stub::BYTES)?, symbol(function)?.addr() as u64);
    stub.ok_or_else(|| "the function is no stub".into())
}

fn slot_address(function: &str) -> Result<usize, Trouble> {
    Ok(usize::try_from(stub(function)?.slot)?)
}

fn slot(function: &str) -> Result<&'static Slot, Trouble> {
    let slot = ptr::with_exposed_provenance::<Slot>(slot_address(function)?);
    if !slot.is_aligned() {
        return Err("the slot is not aligned".into());
    }
    // SAFETY: a stub of the driver's goes through it, and the driver stays loaded. All who write to it here do so atomically.
    unsafe { slot.as_ref() }.ok_or_else(|| "the slot is null".into())
}

/// The file that the address is in.
fn module_of(address: *const ()) -> Option<String> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the C library's; it looks at no memory behind the address, and writes to `info` alone.
    let is_found = unsafe { libc::dladdr(address.cast(), info.as_mut_ptr()) } != 0;
    // SAFETY: it consists of pointers, which may be null.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !is_found || name.is_null() {
        return None;
    }
    // SAFETY: the name of a module that is loaded, which ends.
    Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// The answer to a command of this file's; `None` where it is none.
pub(crate) fn answer(verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
    let (function, number) = argument.split_once(' ').unwrap_or((argument, ""));
    Ok(Some(match verb {
        "slot_replace" | "slot_walk" | "slot_restore" | "slot_note" | "slot_write_back" | "slot_replace_past"
        | "stub_overwrite" => {
            for function in argument.split(' ') {
                match verb {
                    "slot_replace" => replace(function, false)?,
                    "slot_walk" => replace(function, true)?,
                    "slot_restore" => restore(function)?,
                    "slot_note" => note(function)?,
                    "slot_write_back" => slot(function)?.store(noted(function)?, Ordering::Release),
                    "slot_replace_past" => replace_past(function)?,
                    _ => overwrite(function)?,
                }
            }
            "done".to_owned()
        }
        "slot_calls" => seen(function, |hook| hook.calls.load(Ordering::Relaxed))?.iter().sum::<u64>().to_string(),
        "slot_stack" => {
            let reached = seen(function, |hook| hook.reached_main.load(Ordering::Relaxed))?;
            if reached.contains(&true) { "to main" } else { "cut" }.to_owned()
        }
        "slot_is" => owner(function)?.to_owned(),
        "slot_access" => access(function)?,
        "stub_bytes" => {
            let bytes = code(function, number.parse()?)?.iter();
            bytes.map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
        }
        "stub" => {
            let Stub { form, compared, word, slot } = stub(function)?;
            format!("{form:?} {compared:#x} {word:#x} {slot:#x}")
        }
        _ => return Ok(None),
    }))
}
