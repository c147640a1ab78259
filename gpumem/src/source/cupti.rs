//! From driver calls to facts: what was allocated on which device, and what is given back.
//!
//! Runs in CUPTI's callback, on the thread that makes the call. Devices are found out from what was heard (the context,
//! the stream, the pool, the properties) and kept; only CUPTI itself is asked, and the driver for one thing: the size of a
//! block that is freed and was never heard of.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread::{self, ThreadId},
};

use once_cell::sync::Lazy;

use super::{Told, tell};
use crate::{
    error::Result,
    model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, Space},
    sys::{
        cuda,
        cupti::{self, Call, Context, Memory, Named},
    },
};

/// Hears every allocation from now on.
pub(super) fn subscribe() -> Result<()> {
    cupti::subscribe(hear)
}

pub(super) fn can_subscribe() -> Result<()> {
    cupti::is_there()
}

pub(super) fn unsubscribe() {
    cupti::unsubscribe();
}

pub(super) fn subscribed() -> Option<&'static str> {
    cupti::subscribed()
}

/// What was heard of contexts, streams, pools and handles. Locked for a look-up at most; never while a fact is told.
#[derive(Debug, Default)]
struct Known {
    contexts: HashMap<Context, u32>,
    streams: HashMap<u64, u32>,
    /// `None` is a pool on the host.
    pools: HashMap<u64, Option<u32>>,
    handles: Handles,
    /// What each thread is about to unmap.
    unmapping: HashMap<ThreadId, Vec<Mapping>>,
}

static KNOWN: Lazy<Mutex<Known>> = Lazy::new(Mutex::default);

/// Counts up whenever something that was known of a stream or context may be wrong from then on.
static GENERATION: AtomicU32 = AtomicU32::new(1);

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a thread last allocated: programs allocate in one place many times.
#[derive(Clone, Copy, Default)]
struct Place {
    context: Context,
    stream: u64,
    generation: u32,
    device: u32,
}

/// What a thread is about to give back, until the call has ended.
#[derive(Clone, Copy)]
enum Giving {
    Nothing,
    Block(Key, Block),
    /// Nobody knows what it is.
    Untracked,
    /// One reference less, and perhaps no block.
    Handle(u64, Option<(Key, Block)>),
    /// The mappings that are noted under this thread.
    Mappings,
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place {
        context: Context { handle: 0, uid: 0 }, stream: 0, generation: 0, device: 0,
    }) };
    static GIVING: Cell<Giving> = const { Cell::new(Giving::Nothing) };
}

