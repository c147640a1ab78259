//! From driver calls to facts: what was allocated on which device, and what is given back.
//!
//! Runs in CUPTI's callback, on the thread that makes the call. Devices are found out from what was heard (the context,
//! the stream, the pool, the properties) and kept; only CUPTI itself is asked, and the driver for what is older than the
//! subscription: the size of a block that is freed, and the device of a stream or pool.

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

use super::{refused, stacks, tell};
use crate::{
    error::Result,
    model::{Answer, Block, Bytes, Device, EventKind, Family, Key, MemKind, Space},
    sys::{
        cuda,
        cupti::{self, Call, Context, Memory, Named},
    },
};

/// Hears every allocation from now on.
pub(super) fn subscribe() -> Result<()> {
    if cupti::subscribed().is_none() {
        // Streams and pools may have gone and come under the same names while nobody listened.
        let mut known = known();
        known.streams.clear();
        known.pools.clear();
        GENERATION.fetch_add(1, Relaxed);
    }
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
    contexts: HashMap<Context, Owner>,
    /// Numbers of contexts that are in use, from 1.
    numbers: Vec<bool>,
    streams: HashMap<u64, u32>,
    /// `None` is a pool on the host.
    pools: HashMap<u64, Option<u32>>,
    handles: Handles,
    /// What each thread is about to unmap.
    unmapping: HashMap<ThreadId, Vec<Mapping>>,
}

/// Whose memory it is that is allocated in a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owner {
    device: u32,
    /// The context's number in blocks; 0 if there are too many to have one.
    number: u8,
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
    generation: u32,
    owner: Owner,
}

/// What a thread is about to give back, until the call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Giving {
    /// A block, which the fold remembers.
    Block,
    /// One reference to a handle; a block, if it was the last.
    Handle { handle: u64, last: bool },
    /// The mappings that are noted under this thread.
    Mappings,
}

thread_local! {
    static PLACE: Cell<Place> = const {
        let owner = Owner { device: 0, number: 0 };
        Cell::new(Place { context: Context { handle: 0, uid: 0 }, generation: 0, owner })
    };
    /// The stream that a thread last allocated on, and its device: 0 is the null stream, of the current context.
    static STREAM: Cell<(u64, u32, u32)> = const { Cell::new((0, 0, 0)) };
    static GIVING: Cell<Giving> = const { Cell::new(Giving::Block) };
}

/// The calls that a program makes by the million first, and nothing else with them: what runs between two calls of the driver
/// is short of cache more than of anything.
fn hear(context: Context, call: &Call) {
    match *call {
        Call::Pooled { address, bytes, stream, pool: None } => {
            let device = device_of_stream(context, stream, address);
            pooled(address, bytes, device);
        }
        Call::Freeing { named, name } => {
            GIVING.set(Giving::Block);
            if tell(&EventKind::Free { key: key(named, name), block: None }) == Answer::Untracked {
                freed_unknown(named, name);
            }
        }
        _ => hear_other(context, call),
    }
}

#[inline]
fn pooled(address: u64, bytes: u64, device: Where) {
    let key = key(Named::Address, address);
    match device {
        Where::Device(device) => allocated(key, device, bytes, MemKind::Pool, 0),
        Where::Host => allocated(key, 0, bytes, MemKind::PinnedHost, 0),
        Where::Unknown => lost(),
    }
}

#[cold]
fn freed_unknown(named: Named, name: u64) {
    match look_up(named, name) {
        Some(block) => tell(&EventKind::Found { block }),
        // What frees nothing is no free.
        None if name == 0 => tell(&EventKind::Unfree),
        None => Answer::Untracked,
    };
}

