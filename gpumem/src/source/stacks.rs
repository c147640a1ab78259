//! Where allocations are made: stacks by number, taken down when a block is asked for, and understood when somebody reads.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use once_cell::sync::Lazy;

use crate::model::{Frame, MemKind, StackId};

/// Half of them are the callback's, CUPTI's and the driver's; the rest leads through a library or a framework to the user's line.
/// A function costs 0.16 µs, so a stack stays below 5 µs.
const MOST_FRAMES: usize = 24;

/// The driver takes ten times as long as the walk to give out so much.
const LARGE: u64 = 1 << 20;

/// Stacks that differ. More of them are not told apart.
const MOST: usize = 1 << 16;

/// From which size on stacks are taken down: of stream-ordered memory, and of other memory. Nobody's before anybody listens.
static LEAST: [AtomicU64; 2] = [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)];

#[derive(Default)]
struct Stacks {
    known: HashMap<Arc<[usize]>, StackId>,
    /// By number, from 1 on.
    all: Vec<Arc<[usize]>>,
}

static STACKS: Lazy<Mutex<Stacks>> = Lazy::new(Mutex::default);

fn stacks() -> MutexGuard<'static, Stacks> {
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stacks are taken down from now on, as `GPUMEM_BACKTRACE` has it: where that is cheap beside the call, unless it says all
/// or none. What it says instead of that is handed back.
pub(super) fn begin() -> Option<String> {
    let text = std::env::var_os("GPUMEM_BACKTRACE").unwrap_or_default();
    let text = text.to_string_lossy();
    let (least, refused) = match text.trim().to_ascii_lowercase().as_str() {
        "" | "auto" => ([u64::MAX, LARGE], false),
        "0" | "off" => ([u64::MAX; 2], false),
        "1" | "on" | "full" => ([0, 0], false),
        _ => ([u64::MAX, LARGE], true),
    };
    for (is, least) in LEAST.iter().zip(least) {
        is.store(least, Relaxed);
    }
    refused.then(|| text.into_owned())
}

/// The number of the calling thread's stack, if it is wanted for memory of this kind and size.
#[inline]
pub(super) fn here(kind: MemKind, bytes: u64) -> StackId {
    let least = LEAST[usize::from(kind != MemKind::Pool)].load(Relaxed);
    if bytes < least { StackId::NONE } else { take_down() }
}

/// The number of the calling thread's stack.
#[cold]
pub(crate) fn take_down() -> StackId {
    let mut addresses = [0; MOST_FRAMES];
    let count = walk(&mut addresses);
    stacks().number(&addresses[..count])
}

/// What is on a stack, innermost first. Slow: for printing.
pub(crate) fn frames(stack: StackId) -> Vec<Frame> {
    // Not under the lock: allocations go on meanwhile.
    let addresses = stacks().get(stack);
    resolve(&addresses)
}

#[cfg(feature = "backtrace")]
fn walk(addresses: &mut [usize]) -> usize {
    crate::sys::stack::capture(addresses, 2)
}

#[cfg(feature = "backtrace")]
fn resolve(addresses: &[usize]) -> Vec<Frame> {
    super::stack::frames(addresses)
}

/// The file name of the program or library that this crate is in.
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

#[cfg(not(feature = "backtrace"))]
fn walk(_: &mut [usize]) -> usize {
    0
}

#[cfg(not(feature = "backtrace"))]
fn resolve(_: &[usize]) -> Vec<Frame> {
    Vec::new()
}

impl Stacks {
    fn number(&mut self, addresses: &[usize]) -> StackId {
        if let Some(known) = self.known.get(addresses) {
            return *known;
        }
        if addresses.is_empty() || self.all.len() >= MOST {
            return StackId::NONE;
        }
        let stack: Arc<[usize]> = addresses.into();
        self.all.push(Arc::clone(&stack));
        let number = StackId(u32::try_from(self.all.len()).unwrap_or(0));
        self.known.insert(stack, number);
        number
    }

    fn get(&self, stack: StackId) -> Arc<[usize]> {
        let at = (stack.0 as usize).checked_sub(1);
        at.and_then(|at| self.all.get(at)).cloned().unwrap_or_default()
    }
}
