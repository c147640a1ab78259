//! Finds the id of the calling thread's stack in the thread's cache, or by a walk.

mod cache;
mod callers;
mod last;
mod modules;
mod rules;
mod tables;
mod unwind;

use std::{
    arch::asm,
    cell::{RefCell, UnsafeCell},
    mem::MaybeUninit,
    ops::Range,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use self::{
    cache::{CachedStack, StackCache},
    callers::{CallerCache, Way},
    last::LastStack,
    modules::Modules,
    rules::CALLEE_SAVED,
    tables::address_of,
    unwind::{RegisterAddresses, Unwinder, WalkStart, WalkedFrame},
};
use super::stack::as_observer_cold;

/// The maximum number of functions that are recorded of a stack. Even below all functions of a framework, the user's line is among them.
const MAX_FUNCTIONS: usize = 128;

/// The functions of a stack, without libraries that are left out, such as the driver.
struct Functions {
    addresses: [usize; MAX_FUNCTIONS],
    count: usize,
    /// The walk has reached a function that is left out.
    has_skipped: bool,
}

impl Functions {
    /// Adds a function. Returns whether there is room for more.
    fn add(&mut self, walked: &WalkedFrame) -> bool {
        if walked.is_skipped {
            // The functions inside the driver are our hook or callback, so they are left out as well.
            self.count = if self.has_skipped { self.count } else { 0 };
            self.has_skipped = true;
        } else if let Some(place) = self.addresses.get_mut(self.count) {
            *place = address_of(walked.address);
            self.count += 1;
        }
        self.count < MAX_FUNCTIONS
    }
}

/// The data that a thread keeps to walk its stacks: less than 64 KiB, from its first stack until the thread ends.
struct Walker {
    /// The bounds of the thread's stack. The walk reads nothing outside of them.
    bounds: Range<u64>,
    cache: StackCache,
    unwinder: Unwinder,
    modules: Option<Arc<Modules>>,
    /// The number of consecutive walks to a caller that have failed.
    failed: u32,
}

/// After this number of consecutive failed walks, a thread stops walking to callers, because each walk would cost the same.
const MOST_FAILED: u32 = 64;

thread_local! {
    // These have no destructors, so access needs no check whether they were initialized.
    static LAST: UnsafeCell<LastStack> = const { UnsafeCell::new(LastStack::NONE) };
    static CALLERS: UnsafeCell<CallerCache> = const { UnsafeCell::new(CallerCache::EMPTY) };
    static WALKER: RefCell<Option<Walker>> = const { RefCell::new(None) };
}

/// The program counter, then the registers that functions preserve, as they are at the program counter.
type Registers = [u64; 1 + CALLEE_SAVED.len()];

/// Returns the id of the calling thread's stack. For a new stack this is the result of `number`, which must return the same id for equal
/// stacks. `number` receives the return addresses, innermost first and at most [`MAX_FUNCTIONS`]. Functions of files for which `is_skipped`
/// is true are left out, and so are all functions that the innermost of these files calls.
///
/// Returns `None` if the stack cannot be walked: the thread runs on another stack than its own, or is about to end, or a function on the
/// stack is in no file or in a file without tables. Does not panic. For a stack in the cache, it takes no lock and allocates nothing.
#[inline]
pub(super) fn number(is_skipped: fn(&[u8]) -> bool, number: impl Fn(&[usize]) -> u32) -> Option<u32> {
    let mut registers = MaybeUninit::uninit();
    let sp = save_registers(&mut registers);
    let record = registers.as_ptr().expose_provenance() as u64;
    let last = LAST.with(UnsafeCell::get);
    // SAFETY: it exists as long as the thread, only this thread uses it, and there is no other reference to it: `find` only calls
    // `word`.
    let last = unsafe { &*last };
    // SAFETY: `find` reads words on the thread's own stack, at and above `sp`, as they were when it was set, because the stack of a
    // thread does not move.
    if let Some(number) = last.find(sp, |address| unsafe { word(address) }) {
        return Some(number);
    }
    as_observer_cold(|| find(record, sp, is_skipped, number)).flatten()
}

/// Returns an id for the function that called the driver: the innermost one on this stack that is neither in this library nor in a file for
/// which `is_skipped` is true. For a new caller this is the result of `number`, which receives its return address.
///
/// Returns `None` in the same cases as [`number()`]. For a caller in the cache, it takes no lock and allocates nothing.
#[inline]
pub(super) fn caller(is_skipped: fn(&[u8]) -> bool, number: impl Fn(usize) -> u32) -> Option<u32> {
    let mut registers = MaybeUninit::uninit();
    let sp = save_registers(&mut registers);
    let record = registers.as_ptr().expose_provenance() as u64;
    let callers = CALLERS.with(UnsafeCell::get);
    // SAFETY: it exists as long as the thread, only this thread uses it, and there is no other reference to it: `find` only calls
    // `word`.
    let callers = unsafe { &*callers };
    // SAFETY: `find` reads words on the thread's own stack, at and above `sp`, at multiples of 8.
    if let Some(number) = callers.find(sp, |address| unsafe { word(address) }) {
        return Some(number);
    }
    as_observer_cold(|| find_caller(record, sp, is_skipped, number)).flatten()
}

/// Like [`caller`], for a caller that is not in the cache.
#[inline(never)]
fn find_caller(record: u64, sp: u64, is_skipped: fn(&[u8]) -> bool, number: impl Fn(usize) -> u32) -> Option<u32> {
    let of_thread = |walker: &RefCell<Option<Walker>>| {
        let walker = &mut *walker.try_borrow_mut().ok()?;
        let walker = walker.get_or_insert_with(Walker::new);
        if !walker.bounds.contains(&sp) || walker.failed >= MOST_FAILED {
            return None;
        }
        walker.failed += 1;
        let number = walker.walk_to_caller(record, sp, is_skipped, number)?;
        walker.failed = 0;
        Some(number)
    };
    WALKER.try_with(of_thread).ok()?
}

/// Stores the program counter and the registers. Returns the stack pointer.
#[allow(clippy::inline_always, reason = "the registers belong to the function that walks")]
#[inline(always)]
fn save_registers(registers: &mut MaybeUninit<Registers>) -> u64 {
    let sp: u64;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it writes the whole record at the address that it receives, and one register.
    unsafe {
        asm!(
            "lea {sp}, [rip]",
            "mov [{to}], {sp}",
            "mov [{to} + 8], rbx",
            "mov [{to} + 16], rbp",
            "mov [{to} + 24], r12",
            "mov [{to} + 32], r13",
            "mov [{to} + 40], r14",
            "mov [{to} + 48], r15",
            "mov qword ptr [{to} + 56], 0",
            "mov {sp}, rsp",
            to = in(reg) registers.as_mut_ptr(),
            sp = out(reg) sp,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: it writes the whole record at the address that it receives, and one register.
    unsafe {
        asm!(
            "adr {sp}, .",
            "str {sp}, [{to}]",
            "stp x19, x20, [{to}, #8]",
            "stp x21, x22, [{to}, #24]",
            "stp x23, x24, [{to}, #40]",
            "stp x25, x26, [{to}, #56]",
            "stp x27, x28, [{to}, #72]",
            "stp x29, x30, [{to}, #88]",
            "mov {sp}, sp",
            to = in(reg) registers.as_mut_ptr(),
            sp = out(reg) sp,
            options(nostack, preserves_flags),
        );
    }
    sp
}

/// Like [`number`], for another stack than the last one.
#[inline(never)]
fn find(record: u64, sp: u64, is_skipped: fn(&[u8]) -> bool, number: impl Fn(&[usize]) -> u32) -> Option<u32> {
    let of_thread = |walker: &RefCell<Option<Walker>>| {
        let walker = &mut *walker.try_borrow_mut().ok()?;
        let walker = walker.get_or_insert_with(Walker::new);
        if !walker.bounds.contains(&sp) {
            return None;
        }
        // The words that a walk reads include the registers. Their address depends only on `sp` and the program counter, which is
        // one of them.
        // SAFETY: `sp` is on this thread's stack, and the cache reads multiples of 8 from there up to the end of the stack.
        match walker.cache.find(sp, walker.bounds.end, |address| unsafe { word(address) }) {
            Some(stack) => {
                set_last(sp, stack);
                Some(stack.number)
            }
            None => walker.walk(record, sp, is_skipped, number),
        }
    };
    WALKER.try_with(of_thread).ok()?
}

/// Sets the thread's last stack.
#[inline]
fn set_last(sp: u64, stack: CachedStack<'_>) {
    // SAFETY: only this thread uses it, and there is no other reference to it now.
    LAST.with(|last| unsafe { &mut *last.get() }.set(sp, stack));
}

/// Forgets the last stack and the callers of the thread.
fn clear_last() {
    // SAFETY: as above.
    LAST.with(|last| unsafe { *last.get() = LastStack::NONE });
    // SAFETY: as above.
    CALLERS.with(|callers| unsafe { *callers.get() = CallerCache::EMPTY });
}

/// Empties the cache of the calling thread.
pub(super) fn forget() {
    clear_last();
    WALKER.with_borrow_mut(|walker| {
        if let Some(walker) = walker {
            walker.cache.clear();
        }
    });
}

/// Reads a word of the calling thread's stack.
///
/// # Safety
/// The address must be a multiple of 8 and on the stack on which this thread runs, not below the stack pointer.
unsafe fn word(address: u64) -> u64 {
    // SAFETY: this function's contract requires that the address is aligned and on the stack, and any word is a valid number. Another
    // thread may have a reference to a variable there (for example, one of `thread::scope`) and write to it at the same time, so the word
    // is read atomically. Such a word is neither a return address nor a saved register, so no stack depends on it.
    unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address_of(address))).load(Relaxed) }
}

