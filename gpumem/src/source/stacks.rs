//! Where allocations are made: stacks by number, taken down when a block is asked for, and understood when somebody reads.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use once_cell::sync::{Lazy, OnceCell};

use crate::model::{Frame, MemKind, StackId};

/// Through the driver, a library of its kind and a framework, to the user's line.
const MOST_FRAMES: usize = 48;

/// The driver takes ten times as long as the walk to give out so much.
const LARGE: u64 = 1 << 20;

/// Stacks that differ. More of them are not told apart.
const MOST: usize = 1 << 16;

/// What is taken down, by `GPUMEM_BACKTRACE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// Where it is cheap beside the call: large blocks that are not stream-ordered.
    Large,
    All,
}

#[derive(Default)]
struct Stacks {
    known: HashMap<Box<[usize]>, StackId>,
    /// By number, from 1 on.
    all: Vec<Box<[usize]>>,
}

static STACKS: Lazy<Mutex<Stacks>> = Lazy::new(Mutex::default);

fn stacks() -> MutexGuard<'static, Stacks> {
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wanted() -> Wanted {
    static WANTED: OnceCell<Wanted> = OnceCell::new();
    *WANTED.get_or_init(|| {
        let text = std::env::var_os("GPUMEM_BACKTRACE").unwrap_or_default();
        match text.to_string_lossy().trim().to_ascii_lowercase().as_str() {
            "" | "auto" => Wanted::Large,
            "0" | "off" => Wanted::Nothing,
            _ => Wanted::All,
        }
    })
}

/// The number of the calling thread's stack, if it is wanted for memory of this kind and size.
#[inline]
pub(super) fn here(kind: MemKind, bytes: u64) -> StackId {
    match wanted() {
        Wanted::Nothing => StackId::NONE,
        Wanted::Large if kind == MemKind::Pool || bytes < LARGE => StackId::NONE,
        // Nobody would be told.
        _ if super::LISTENER.get().is_none() => StackId::NONE,
        Wanted::Large | Wanted::All => take_down(),
    }
}

/// The number of the calling thread's stack.
#[inline(never)]
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
    static OWN: OnceCell<Option<String>> = OnceCell::new();
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
        self.all.push(addresses.into());
        let number = StackId(u32::try_from(self.all.len()).unwrap_or(0));
        self.known.insert(addresses.into(), number);
        number
    }

    fn get(&self, stack: StackId) -> Box<[usize]> {
        let at = (stack.0 as usize).checked_sub(1);
        at.and_then(|at| self.all.get(at)).cloned().unwrap_or_default()
    }
}
