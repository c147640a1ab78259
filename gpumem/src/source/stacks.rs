//! The stacks of allocations. A stack is recorded as a number when a block is allocated, and resolved to functions and lines only
//! when it is read.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use super::hasher::AddressHasher;
#[cfg(feature = "backtrace")]
use super::recorder;
use crate::{
    model::{Frame, StackId},
    settings::{self, Settings},
};

/// By default, stacks are recorded for blocks of at least this size. A program allocates such blocks in few places, whose stacks
/// are in the thread's cache.
const LARGE: u64 = 1 << 20;

/// The number of different stacks that are kept. All further ones have no number.
const CAPACITY: usize = 1 << 16;

/// Stacks are recorded for blocks of at least this size. No block is that large before [`begin`].
static MIN_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);

/// Stacks have Python's functions as well.
static IS_PYTHON_RECORDED: AtomicBool = AtomicBool::new(false);

/// The stacks of a session.
#[derive(Default)]
pub(crate) struct StackTable(Mutex<NumberedStacks>);

#[derive(Default)]
struct NumberedStacks {
    numbers: HashMap<Arc<[usize]>, StackId, BuildHasherDefault<AddressHasher>>,
    /// By number; the first one has number 1.
    stacks: Vec<Arc<[usize]>>,
}

impl StackTable {
    /// The number of a stack; the same each time. 0 if the stack is empty, or if there are too many stacks. `define` is called with
    /// the number of a new stack, before any thread gets it.
    pub(crate) fn number(&self, addresses: &[usize], define: impl FnOnce(StackId)) -> StackId {
        self.lock().number(addresses, define)
    }

    /// The number of a stack that has one.
    #[cfg(feature = "capture")]
    pub(crate) fn find(&self, addresses: &[usize]) -> Option<StackId> {
        self.lock().numbers.get(addresses).copied()
    }

    /// Calls `begin`, and returns all stacks that had numbers then.
    #[cfg(feature = "capture")]
    pub(crate) fn all_before(&self, begin: impl FnOnce()) -> Vec<(StackId, Arc<[usize]>)> {
        let stacks = self.lock();
        begin();
        (1..).map(StackId).zip(stacks.stacks.iter().cloned()).collect()
    }

    /// The return addresses of a stack, innermost first. Empty if the number is 0.
    pub(crate) fn get(&self, number: StackId) -> Arc<[usize]> {
        self.lock().get(number)
    }

