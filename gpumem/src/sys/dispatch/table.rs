//! Finds the slots, puts hooks into them, and takes them out again.

use std::{
    ffi::{CString, c_void},
    mem,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst, fence},
    },
};

use libloading::Library;
use once_cell::sync::OnceCell;

use super::{
    image::Image,
    stub::Processor,
    verify::{Found, verify},
};
use crate::{
    error::{Error, Kind},
    sys::{
        calls::{
            Arguments, CALLS, Call, Caller, Memory, Named, Null, Observe, STATE, Shape, State, Tell, Told, at_enter,
            at_exit, in_state, with_calls,
        },
        cuda, dl, loader, process,
    },
};

/// Tried in this order: a program has loaded the first, whatever else is installed beside it.
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];

const PROCESSOR: Processor = if cfg!(target_arch = "x86_64") { Processor::X86_64 } else { Processor::Arm64 };

/// All that hooks read, and nothing else: what two hooks read that are called by turns lies in one line of the cache.
#[repr(C, align(64))]
struct Hooks {
    /// Hooks tell what they see. They are also called while this is false: by threads that were on their way into one, and by
    /// another tool that put its own hook on top of ours and goes on calling it. It is false in the child of a fork: locks that
    /// the observer takes may be held for ever there.
    active: AtomicBool,
    /// The driver's own implementations, by row of [`CALLS`]; set before the slot is replaced.
    drivers: [AtomicUsize; CALLS.len()],
    /// What takes their places, which only the functions below read.
    replacements: [AtomicUsize; CALLS.len()],
}

static HOOKS: Hooks = Hooks {
    active: AtomicBool::new(false),
    drivers: [const { AtomicUsize::new(0) }; CALLS.len()],
    replacements: [const { AtomicUsize::new(0) }; CALLS.len()],
};

/// Guards the slots against two threads of ours.
static LIVE: Mutex<bool> = Mutex::new(false);

/// The slots of the functions that this driver has.
struct Table {
    path: String,
    slots: Vec<Slot>,
}

struct Slot {
    row: usize,
    /// Where the pointer is. It lives as long as the driver, which is never unloaded.
    pointer: &'static AtomicUsize,
    /// The driver's own implementation.
    driver: usize,
}

impl Slot {
    /// What takes the place of the driver's implementation, once that was done.
    fn hook(&self) -> usize {
        HOOKS.replacements[self.row].load(Relaxed)
    }

    fn replace(&self, old: usize, new: usize) -> bool {
        self.pointer.compare_exchange(old, new, SeqCst, Relaxed).is_ok()
    }

    /// It may be there still: a tool that was above it when the last subscription ended has written it back since.
    fn insert_block(&self) -> bool {
        self.replace(self.driver, self.hook()) || self.pointer.load(SeqCst) == self.hook()
    }
}

/// Whether the dispatch table of this process's driver can be used.
pub(crate) fn is_there() -> Result<(), Error> {
    table().map(|_| ())
}

/// Has `O` told of each fact from now on, on the thread that makes the call. What it allocates or frees itself is
/// [`Call::Uncounted`], but for what is done [`outside`](crate::sys::calls::outside). Subscribing twice is subscribing once.
///
/// The driver is loaded, but not initialised: this may be called while it initialises itself.
pub(crate) fn subscribe<O: Observe>() -> Result<(), Error> {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    if *live {
        return Ok(());
    }
    let table = table()?;
    cuda::load()?;
    loader::pin().map_err(refused)?;
    process::at_fork(|| HOOKS.active.store(false, Relaxed));
    let hooks = hooks::<O>();
    for slot in &table.slots {
        HOOKS.drivers[slot.row].store(slot.driver, Relaxed);
        HOOKS.replacements[slot.row].store(hooks[slot.row], Relaxed);
    }
    HOOKS.active.store(true, SeqCst);
    if let Some(taken) = table.slots.iter().position(|slot| !slot.insert_block()) {
        remove_block(&table.slots[..taken]);
        let name = CALLS[table.slots[taken].row].1;
        return Err(refused(format!("another tool has replaced the pointer of {name}")));
    }
    *live = true;
    Ok(())
}

/// Takes the hooks out, where they are still in their slots.
pub(crate) fn unsubscribe() {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    if !mem::take(&mut *live) {
        return;
    }
    if let Ok(table) = table() {
        remove_block(&table.slots);
    }
}

fn remove_block(slots: &[Slot]) {
    for slot in slots {
        slot.replace(slot.hook(), slot.driver);
    }
    HOOKS.active.store(false, SeqCst);
}

/// The library whose table is in use; `None` if it is not in use.
pub(crate) fn subscribed() -> Option<&'static str> {
    let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.then(|| table().ok()).flatten().map(|table| table.path.as_str())
}