#[inline(never)]
fn hear_other(context: Context, call: &Call) {
    match *call {
        Call::Allocated { named, name, bytes, memory } => match owner_of(context) {
            Some(Owner { device, number }) => {
                allocated(key(named, name), device, bytes, kind_of(memory), number);
            }
            None => lost(),
        },
        Call::Pooled { address, bytes, stream, pool } => {
            let device = match pool {
                Some(pool) => device_of_pool(pool, address),
                None => device_of_stream(context, stream, address),
            };
            pooled(address, bytes, device);
        }
        Call::Uncounted => lost(),
        Call::Refused { bytes, memory, pool, stream } => {
            let device = match (memory, pool, stream) {
                (Some(_), ..) => Where::of(owner_of(context).map(|owner| owner.device)),
                (None, Some(pool), _) => known().pools.get(&pool).map_or(Where::Unknown, |device| Where::of(*device)),
                (None, None, stream) => device_of_stream(context, stream, 0),
            };
            let kind = memory.map_or(MemKind::Pool, kind_of);
            let current = || owner_of(context).map(|owner| owner.device);
            let device = if let Where::Device(device) = device { Some(device) } else { current() };
            if let Some(device) = device {
                tell_of_refusal(device, bytes, kind);
            }
        }
        Call::NotCreated { bytes, device } => tell_of_refusal(device, bytes, MemKind::Vmm),
        // It was heard.
        Call::Freeing { .. } => {}
        Call::Releasing { handle } => {
            let last = known().handles.release(handle).was_last;
            if last {
                tell(&EventKind::Free { key: Key::new(Space::Handle, handle), block: None });
            }
            GIVING.set(Giving::Handle { handle, last });
        }
        Call::Freed { worked } => match GIVING.replace(Giving::Block) {
            Giving::Mappings => {
                let unmapped = known().unmapping.remove(&thread::current().id()).unwrap_or_default();
                if !worked {
                    map_again(unmapped);
                }
            }
            _ if worked => {}
            Giving::Block => {
                tell(&EventKind::Unfree);
            }
            Giving::Handle { handle, last } => {
                known().handles.retain(handle);
                if last {
                    tell(&EventKind::Unfree);
                }
            }
        },
        Call::Created { handle, bytes, device } => {
            let kind = if device.is_some() { MemKind::Vmm } else { MemKind::PinnedHost };
            let stack = stacks::here(bytes);
            let block = Block { stack, ..Block::new(cuda(device.unwrap_or(0)), Bytes::new(bytes), kind) };
            known().handles.create(handle, block);
            tell(&EventKind::Alloc { key: Key::new(Space::Handle, handle), block });
        }
        Call::Retained { handle } => known().handles.retain(handle),
        Call::Mapped { at, handle } => known().handles.map(at, handle),
        Call::Unmapping { at, bytes } => {
            let unmapped = known().handles.unmap(at, bytes);
            for Mapping { handle, .. } in unmapped.iter().filter(|mapping| mapping.reference.was_last) {
                tell(&EventKind::Free { key: Key::new(Space::Handle, *handle), block: None });
            }
            known().unmapping.insert(thread::current().id(), unmapped);
            GIVING.set(Giving::Mappings);
        }
        Call::Pool { pool, device } => {
            known().pools.insert(pool, device);
        }
        Call::StreamCreated { stream } => {
            if let Some(Owner { device, .. }) = owner_of(context) {
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

fn kind_of(memory: Memory) -> MemKind {
    match memory {
        Memory::Device => MemKind::Device,
        Memory::Managed => MemKind::Managed,
        Memory::PinnedHost => MemKind::PinnedHost,
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

fn allocated(key: Key, ordinal: u32, bytes: u64, kind: MemKind, context: u8) {
    let stack = stacks::here(bytes);
    let block = Block { context, stack, ..Block::new(cuda(ordinal), Bytes::new(bytes), kind) };
    tell(&EventKind::Alloc { key, block });
}

/// Something was allocated that cannot be counted: better said than guessed.
fn lost() {
    tell(&EventKind::Lost { count: 1 });
}

/// Who is told may give back what he can spare, and that is heard.
fn tell_of_refusal(ordinal: u32, bytes: u64, kind: MemKind) {
    cupti::outside(|| refused(cuda(ordinal), Bytes::new(bytes), kind));
}

/// The mappings are still there after all.
fn map_again(unmapped: Vec<Mapping>) {
    for Mapping { at, handle, reference } in unmapped {
        known().handles.map_again(at, handle, reference);
        if let (true, Some(block)) = (reference.was_last, reference.block) {
            tell(&EventKind::Alloc { key: Key::new(Space::Handle, handle), block });
        }
    }
}

/// The device of a context, and the number that its blocks carry.
#[inline]
fn owner_of(context: Context) -> Option<Owner> {
    let generation = GENERATION.load(Relaxed);
    let place = PLACE.get();
    if place.context == context && place.generation == generation {
        return Some(place.owner);
    }
    find_owner_of(context, generation)
}

#[inline(never)]
fn find_owner_of(context: Context, generation: u32) -> Option<Owner> {
    let heard = known().contexts.get(&context).copied();
    let owner = if let Some(owner) = heard {
        owner
    } else {
        // Not under the lock: it is another library that is asked.
        let device = cupti::device_of(context)?;
        known().name_context(context, device)
    };
    PLACE.set(Place { context, generation, owner });
    Some(owner)
}

/// Where stream-ordered memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Device(u32),
    Host,
    Unknown,
}

impl Where {
    fn of(device: Option<u32>) -> Self {
        device.map_or(Self::Unknown, Self::Device)
    }
}

/// The device of the stream that memory was allocated on.
#[inline]
fn device_of_stream(context: Context, stream: u64, address: u64) -> Where {
    const CU_STREAM_LEGACY: u64 = 1;
    const CU_STREAM_PER_THREAD: u64 = 2;
    if matches!(stream, 0 | CU_STREAM_LEGACY | CU_STREAM_PER_THREAD) {
        return Where::of(owner_of(context).map(|owner| owner.device));
    }
    let generation = GENERATION.load(Relaxed);
    let (last, of, device) = STREAM.get();
    if (last, of) == (stream, generation) {
        return Where::Device(device);
    }
    find_device_of_stream(stream, address, generation)
}

#[inline(never)]
fn find_device_of_stream(stream: u64, address: u64, generation: u32) -> Where {
    let heard = known().streams.get(&stream).copied();
    // One that is older than the subscription: the memory itself says where it is.
    let Some(device) = heard.or_else(|| cuda::device_at(address)) else { return Where::Unknown };
    if heard.is_none() {
        known().streams.insert(stream, device);
    }
    STREAM.set((stream, generation, device));
    Where::Device(device)
}

/// The device of the pool that memory was allocated from.
fn device_of_pool(pool: u64, address: u64) -> Where {
    let heard = known().pools.get(&pool).copied();
    match heard {
        Some(Some(device)) => Where::Device(device),
        Some(None) => Where::Host,
        None => {
            let device = cuda::device_at(address);
            if device.is_some() {
                known().pools.insert(pool, device);
            }
            Where::of(device)
        }
    }
}

impl Known {
    /// Gives a context the lowest number that is free, unless another thread was first.
    fn name_context(&mut self, context: Context, device: u32) -> Owner {
        if let Some(owner) = self.contexts.get(&context) {
            return *owner;
        }
        let free = self.numbers.iter().position(|taken| !taken).unwrap_or(self.numbers.len());
        let number = u8::try_from(free + 1).unwrap_or(0);
        if number > 0 {
            self.numbers.resize(self.numbers.len().max(free + 1), false);
            self.numbers[free] = true;
        }
        let owner = Owner { device, number };
        self.contexts.insert(context, owner);
        owner
    }
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
    Some(Block::new(cuda(ordinal), Bytes::new(bytes), kind))
}

/// What was allocated in a context goes with it. Blocks of pools do not: a pool is the device's.
fn context_gone(handle: usize) {
    let gone = {
        let mut known = known();
        GENERATION.fetch_add(1, Relaxed);
        let context = known.contexts.keys().find(|context| context.handle == handle).copied();
        // Nothing was allocated in a context that was never named.
        let Some(gone) = context.and_then(|context| known.contexts.remove(&context)) else { return };
        gone
    };
    match gone.number {
        // Which blocks were in this context is not known.
        0 => lost(),
        number => {
            tell(&EventKind::Gone { context: number });
            known().numbers[usize::from(number) - 1] = false;
        }
    }
}

/// A mapping of a handle that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    at: u64,
    handle: u64,
    reference: Reference,
}

/// A reference to a handle that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reference {
    /// Nobody refers to the handle any more.
    was_last: bool,
    /// What is behind the handle; none if it is older than the subscription.
    block: Option<Block>,
}

/// `cuMemCreate`'s handles. The memory is given back when nobody refers to it: not who created or retained the handle,
/// and no mapping.
#[derive(Debug, Default)]
struct Handles {
    referred: HashMap<u64, (u32, Option<Block>)>,
    /// By the address of the mapping.
    mapped: BTreeMap<u64, u64>,
}

impl Handles {
    fn create(&mut self, handle: u64, block: Block) {
        self.referred.insert(handle, (1, Some(block)));
    }

    fn retain(&mut self, handle: u64) {
        self.referred.entry(handle).or_default().0 += 1;
    }

    /// Takes one reference away. That of a handle that is older than the subscription is taken to be the last.
    fn release(&mut self, handle: u64) -> Reference {
        if let Some((references @ 2.., block)) = self.referred.get_mut(&handle) {
            *references -= 1;
            return Reference { was_last: false, block: *block };
        }
        let block = self.referred.remove(&handle).and_then(|(_, block)| block);
        Reference { was_last: true, block }
    }

    fn map(&mut self, at: u64, handle: u64) {
        // Memory that is older than the subscription, or another process's, is not counted.
        if let Some((references, _)) = self.referred.get_mut(&handle) {
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
            Mapping { at, handle, reference: self.release(handle) }
        };
        inside.into_iter().map(unmap).collect()
    }

    fn map_again(&mut self, at: u64, handle: u64, reference: Reference) {
        self.referred.entry(handle).or_insert((0, reference.block)).0 += 1;
        self.mapped.insert(at, handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_that_two_threads_name_has_one_number() {
        let mut known = Known::default();
        let [first, second] = [1, 2].map(|handle| Context { handle, uid: 1 });
        for (context, number) in [(first, 1), (first, 1), (second, 2)] {
            assert_eq!(known.name_context(context, 0), Owner { device: 0, number });
        }
        assert_eq!(known.numbers, [true, true]);
    }

    #[test]
    fn a_handle_lives_as_long_as_somebody_refers_to_it() {
        let block = Block::new(cuda(0), Bytes::mib(2), MemKind::Vmm);
        let mut handles = Handles::default();
        handles.create(1, block);
        assert_eq!(handles.release(1), Reference { was_last: true, block: Some(block) }, "created and released");

        handles.create(1, block);
        handles.retain(1);
        assert!(!handles.release(1).was_last);
        assert!(handles.release(1).was_last, "retained, released twice");

        handles.create(1, block);
        handles.map(0x1000, 1);
        handles.map(0x3000, 1);
        assert!(!handles.release(1).was_last, "two mappings hold it");
        assert!(handles.unmap(0x1000, 0x1000).iter().all(|mapping| !mapping.reference.was_last));
        assert!(handles.unmap(0x1000, 0x1000).is_empty(), "nothing is mapped there any more");
        let unmapped = handles.unmap(0x2000, 0x2000);
        let reference = Reference { was_last: true, block: Some(block) };
        assert_eq!(unmapped, [Mapping { at: 0x3000, handle: 1, reference }]);
        handles.map_again(0x3000, 1, reference);
        assert_eq!(handles.unmap(0x3000, 1), unmapped, "as if nothing had happened");

        assert_eq!(handles.release(9), Reference { was_last: true, block: None }, "older than the subscription");
        handles.map(0x1000, 9);
        assert!(handles.unmap(0, u64::MAX).is_empty());
        assert!(handles.referred.is_empty() && handles.mapped.is_empty());
    }
}