    fn lock(&self) -> MutexGuard<'_, NumberedStacks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From now on the stacks of the process's blocks are recorded as the settings say.
pub(super) fn begin(settings: &Settings) {
    let is_python_recorded = settings.stacks == settings::Stacks::Python;
    #[cfg(feature = "backtrace")]
    if is_python_recorded {
        super::python::begin();
    }
    IS_PYTHON_RECORDED.store(is_python_recorded, Relaxed);
    MIN_BYTES.store(min_bytes_of(settings), Relaxed);
}

/// The size from which on the stack of a block is recorded.
pub(crate) fn min_bytes_of(settings: &Settings) -> u64 {
    match settings.stacks {
        settings::Stacks::Large | settings::Stacks::Python => LARGE,
        settings::Stacks::None => u64::MAX,
        settings::Stacks::All => 0,
    }
}

/// The size from which on the stack of a block is recorded. It does not change after [`begin`].
#[cfg(any(feature = "sim", feature = "cupti", feature = "dispatch"))]
pub(super) fn min_bytes() -> u64 {
    MIN_BYTES.load(Relaxed)
}

/// The number of the calling thread's stack, if stacks are recorded for blocks of this size.
#[cfg(any(feature = "sim", feature = "cupti", feature = "dispatch"))]
#[inline]
pub(super) fn stack_for(bytes: u64) -> StackId {
    if bytes < min_bytes() { StackId::NONE } else { current_stack() }
}

/// The number of the calling thread's stack.
#[cfg(feature = "backtrace")]
#[inline]
pub(crate) fn current_stack() -> StackId {
    // The driver's functions are left out, since they are the same on each stack, and so are the hook or callback inside them.
    let is_driver = |file: &[u8]| std::str::from_utf8(file).is_ok_and(crate::model::is_driver);
    let native = StackId(crate::sys::stack::number(is_driver, |addresses| recorder::number_stack(addresses).0));
    if IS_PYTHON_RECORDED.load(Relaxed) {
        return super::python::with_python(native);
    }
    native
}

#[cfg(not(feature = "backtrace"))]
pub(crate) fn current_stack() -> StackId {
    StackId::NONE
}

/// The three ways to a stack's number: with the thread's cache, without it, and by the unwinder of the system.
#[cfg(all(feature = "__internal", feature = "backtrace"))]
pub(crate) const WAYS_TO_A_STACK: [fn() -> StackId; 3] = [
    current_stack,
    || {
        crate::sys::stack::forget();
        current_stack()
    },
    || StackId(crate::sys::stack::captured(|addresses| recorder::number_stack(addresses).0)),
];

/// The stack of the calling thread, without the thread's cache: the numbers in the cache are those of the process's session.
#[cfg(all(feature = "backtrace", feature = "sim"))]
pub(crate) fn uncached_stack(number: impl Fn(&[usize]) -> StackId) -> StackId {
    StackId(crate::sys::stack::captured(|addresses| number(addresses).0))
}

#[cfg(all(not(feature = "backtrace"), feature = "sim"))]
pub(crate) fn uncached_stack(_: impl Fn(&[usize]) -> StackId) -> StackId {
    StackId::NONE
}

/// The return addresses of the calling thread's stack, innermost first: at most 256. Empty without the feature.
#[cfg(feature = "backtrace")]
pub(crate) fn addresses_here() -> Vec<usize> {
    let mut addresses = [0; 256];
    let count = crate::sys::stack::capture(&mut addresses, 1);
    addresses[..count].to_vec()
}

#[cfg(not(feature = "backtrace"))]
pub(crate) fn addresses_here() -> Vec<usize> {
    Vec::new()
}

/// The functions at these return addresses, innermost first. Slow, so only for printing.
#[cfg(feature = "backtrace")]
pub(crate) fn frames(addresses: &[usize]) -> Vec<Frame> {
    super::stack::frames(addresses)
}

#[cfg(not(feature = "backtrace"))]
pub(crate) fn frames(_: &[usize]) -> Vec<Frame> {
    Vec::new()
}

/// The files of the program and of libraries that contain return addresses, and where they are mapped.
#[cfg(all(feature = "backtrace", feature = "capture"))]
pub(crate) use crate::sys::stack::{LoadedFile, files_of};

/// The frame of a line of Python, whose number is on a stack in the place of an address.
#[cfg(all(feature = "backtrace", feature = "capture"))]
pub(crate) use super::python::frame as python_frame;

#[cfg(all(not(feature = "backtrace"), feature = "capture"))]
pub(crate) fn python_frame(_: usize) -> Option<Frame> {
    None
}

/// Without the feature there are no stacks.
#[cfg(all(not(feature = "backtrace"), feature = "capture"))]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct LoadedFile {
    pub(crate) path: std::path::PathBuf,
    pub(crate) base: usize,
    pub(crate) notes: Vec<u8>,
}

#[cfg(all(not(feature = "backtrace"), feature = "capture"))]
pub(crate) fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
    vec![None; addresses.len()]
}

/// The file name of the program or library that contains this crate.
#[cfg(feature = "backtrace")]
pub(crate) fn own_module() -> Option<String> {
    static OWN: once_cell::sync::OnceCell<Option<String>> = once_cell::sync::OnceCell::new();
    let find = || {
        let here = own_module as *const ();
        crate::sys::stack::module_of(here.addr() + 1)?.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    OWN.get_or_init(find).clone()
}

#[cfg(not(feature = "backtrace"))]
pub(crate) fn own_module() -> Option<String> {
    None
}

impl NumberedStacks {
    fn number(&mut self, addresses: &[usize], define: impl FnOnce(StackId)) -> StackId {
        if let Some(number) = self.numbers.get(addresses) {
            return *number;
        }
        if addresses.is_empty() || self.stacks.len() >= CAPACITY {
            return StackId::NONE;
        }
        let stack: Arc<[usize]> = addresses.into();
        self.stacks.push(Arc::clone(&stack));
        let number = StackId(u32::try_from(self.stacks.len()).unwrap_or(0));
        self.numbers.insert(stack, number);
        define(number);
        number
    }

    fn get(&self, number: StackId) -> Arc<[usize]> {
        let at = (number.0 as usize).checked_sub(1);
        at.and_then(|at| self.stacks.get(at)).cloned().unwrap_or_default()
    }
}