/// Which slots do not hold our hooks any more, a bit for each row of [`CALLS`]: another tool replaced them or wrote back what it
/// found before us, and calls may be missed.
pub(crate) fn displaced() -> u128 {
    const { assert!(CALLS.len() <= 128) };
    if !HOOKS.active.load(Relaxed) {
        return 0;
    }
    let Ok(table) = table() else { return 0 };
    let displaced = table.slots.iter().filter(|slot| slot.pointer.load(Relaxed) != slot.hook());
    displaced.fold(0, |rows, slot| rows | 1 << slot.row)
}

fn refused(detail: impl Into<String>) -> Error {
    Kind::NoDispatch { detail: detail.into() }.into()
}

/// The slots, found and checked once.
fn table() -> Result<&'static Table, Error> {
    static TABLE: OnceCell<Result<Table, Error>> = OnceCell::new();
    TABLE.get_or_init(Table::find).as_ref().map_err(Clone::clone)
}

impl Table {
    fn find() -> Result<Self, Error> {
        let (library, _) = dl::open(cuda::LIBRARY, NAMES.iter().map(PathBuf::from))?;
        // What a driver does not have nobody calls.
        let rows: Vec<(usize, &str, usize)> = CALLS
            .iter()
            .enumerate()
            .filter_map(|(row, (_, name, _))| Some((row, *name, symbol(&library, name)?)))
            .collect();
        let (_, name, address) = rows.first().ok_or_else(|| refused("the driver has none of the functions"))?;
        let nowhere = || refused(format!("{name} is in no library"));
        let image = Image::around(*address).ok_or_else(nowhere)?;
        let path = loader::at(*address).map(|found| found.file).ok_or_else(nowhere)?;
        let functions: Vec<_> = rows.iter().map(|(_, name, address)| (*name, *address)).collect();
        let found = verify(&image, PROCESSOR, &functions).map_err(refused)?;
        let slot = |((row, ..), found): (&(usize, &str, usize), Found)| Slot {
            row: *row,
            // SAFETY: the slot is aligned and in the writable data of the driver, which is never unloaded since `library` is
            // forgotten below. The driver itself reads it as one pointer.
            pointer: unsafe { AtomicUsize::from_ptr(found.stub.slot as *mut usize) },
            driver: found.implementation,
        };
        let slots = rows.iter().zip(found).map(slot).collect();
        // The slots stay valid: the library is never unloaded.
        mem::forget(library);
        Ok(Self { path: path.display().to_string(), slots })
    }
}

fn symbol(library: &Library, name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the symbol is only looked up, as an address that is not called; the library stays loaded.
    unsafe { library.get::<*const c_void>(name.as_bytes_with_nul()).ok()?.try_as_raw_ptr() }.map(|at| at as usize)
}

macro_rules! hooks {
    ($($number:literal $name:ident($($argument:ident),*): $shape:expr;)*) => {
        /// The rows of [`CALLS`] by name.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Row { $($name),* }

        /// What takes the place of each implementation. Integers and pointers travel in registers, one each, whatever their
        /// width, so that each is received and passed on as a whole word.
        #[allow(non_snake_case)]
        mod hook {
            use super::*;

            $(
                pub(super) unsafe extern "C" fn $name<O: Observe>($($argument: u64),*) -> u32 {
                    type Implementation = unsafe extern "C" fn($(hooks!(@word $argument)),*) -> u32;
                    let row = Row::$name as usize;
                    let words = [$($argument),*];
                    // SAFETY: the words are the arguments of this call, which has this shape.
                    unsafe {
                        intercept::<O, _>(row, $shape, &words, |driver| {
                            // SAFETY: it is the address of the driver's implementation, which has these arguments and
                            // returns a `CUresult`.
                            let driver = mem::transmute::<usize, Implementation>(driver);
                            driver($($argument),*)
                        })
                    }
                }
            )*
        }

        /// The hooks that tell `O`, by row.
        fn hooks<O: Observe>() -> [usize; CALLS.len()] {
            [$(hook::$name::<O> as *const () as usize),*]
        }
    };
    (@word $argument:ident) => { u64 };
}
with_calls!(hooks);