impl Walker {
    fn new() -> Self {
        // If the bounds are not known, no address is inside them.
        let bounds = stack_of_thread().unwrap_or_default();
        Self { bounds, cache: StackCache::new(), unwinder: Unwinder::new(), modules: None, failed: 0 }
    }

    #[cold]
    fn walk(
        &mut self,
        record: u64,
        sp: u64,
        is_skipped: fn(&[u8]) -> bool,
        number: impl Fn(&[usize]) -> u32,
    ) -> Option<u32> {
        let modules = self.loaded_now(is_skipped)?;
        let Self { bounds, cache, unwinder, .. } = self;
        let mut walk = cache.start(sp);
        let mut read = reader(bounds, sp, |address, value| cache.add_word(&mut walk, address, value));
        let pc = read(record)?;
        let mut functions = Functions { addresses: [0; MAX_FUNCTIONS], count: 0, has_skipped: false };
        let start = WalkStart { pc, sp, registers: registers_at(record) };
        // SAFETY: the list was compared with the loader's just now. A file with a function on this thread's stack is not unloaded,
        // because the thread would return into it. What other threads load or unload during the walk has no function on this stack.
        unsafe { unwinder.walk(&modules, &start, read, |walked| functions.add(&walked)) }?;
        let number = number(&functions.addresses[..functions.count]);
        cache.insert(walk, number);
        Some(number)
    }