fn hear(context: Context, call: Call) {
    match call {
        Call::Allocated { named, name, bytes, memory } => {
            let kind = match memory {
                Memory::Device => MemKind::Device,
                Memory::Managed => MemKind::Managed,
                Memory::PinnedHost => MemKind::PinnedHost,
            };
            allocated(key(named, name), device_of(context, 0), bytes, kind);
        }
        Call::Pooled { address, bytes, stream, pool } => {
            let device = match pool.map(|pool| known().pools.get(&pool).copied()) {
                Some(Some(None)) => {
                    return allocated(key(Named::Address, address), Some(0), bytes, MemKind::PinnedHost);
                }
                Some(Some(device)) => device,
                Some(None) | None => device_of(context, stream),
            };
            allocated(key(Named::Address, address), device, bytes, MemKind::Pool);
        }
        Call::Unsized => lost(),
        // What frees nothing needs no telling.
        Call::Freeing { name: 0, .. } => GIVING.set(Giving::Nothing),
        Call::Freeing { named, name } => {
            let key = key(named, name);
            let giving = match tell(EventKind::Free { key, block: None }) {
                Told::Freed(block) => Giving::Block(key, block),
                Told::Untracked => look_up(named, name).map_or(Giving::Untracked, |block| {
                    tell(EventKind::Found { block: Some(block) });
                    Giving::Block(key, block)
                }),
                Told::Nothing => Giving::Nothing,
            };
            GIVING.set(giving);
        }
        Call::Releasing { handle } => {
            let key = Key::new(Space::Handle, handle);
            let last = known().handles.release(handle);
            let block = last.then(|| tell(EventKind::Free { key, block: None }));
            GIVING.set(match block {
                Some(Told::Freed(block)) => Giving::Handle(handle, Some((key, block))),
                Some(Told::Untracked) => Giving::Untracked,
                _ => Giving::Handle(handle, None),
            });
        }
        Call::Freed { worked } => {
            let giving = GIVING.replace(Giving::Nothing);
            if let Giving::Mappings = giving {
                let unmapped = known().unmapping.remove(&thread::current().id()).unwrap_or_default();
                if !worked {
                    map_again(unmapped);
                }
            } else if !worked {
                take_back(giving);
            }
        }
        Call::Created { handle, bytes, device } => {
            known().handles.create(handle);
            let kind = if device.is_some() { MemKind::Vmm } else { MemKind::PinnedHost };
            allocated(Key::new(Space::Handle, handle), device.or(Some(0)), bytes, kind);
        }
        Call::Retained { handle } => known().handles.retain(handle),
        Call::Mapped { at, handle } => known().handles.map(at, handle),
        Call::Unmapping { at, bytes } => {
            let mut unmapped = known().handles.unmap(at, bytes);
            for mapping in unmapped.iter_mut().filter(|mapping| mapping.was_last) {
                let key = Key::new(Space::Handle, mapping.handle);
                if let Told::Freed(block) = tell(EventKind::Free { key, block: None }) {
                    mapping.freed = Some((key, block));
                }
            }
            known().unmapping.insert(thread::current().id(), unmapped);
            GIVING.set(Giving::Mappings);
        }
        Call::Pool { pool, device } => {
            known().pools.insert(pool, device);
        }
        Call::StreamCreated { stream } => {
            if let Some(device) = device_of(context, 0) {
                known().streams.insert(stream, device);
                GENERATION.fetch_add(1, Relaxed);
            }
        }
        Call::StreamDestroyed { stream } => {
            known().streams.remove(&stream);
            GENERATION.fetch_add(1, Relaxed);
        }
        Call::ContextGone => context_gone(context.handle),
    }
}

fn key(named: Named, name: u64) -> Key {
    let space = match named {
        Named::Address => Space::Address,
        Named::Array => Space::Array,
        Named::Registered => Space::Registered,
    };
    Key::new(space, name)
}

fn cuda(ordinal: u32) -> Device {
    Device { family: Family::Cuda, ordinal }
}

fn allocated(key: Key, device: Option<u32>, bytes: u64, kind: MemKind) {
    match device {
        Some(ordinal) => {
            tell(EventKind::Alloc { key, block: Block { device: cuda(ordinal), bytes: Bytes::new(bytes), kind } });
        }
        None => lost(),
    }
}

/// Something was allocated that cannot be counted: better said than guessed.
fn lost() {
    tell(EventKind::Lost { count: 1 });
}

/// The call failed after all: what it was to give back is still there.
fn take_back(giving: Giving) {
    match giving {
        Giving::Nothing | Giving::Mappings => {}
        Giving::Block(key, block) => {
            tell(EventKind::Alloc { key, block });
        }
        Giving::Untracked => {
            tell(EventKind::Found { block: None });
        }
        Giving::Handle(handle, block) => {
            known().handles.retain(handle);
            if let Some((key, block)) = block {
                tell(EventKind::Alloc { key, block });
            }
        }
    }
}

/// The mappings are still there after all.
fn map_again(unmapped: Vec<Mapping>) {
    for Mapping { at, handle, freed, .. } in unmapped {
        {
            let handles = &mut known().handles;
            handles.retain(handle);
            handles.mapped.insert(at, handle);
        }
        if let Some((key, block)) = freed {
            tell(EventKind::Alloc { key, block });
        }
    }
}

/// The device that a stream belongs to, else that of the context that is current.
fn device_of(context: Context, stream: u64) -> Option<u32> {
    let generation = GENERATION.load(Relaxed);
    let place = PLACE.get();
    if place.context == context && place.stream == stream && place.generation == generation {
        return Some(place.device);
    }
    let mut known = known();
    let heard = known.streams.get(&stream).or_else(|| known.contexts.get(&context)).copied();
    let device = match heard {
        Some(device) => device,
        None => *known.contexts.entry(context).or_insert(cupti::device_of(context)?),
    };
    PLACE.set(Place { context, stream, generation, device });
    Some(device)
}

