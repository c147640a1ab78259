//! Where allocations are made: stacks by number, taken down when a block is asked for, and understood when somebody reads.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use once_cell::sync::Lazy;

use crate::{
    model::{Frame, StackId},
    settings::{self, settings},
};

/// Programs that make many blocks of this size do so again and again in the same places, whose stacks are remembered.
const LARGE: u64 = 1 << 20;

/// Stacks that differ. More of them are not told apart.
const MOST: usize = 1 << 16;

/// From which size on stacks are taken down. Nobody's before anybody listens.
static LEAST: AtomicU64 = AtomicU64::new(u64::MAX);

/// Hashes addresses, of which nobody chooses such as collide.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(8) {
            let mut eight = [0; 8];
            eight[..word.len()].copy_from_slice(word);
            self.0 = (self.0.rotate_left(23) ^ u64::from_ne_bytes(eight)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

#[derive(Default)]
struct Stacks {
    known: HashMap<Arc<[usize]>, StackId, BuildHasherDefault<Mix>>,
    /// By number, from 1 on.
    all: Vec<Arc<[usize]>>,
}

static STACKS: Lazy<Mutex<Stacks>> = Lazy::new(Mutex::default);

fn stacks() -> MutexGuard<'static, Stacks> {
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stacks are recorded from now on, as the settings say.
pub(super) fn begin() {
    let least = match settings().stacks {
        settings::Stacks::Large => LARGE,
        settings::Stacks::None => u64::MAX,
        settings::Stacks::All => 0,
    };
    LEAST.store(least, Relaxed);
}

/// From which size on stacks are taken down. It stays the same from [`begin`] on.
pub(super) fn least() -> u64 {
    LEAST.load(Relaxed)
}

/// The number of the calling thread's stack, if it is wanted for memory of this size.
#[inline]
pub(super) fn here(bytes: u64) -> StackId {
    if bytes < least() { StackId::NONE } else { take_down() }
}

/// The number of the calling thread's stack.
#[cfg(feature = "backtrace")]
#[inline]
pub(crate) fn take_down() -> StackId {
    // Not the driver's functions, which are the same on each stack, nor the callback that they call.
    let is_driver = |file: &[u8]| std::str::from_utf8(file).is_ok_and(crate::model::is_driver);
    StackId(crate::sys::stack::number(is_driver, |addresses| stacks().number(addresses).0))
}

#[cfg(not(feature = "backtrace"))]
pub(crate) fn take_down() -> StackId {
    StackId::NONE
}

/// The three ways to a stack's number: as always, without remembering any, and by the unwinder of the system.
#[cfg(all(feature = "bench", feature = "backtrace"))]
pub(crate) const WAYS_TO_A_STACK: [fn() -> StackId; 3] = [
    take_down,
    || {
        crate::sys::stack::forget();
        take_down()
    },
    || StackId(crate::sys::stack::captured(|addresses| stacks().number(addresses).0)),
];

/// What is on a stack, innermost first. Slow: for printing.
pub(crate) fn frames(stack: StackId) -> Vec<Frame> {
    // Not under the lock: allocations go on meanwhile.
    let addresses = stacks().get(stack);
    resolve(&addresses)
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
