//! The stacks of allocations. When a block is allocated, only the id of its stack is recorded. The stack is resolved to functions and lines
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

/// By default, stacks are recorded for blocks of at least this size. A program allocates such blocks in few places, so the thread's cache
/// contains their stacks.
const LARGE: u64 = 1 << 20;

/// The maximum number of different stacks that are kept. Further stacks get no id.
const CAPACITY: usize = 1 << 16;

/// The size from which on the stack of a block is recorded. Before [`start`], no block is that large.
static MIN_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);

/// True if the caller's file is recorded for smaller blocks.
static HAS_FILES: AtomicBool = AtomicBool::new(false);

/// Which blocks get their stack or file recorded. Does not change after [`start`].
#[derive(Clone, Copy)]
pub(super) struct StackFilter {
    min_bytes: u64,
    has_files: bool,
}

/// The stacks of a session.
#[derive(Default)]
pub struct StackTable(Mutex<NumberedStacks>);

#[derive(Default)]
struct NumberedStacks {
    numbers: HashMap<Arc<[usize]>, StackId, NumberHashBuilder>,
    /// The stacks by id; the first one has the id 1.
    stacks: Vec<Arc<[usize]>>,
}

impl StackTable {
    /// Returns the id of a stack. The same stack always gets the same id. Returns 0 if the stack is empty or there are too many stacks.
    /// `define` is called with the id of a new stack before any thread gets the id.
    pub fn number(&self, addresses: &[usize], define: impl FnOnce(StackId)) -> StackId {
        self.lock().number(addresses, define)
    }

    /// Returns the id of a stack, if it already has one.
    pub fn find(&self, addresses: &[usize]) -> Option<StackId> {
        self.lock().numbers.get(addresses).copied()
    }

    /// Calls `start`, and returns all stacks that had an id at that time.
    pub fn all_before(&self, start: impl FnOnce()) -> Vec<(StackId, Arc<[usize]>)> {
        let stacks = self.lock();
        start();
        (1..).map(StackId).zip(stacks.stacks.iter().cloned()).collect()
    }

    /// Returns the return addresses of a stack, innermost first. Empty if the id is 0.
    pub fn get(&self, number: StackId) -> Arc<[usize]> {
        self.lock().get(number)
    }

    fn lock(&self) -> MutexGuard<'_, NumberedStacks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts to record the stacks of the process's blocks, as the settings request.
pub(super) fn start(settings: &Settings) {
    walks::start(settings.stacks == settings::Stacks::Python);
    let min_bytes = min_bytes_of(settings);
    MIN_BYTES.store(min_bytes, Relaxed);
    // A program that uses gpumem itself may contain its code. The end of that code is then not known.
    HAS_FILES.store(settings.is_foreign && min_bytes < u64::MAX, Relaxed);
}

/// Returns the size from which on the stack of a block is recorded.
pub fn min_bytes_of(settings: &Settings) -> u64 {
    match settings.stacks {
        settings::Stacks::Large | settings::Stacks::Python => LARGE,
        settings::Stacks::None => u64::MAX,
        settings::Stacks::All => 0,
    }
}

impl StackFilter {
    /// Records no stacks.
    #[cfg(feature = "cuda")]
    pub(super) const NONE: Self = Self { min_bytes: u64::MAX, has_files: false };

    pub(super) fn now() -> Self {
        Self { min_bytes: MIN_BYTES.load(Relaxed), has_files: HAS_FILES.load(Relaxed) }
    }

    /// Returns the id to record for a block of this size: the id of the calling thread's stack, or of the caller's file.
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

/// Like [`StackFilter::stack_for`], with the current settings.
#[inline]
pub(super) fn stack_for(bytes: u64) -> StackId {
    StackFilter::now().stack_for(bytes)
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