/// A block that is freed and was never heard of: it is older than the subscription. The driver knows it still, since the
/// free has not been made yet, and the look-up changes nothing.
fn look_up(named: Named, name: u64) -> Option<Block> {
    if named != Named::Address {
        return None;
    }
    let cuda::Range { bytes, ordinal, managed, on_host } = cuda::range_at(name)?;
    let kind = match (on_host, managed) {
        (_, true) => MemKind::Managed,
        (true, false) => MemKind::PinnedHost,
        (false, false) => MemKind::Device,
    };
    Some(Block { device: cuda(ordinal), bytes: Bytes::new(bytes), kind })
}

fn context_gone(handle: usize) {
    let device = {
        let mut known = known();
        GENERATION.fetch_add(1, Relaxed);
        let gone = known.contexts.iter().find(|(context, _)| context.handle == handle).map(|(context, _)| *context);
        // Nothing was allocated in a context that was never named.
        let Some(gone) = gone else { return };
        let Some(device) = known.contexts.remove(&gone) else { return };
        known.streams.retain(|_, of| *of != device);
        (!known.contexts.values().any(|other| *other == device)).then_some(device)
    };
    match device {
        Some(device) => {
            tell(EventKind::Gone { device: cuda(device) });
        }
        // Which of the device's blocks were in this context is not known.
        None => lost(),
    }
}

/// A mapping of a handle that is taken away.
#[derive(Debug)]
struct Mapping {
    at: u64,
    handle: u64,
    /// Nobody refers to the handle any more.
    was_last: bool,
    /// So its block is freed.
    freed: Option<(Key, Block)>,
}

/// `cuMemCreate`'s handles. The memory is given back when nobody refers to it: not who created or retained the handle,
/// and no mapping.
#[derive(Debug, Default)]
struct Handles {
    references: HashMap<u64, u32>,
    /// By the address of the mapping.
    mapped: BTreeMap<u64, u64>,
}

impl Handles {
    fn create(&mut self, handle: u64) {
        self.references.insert(handle, 1);
    }

    fn retain(&mut self, handle: u64) {
        *self.references.entry(handle).or_default() += 1;
    }

    /// Whether that was the last reference. So it is for a handle that is older than the subscription.
    fn release(&mut self, handle: u64) -> bool {
        match self.references.get_mut(&handle) {
            Some(references) if *references > 1 => {
                *references -= 1;
                false
            }
            _ => {
                self.references.remove(&handle);
                true
            }
        }
    }

    fn map(&mut self, at: u64, handle: u64) {
        // Memory that is older than the subscription, or another process's, is not counted.
        if let Some(references) = self.references.get_mut(&handle) {
            *references += 1;
            self.mapped.insert(at, handle);
        }
    }

    /// Takes out all mappings in a range.
    fn unmap(&mut self, at: u64, bytes: u64) -> Vec<Mapping> {
        let inside: Vec<_> =
            self.mapped.range(at..at.saturating_add(bytes)).map(|(at, handle)| (*at, *handle)).collect();
        let unmap = |(at, handle)| {
            self.mapped.remove(&at);
            Mapping { at, handle, was_last: self.release(handle), freed: None }
        };
        inside.into_iter().map(unmap).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_lives_as_long_as_somebody_refers_to_it() {
        let mut handles = Handles::default();
        handles.create(1);
        assert!(handles.release(1), "created and released");

        handles.create(1);
        handles.retain(1);
        assert!(!handles.release(1));
        assert!(handles.release(1), "retained, released twice");

        handles.create(1);
        handles.map(0x1000, 1);
        handles.map(0x3000, 1);
        assert!(!handles.release(1), "two mappings hold it");
        assert!(handles.unmap(0x1000, 0x1000).iter().all(|mapping| !mapping.was_last));
        assert!(handles.unmap(0x1000, 0x1000).is_empty(), "nothing is mapped there any more");
        assert!(handles.unmap(0x2000, 0x2000).iter().all(|mapping| mapping.was_last && mapping.handle == 1));

        assert!(handles.release(9), "older than the subscription");
        handles.map(0x1000, 9);
        assert!(handles.unmap(0, u64::MAX).is_empty());
        assert!(handles.references.is_empty() && handles.mapped.is_empty());
    }
}