/// Makes a call of the driver, and tells of it.
///
/// # Safety
/// `words` are the arguments of a call of this shape, and `call` makes that call by the implementation at the address that it
/// is given.
#[allow(clippy::inline_always, reason = "the shape is a constant in each hook, and most of this is not there then")]
#[inline(always)]
unsafe fn intercept<O: Observe, const N: usize>(
    row: usize,
    shape: Shape,
    words: &[u64; N],
    call: impl FnOnce(usize) -> u32,
) -> u32 {
    let driver = || HOOKS.drivers[row].load(Relaxed);
    let driver = match driver() {
        // It is written before the slot, but an Arm processor may have read it before the slot. After the fence it has not.
        0 if cfg!(target_arch = "aarch64") => {
            fence(Acquire);
            driver()
        }
        driver => driver,
    };
    let state = STATE.get();
    // What an implementation calls in turn is a part of the call that is counted already.
    if matches!(state, State::Driver | State::Own) || !HOOKS.active.load(Relaxed) {
        return call(driver);
    }
    let to = Told::<O>::by(Caller::Dispatch);
    // SAFETY: the words stay where they are until this returns.
    let arguments = unsafe { Arguments::new(words.as_ptr()) };
    let first = words[0];
    if state == State::Observer {
        // SAFETY: the arguments are those of a call of this shape, and this is the first.
        return unsafe { around(shape, first, arguments, || call(driver), &to.of_observer()) };
    }
    // SAFETY: as above.
    unsafe { around(shape, first, arguments, || call(driver), &to) }
}

/// Makes a call, and reads it before and after.
///
/// # Safety
/// `arguments` are those of the call, which has this shape, and `first` is the first of them.
#[allow(clippy::inline_always, reason = "as above")]
#[inline(always)]
unsafe fn around(shape: Shape, first: u64, arguments: Arguments, call: impl FnOnce() -> u32, to: &impl Tell) -> u32 {
    if let Shape::PrimaryRelease | Shape::PrimaryReset = shape {
        return primary(shape, first, call, to);
    }
    // SAFETY: the arguments are those of a call of this shape.
    unsafe { at_enter(shape, arguments, to) };
    let before = STATE.replace(State::Driver);
    // It does not unwind: it is a function of C.
    let result = call();
    STATE.set(before);
    // SAFETY: as above; the call has returned.
    unsafe { at_exit(shape, result, arguments, to) };
    result
}

/// Gives a reference to a primary context back, or resets it. Which context that is, and whether that was the last reference,
/// the driver has to be asked.
#[cold]
fn primary(shape: Shape, device: u64, call: impl FnOnce() -> u32, to: &impl Tell) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "an int lies in the word's lower half")]
    let device = device as i32;
    let context = in_state(State::Driver, || cuda::primary_context(device));
    let gone = || {
        if let Some(handle) = context {
            to.tell(&Call::ContextGone { handle });
        }
    };
    if shape == Shape::PrimaryReset {
        gone();
    }
    let result = in_state(State::Driver, call);
    if shape == Shape::PrimaryRelease && !in_state(State::Driver, || cuda::has_primary_context(device)) {
        gone();
    }
    result
}

/// For benchmarks: the hooks of the stream-ordered calls around functions that stand for the driver's, as safe functions.
#[cfg(feature = "bench")]
pub(crate) mod rehearsal {
    use super::{AtomicUsize, HOOKS, Observe, Relaxed, Row, SeqCst, hook};

    /// `cuMemAllocAsync` of 4 KiB and `cuMemFreeAsync` on a stream, through the hooks.
    pub(crate) fn pair<O: Observe>(stream: u64, bytes: u64) {
        let mut address = 0_u64;
        // SAFETY: the hooks call the two functions below, which take what is passed.
        unsafe {
            hook::cuMemAllocAsync::<O>((&raw mut address) as u64, bytes, stream);
            hook::cuMemFreeAsync::<O>(std::hint::black_box(address), stream);
        }
    }

    /// The same without hooks.
    pub(crate) fn bare_pair(stream: u64, bytes: u64) {
        let mut address = 0_u64;
        // SAFETY: the out-parameter is live.
        unsafe {
            std::hint::black_box(alloc as unsafe extern "C" fn(u64, u64, u64) -> u32)(
                (&raw mut address) as u64,
                bytes,
                stream,
            );
        }
        std::hint::black_box(free as extern "C" fn(u64, u64) -> u32)(std::hint::black_box(address), stream);
    }

    pub(crate) fn begin() {
        HOOKS.drivers[Row::cuMemAllocAsync as usize].store(alloc as *const () as usize, Relaxed);
        HOOKS.drivers[Row::cuMemFreeAsync as usize].store(free as *const () as usize, Relaxed);
        HOOKS.active.store(true, SeqCst);
    }

    unsafe extern "C" fn alloc(out: u64, _: u64, _: u64) -> u32 {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.load(Relaxed);
        NEXT.store(next.wrapping_add(1), Relaxed);
        // SAFETY: the caller passes where the address goes.
        unsafe { (out as *mut u64).write(0x7f00_0000_0000 + (next as u64 % 64) * 4096) };
        0
    }

    extern "C" fn free(_: u64, _: u64) -> u32 {
        0
    }
}
