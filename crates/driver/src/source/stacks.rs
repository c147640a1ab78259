//! The stacks of allocations. A stack is recorded as a number when a block is allocated, and resolved to functions and lines only
//! when it is read.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use super::walks;
use crate::{
    model::{NumberHashBuilder, StackId},
    settings::{self, Settings},
};

/// By default, stacks are recorded for blocks of at least this size. A program allocates such blocks in few places, whose stacks
/// are in the thread's cache.
const LARGE: u64 = 1 << 20;

/// The number of different stacks that are kept. All further ones have no number.
const CAPACITY: usize = 1 << 16;

/// Stacks are recorded for blocks of at least this size. No block is that large before [`begin`].
static MIN_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);

/// True if the file of the caller is recorded for smaller blocks.
static HAS_FILES: AtomicBool = AtomicBool::new(false);

/// The blocks whose stacks or files are recorded. It does not change after [`begin`].
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    min_bytes: u64,
    has_files: bool,
}

/// The stacks of a session.
#[derive(Default)]
pub struct StackTable(Mutex<NumberedStacks>);

#[derive(Default)]
struct NumberedStacks {
    numbers: HashMap<Arc<[usize]>, StackId, NumberHashBuilder>,
    /// The stacks by number; the first one has number 1.
    stacks: Vec<Arc<[usize]>>,
}

impl StackTable {
    /// Returns the number of a stack; the same each time. 0 if the stack is empty, or if there are too many stacks. `define` is
    /// called with the number of a new stack, before any thread gets it.
    pub fn number(&self, addresses: &[usize], define: impl FnOnce(StackId)) -> StackId {
        self.lock().number(addresses, define)
    }

    /// The number of a stack that has one.
    pub fn find(&self, addresses: &[usize]) -> Option<StackId> {
        self.lock().numbers.get(addresses).copied()
    }

    /// Calls `begin`, and returns all stacks that had numbers then.
    pub fn all_before(&self, begin: impl FnOnce()) -> Vec<(StackId, Arc<[usize]>)> {
        let stacks = self.lock();
        begin();
        (1..).map(StackId).zip(stacks.stacks.iter().cloned()).collect()
    }

    /// Returns the return addresses of a stack, innermost first. Empty if the number is 0.
    pub fn get(&self, number: StackId) -> Arc<[usize]> {
        self.lock().get(number)
    }

    fn lock(&self) -> MutexGuard<'_, NumberedStacks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the stacks of the process's blocks as the settings say, from now on.
pub(super) fn begin(settings: &Settings) {
    walks::begin(settings.stacks == settings::Stacks::Python);
    let min_bytes = min_bytes_of(settings);
    MIN_BYTES.store(min_bytes, Relaxed);
    // A program that knows gpumem may contain it, and then the end of gpumem's code is not known.
    HAS_FILES.store(settings.is_foreign && min_bytes < u64::MAX, Relaxed);
}

/// The size from which on the stack of a block is recorded.
pub fn min_bytes_of(settings: &Settings) -> u64 {
    match settings.stacks {
        settings::Stacks::Large | settings::Stacks::Python => LARGE,
        settings::Stacks::None => u64::MAX,
        settings::Stacks::All => 0,
    }
}

impl Wanted {
    /// Records no stacks.
    #[cfg(feature = "cuda")]
    pub(super) const NONE: Self = Self { min_bytes: u64::MAX, has_files: false };

    pub(super) fn now() -> Self {
        Self { min_bytes: MIN_BYTES.load(Relaxed), has_files: HAS_FILES.load(Relaxed) }
    }

    /// Returns the number that is recorded for blocks of this size: that of the calling thread's stack, or of the file
    /// of the caller.
    #[inline]
    pub(super) fn stack_for(self, bytes: u64) -> StackId {
        if bytes >= self.min_bytes {
            walks::current_stack()
        } else if self.has_files {
            walks::current_file()
        } else {
            StackId::NONE
        }
    }
}

/// Does the same as [`Wanted::stack_for`].
#[inline]
pub(super) fn stack_for(bytes: u64) -> StackId {
    Wanted::now().stack_for(bytes)
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