    #[cold]
    fn walk_to_caller(
        &mut self,
        record: u64,
        sp: u64,
        is_skipped: fn(&[u8]) -> bool,
        number: impl Fn(usize) -> u32,
    ) -> Option<u32> {
        let modules = self.loaded_now(is_skipped)?;
        let Self { bounds, unwinder, .. } = self;
        let mut way = Way::NONE;
        let mut read = reader(bounds, sp, |address, value| way.add(sp, bounds, address, value));
        let pc = read(record)?;
        let start = WalkStart { pc, sp, registers: registers_at(record) };
        let own = &modules.of(pc)?.code;
        let mut caller = None;
        let visit = |walked: WalkedFrame| {
            let is_inside = walked.is_skipped || own.contains(&walked.address);
            caller = (!is_inside).then_some(walked.address);
            is_inside
        };
        // SAFETY: as in `walk`.
        unsafe { unwinder.walk(&modules, &start, read, visit) }?;
        let number = number(address_of(caller?));
        // SAFETY: only this thread uses it, and there is no other reference to it now.
        CALLERS.with(|callers| unsafe { &mut *callers.get() }.insert(bounds, &way, number));
        Some(number)
    }

    /// Returns the list of loaded files. Drops cached data that may belong to an unloaded library.
    fn loaded_now(&mut self, is_skipped: fn(&[u8]) -> bool) -> Option<Arc<Modules>> {
        let modules = Modules::current(self.modules.as_ref(), is_skipped)?;
        if self.modules.as_ref().is_some_and(|known| known.generation.unloaded != modules.generation.unloaded) {
            clear_last();
            self.cache.clear();
            self.unwinder.clear();
        }
        self.modules = Some(Arc::clone(&modules));
        Some(modules)
    }
}

/// The addresses of the registers that [`save_registers`] has written.
fn registers_at(record: u64) -> RegisterAddresses {
    std::array::from_fn(|at| record + 8 * (1 + at as u64))
}

/// Reads words of the calling thread's stack from `sp` on, and passes each to `add`. Other addresses are not read.
fn reader(bounds: &Range<u64>, sp: u64, mut add: impl FnMut(u64, u64)) -> impl FnMut(u64) -> Option<u64> {
    let end = bounds.end;
    move |address| {
        let is_on_stack = address.is_multiple_of(8) && sp <= address && address.checked_add(8)? <= end;
        is_on_stack.then(|| {
            // SAFETY: it was compared with the bounds of this thread's stack, and with the stack pointer.
            let value = unsafe { word(address) };
            add(address, value);
            value
        })
    }
}

/// Returns the bounds of the calling thread's stack. For the main thread, the C library reads them from a file.
fn stack_of_thread() -> Option<Range<u64>> {
    let mut attributes = MaybeUninit::uninit();
    // SAFETY: the thread is this one, which runs. The call initializes the attributes unless it returns an error.
    if unsafe { libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) } != 0 {
        return None;
    }
    let (mut start, mut size) = (ptr::null_mut(), 0);
    // SAFETY: the attributes were initialized. They are read, and destroyed once.
    let is_known = unsafe {
        let answer = libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut size);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        answer == 0
    };
    let start = start.addr() as u64;
    is_known.then_some(start..start.checked_add(size as u64)?)
}

#[cfg(test)]
mod tests;
