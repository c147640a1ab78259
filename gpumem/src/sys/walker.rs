//! The calling thread's stack by number: remembered, else walked.

mod memo;
mod modules;
mod unwind;

use std::{
    arch::asm,
    cell::{RefCell, UnsafeCell},
    mem::MaybeUninit,
    ops::Range,
    ptr,
    sync::Arc,
};

use self::{
    memo::{Known, Memo, Recent},
    modules::Modules,
    unwind::{KEPT, Kept, Start, Unwinder, Walked},
};
use super::stack::as_observer_cold;

/// Functions that are told of. The user's line is among them, however many a framework puts between it and the driver.
const MOST: usize = 128;

/// What is told of a stack: not the functions of files that are to be skipped. The driver's are the same on each stack.
struct Told {
    addresses: [usize; MOST],
    count: usize,
    /// The walk has come to a function that is skipped.
    is_behind: bool,
}

impl Told {
    /// Adds a function, and says whether there is room for more.
    fn add(&mut self, walked: &Walked) -> bool {
        if walked.is_skipped {
            // What the driver calls is what listens to it, and no more.
            self.count = if self.is_behind { self.count } else { 0 };
            self.is_behind = true;
        } else if let Some(place) = self.addresses.get_mut(self.count) {
            *place = unwind::address(walked.address);
            self.count += 1;
        }
        self.count < MOST
    }
}

/// What a thread has for its stacks, less than 64 KiB, from its first one to its end.
struct Walker {
    /// The thread's stack. Nothing outside of it is read.
    bounds: Range<u64>,
    memo: Memo,
    unwinder: Unwinder,
    modules: Option<Arc<Modules>>,
}

thread_local! {
    // Without a destructor, it is found by one look.
    static RECENT: UnsafeCell<Recent> = const { UnsafeCell::new(Recent::NONE) };
    static WALKER: RefCell<Option<Walker>> = const { RefCell::new(None) };
}

/// The program counter, then the registers that functions keep, as they are where the program counter is.
type Registers = [u64; 1 + KEPT.len()];

/// What `number` says of the return addresses of the calling thread's stack, innermost first, or said of the same stack
/// before: it has to say the same of equal ones. It is given at most [`MOST`], without those of files that are to be skipped, nor of
/// what is called by the innermost of these.
///
/// `None` where this cannot be known: the thread runs on another stack than its own or is about to end, or a function on it
/// is in no file, or in one without tables. It does not panic, and takes no lock and allocates nothing for a stack that is
/// remembered.
#[inline]
pub(super) fn number(is_skipped: fn(&[u8]) -> bool, number: impl Fn(&[usize]) -> u32) -> Option<u32> {
    let mut registers = MaybeUninit::<Registers>::uninit();
    let sp: u64;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it writes all of the record, which it is handed, and a register.
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
    // SAFETY: it writes all of the record, which it is handed, and a register.
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
    let registers = registers.as_ptr().expose_provenance() as u64;
    let recent = RECENT.with(UnsafeCell::get);
    // SAFETY: it lives as long as the thread, which alone has it, and nobody else refers to it: what is called here reads words.
    // They are on the thread's own stack, at and above `sp`, as they were when it was kept: a thread's stack begins at one
    // address all its life.
    if let Some(known) = unsafe { &*recent }.find(sp, word) {
        return Some(known);
    }
    as_observer_cold(|| find(registers, sp, is_skipped, number)).flatten()
}

/// As [`number`], of a stack that is not the thread's last.
#[inline(never)]
fn find(registers: u64, sp: u64, is_skipped: fn(&[u8]) -> bool, number: impl Fn(&[usize]) -> u32) -> Option<u32> {
    let of_thread = |walker: &RefCell<Option<Walker>>| {
        let walker = &mut *walker.try_borrow_mut().ok()?;
        let walker = walker.get_or_insert_with(Walker::new);
        if !walker.bounds.contains(&sp) {
            return None;
        }
        // The place of the registers is the same each time at the same place in the program, which the first of them is.
        match walker.memo.find(sp, walker.bounds.end, word) {
            Some(known) => {
                keep(sp, known);
                Some(known.number)
            }
            None => walker.walk(registers, sp, is_skipped, number),
        }
    };
    WALKER.try_with(of_thread).ok()?
}

/// This is the thread's last stack from now on.
fn keep(sp: u64, known: Known<'_>) {
    // SAFETY: this thread alone has it, and nobody else refers to it meanwhile.
    RECENT.with(|recent| unsafe { &mut *recent.get() }.keep(sp, known));
}

/// The thread has no last stack.
fn forget_recent() {
    // SAFETY: as above.
    RECENT.with(|recent| unsafe { *recent.get() = Recent::NONE });
}

/// The calling thread remembers no stack from before.
#[cfg(feature = "bench")]
pub(super) fn forget() {
    forget_recent();
    WALKER.with_borrow_mut(|walker| {
        if let Some(walker) = walker {
            walker.memo.clear();
        }
    });
}

/// A word of the calling thread's stack.
fn word(address: u64) -> u64 {
    // SAFETY: whoever asks has compared the address with the bounds of the stack that this thread runs on and is the only one
    // to write to, and found it at or above the stack pointer. It is a multiple of 8, and whatever is there is some number.
    unsafe { ptr::with_exposed_provenance::<u64>(unwind::address(address)).read_volatile() }
}

impl Walker {
    fn new() -> Self {
        // Where they are not known nothing is in them.
        let bounds = stack_of_thread().unwrap_or_default();
        Self { bounds, memo: Memo::new(), unwinder: Unwinder::new(), modules: None }
    }

    #[cold]
    fn walk(
        &mut self,
        registers: u64,
        sp: u64,
        is_skipped: fn(&[u8]) -> bool,
        number: impl Fn(&[usize]) -> u32,
    ) -> Option<u32> {
        let modules = Modules::current(self.modules.as_ref(), is_skipped)?;
        if self.modules.as_ref().is_some_and(|known| known.generation.unloaded != modules.generation.unloaded) {
            // What was understood of a library may be of one that is no longer there.
            forget_recent();
            self.memo.clear();
            self.unwinder.clear();
        }
        self.modules = Some(Arc::clone(&modules));
        let Self { bounds, memo, unwinder, .. } = self;
        let mut note = memo.begin(sp);
        let mut read = |address: u64| {
            let is_of_stack = address.is_multiple_of(8) && sp <= address && address.checked_add(8)? <= bounds.end;
            is_of_stack.then(|| {
                let value = word(address);
                memo.note(&mut note, address, value);
                value
            })
        };
        let pc = read(registers)?;
        let kept: Kept = std::array::from_fn(|at| registers + 8 * (1 + at as u64));
        let mut told = Told { addresses: [0; MOST], count: 0, is_behind: false };
        unwinder.walk(&modules, &Start { pc, sp, kept }, read, |walked| told.add(&walked))?;
        let number = number(&told.addresses[..told.count]);
        memo.keep(note, number);
        Some(number)
    }
}

/// The bounds of the calling thread's stack. Of the first thread the C library reads them in a file.
fn stack_of_thread() -> Option<Range<u64>> {
    let mut attributes = MaybeUninit::uninit();
    // SAFETY: it asks for this thread, which runs, and fills the record in unless it says otherwise.
    if unsafe { libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) } != 0 {
        return None;
    }
    let (mut start, mut size) = (ptr::null_mut(), 0);
    // SAFETY: the record was filled in, is read, and is given back once.
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
