//! From driver calls to facts: what was allocated on which device, and what is given back. The dispatch table and CUPTI share
//! it.
//!
//! Runs in a hook or a callback, on the thread that makes the call. The device of a call follows from earlier calls (the
//! context, the stream, the pool, the properties), which are kept. The driver is asked for the rest: the device of a context,
//! the size of a block that is older than the subscription and is freed, and the device of an older stream or pool.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap, HashSet},
    marker::PhantomData,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst},
    },
    thread::{self, ThreadId},
};

use once_cell::sync::Lazy;

use super::{Interception, LISTENER, Listen, WAITS, graphs, obtained, refused, stacks, tell};
use crate::{
    error::{Error, Kind, Result},
    model::{Answer, Block, Bytes, Device, EventKind, Family, Key, MemKind, Source, Space, StackId, Tag},
    sys::{
        calls::{self, Call, Caller, Context, IdKind, Memory, Observe},
        cuda,
    },
};

/// Intercepts every allocation from now on, unless that is so already: through the wanted source, else through the dispatch
/// table, else through CUPTI.
pub(super) fn subscribe(wanted: Option<Source>) -> Result<Interception> {
    // Two threads must not choose two sources: each allocation would be counted twice.
    static CHOICE: Mutex<()> = Mutex::new(());
    let _choice = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(live) = subscribed() {
        return match wanted {
            Some(asked) if asked != live.source => {
                Err(Kind::OtherSource { asked: asked.name(), using: live.source.name() }.into())
            }
            _ => Ok(live),
        };
    }
    forget_names();
    let not_exact = |why| Error::from(Kind::NoGauge { gauge: "exact", why });
    let listener = LISTENER.get().ok_or_else(|| not_exact("gpumem has not begun to count"))?;
    choose(wanted, listener.subscribe)?;
    subscribed().ok_or_else(|| not_exact("gpumem::unsubscribe() was called on another thread meanwhile"))
}

/// Has the calls that this source intercepts told to `L`.
pub(super) fn subscribe_to<L: Listen>(source: Source) -> Result<()> {
    match source {
        Source::Dispatch => by_dispatch::subscribe::<Observer<L>>(),
        _ => by_cupti::subscribe::<Observer<L>>(),
    }
}

/// Through which source allocations would be intercepted.
pub(super) fn can_subscribe(wanted: Option<Source>) -> Result<Source> {
    choose(wanted, |source| match source {
        Source::Dispatch => by_dispatch::check_available(),
        _ => by_cupti::check_available(),
    })
}

/// The source with which `attempt` succeeds: the wanted one, else the dispatch table, else CUPTI.
fn choose(wanted: Option<Source>, attempt: impl Fn(Source) -> Result<()>) -> Result<Source> {
    // Without a driver there is one reason, and not one for each source.
    cuda::load_for_hooks()?;
    if let Some(wanted) = wanted {
        return attempt(wanted).map(|()| wanted);
    }
    let Err(dispatch) = attempt(Source::Dispatch) else { return Ok(Source::Dispatch) };
    match attempt(Source::Cupti) {
        Ok(()) => Ok(Source::Cupti),
        // Without a device the second reason may be the first.
        Err(cupti) if cupti == dispatch => Err(cupti),
        Err(cupti) => Err(Kind::NoSource { dispatch, cupti }.into()),
    }
}

pub(super) fn unsubscribe() {
    by_dispatch::unsubscribe();
    by_cupti::unsubscribe();
}

pub(super) fn subscribed() -> Option<Interception> {
    let by = |source| move |library| Interception { source, library };
    let dispatch = by_dispatch::subscribed().map(by(Source::Dispatch));
    dispatch.or_else(|| by_cupti::subscribed().map(by(Source::Cupti)))
}

#[cfg(feature = "dispatch")]
mod by_dispatch {
    use crate::{
        error::Result,
        sys::{calls::Observe, dispatch},
    };

    pub(super) use dispatch::{check_available, subscribed, unsubscribe};

    pub(super) fn subscribe<O: Observe>() -> Result<()> {
        dispatch::subscribe::<O>()
    }
}

#[cfg(feature = "cupti")]
mod by_cupti {
    use crate::{
        error::Result,
        sys::{calls::Observe, cuda, cupti},
    };

    pub(super) use cupti::{subscribed, unsubscribe};

    pub(super) fn subscribe<O: Observe>() -> Result<()> {
        // Without a driver there is nothing to intercept, and CUPTI is not the reason.
        cuda::devices()?;
        cupti::subscribe::<O>()
    }

    pub(super) fn check_available() -> Result<()> {
        cuda::devices()?;
        cupti::check_available()
    }
}

/// A source that this build does not have.
#[cfg(not(all(feature = "cupti", feature = "dispatch")))]
macro_rules! absent {
    ($module:ident, $feature:literal) => {
        mod $module {
            use crate::{
                error::{Kind, Result},
                sys::calls::Observe,
            };

            pub(super) fn subscribe<O: Observe>() -> Result<()> {
                check_available()
            }

            pub(super) fn check_available() -> Result<()> {
                Err(Kind::NotBuilt { feature: $feature }.into())
            }

            pub(super) fn unsubscribe() {}

            pub(super) fn subscribed() -> Option<&'static str> {
                None
            }
        }
    };
}
#[cfg(not(feature = "cupti"))]
absent!(by_cupti, "cupti");
#[cfg(not(feature = "dispatch"))]
absent!(by_dispatch, "dispatch");

/// For benchmarks: hooks in the dispatch table that tell nobody anything.
#[cfg(all(feature = "bench", feature = "dispatch"))]
pub(crate) fn hook_for_nobody() -> Result<()> {
    struct Nobody;

    impl Observe for Nobody {
        #[inline]
        fn pooled(_: &Caller, _: u64, _: u64, _: u64) {}

        #[inline]
        fn freeing(_: &Caller, _: u64) {}

        fn other(_: &Caller, _: &Call) {}
    }

    crate::sys::dispatch::subscribe::<Nobody>()
}

/// For benchmarks: a pair of stream-ordered calls on a stream of device 0, told to `L` by the hooks, and the same without hooks.
#[cfg(all(feature = "bench", feature = "dispatch"))]
pub(crate) fn rehearse<L: Listen>() -> [fn(u64); 2] {
    use crate::sys::dispatch::rehearsal;

    const STREAM: u64 = 0x9900;
    known().streams.insert(STREAM, 0);
    rehearsal::begin();
    [|bytes| rehearsal::pair::<Observer<L>>(STREAM, bytes), |bytes| rehearsal::bare_pair(STREAM, bytes)]
}

/// Streams and pools may have gone and come under the same names while nobody intercepted.
fn forget_names() {
    let mut known = known();
    known.streams.clear();
    known.pools.clear();
    known.elsewhere.clear();
    known.captures.clear();
    known.forget_contexts();
    CAPTURES.store(0, SeqCst);
    GENERATION.fetch_add(1, SeqCst);
    FIRST_BLOCK.store(u64::MAX, Relaxed);
    drop(known);
    graphs::forget();
}

/// What was heard of contexts, streams, pools and handles. Locked for a look-up at most; never while a fact is told.
#[derive(Debug, Default)]
struct Known {
    contexts: HashMap<Context, Owner>,
    /// Contexts that may have gone while nobody intercepted: a handle, and whose blocks are live until it is known to be gone.
    frees_may_be_missing: Vec<(usize, Owner)>,
    /// Numbers of contexts that are in use, from 1.
    numbers: Vec<bool>,
    streams: HashMap<u64, u32>,
    /// `None` is a pool on the host.
    pools: HashMap<u64, Option<u32>>,
    handles: Handles,
    /// What each thread is about to unmap.
    unmapping: HashMap<ThreadId, Vec<Mapping>>,
    /// Memory that belongs to somebody else, and was imported here, until it is given back.
    elsewhere: HashSet<Key>,
    /// The streams on which captures began that are under way.
    captures: Vec<u64>,
}

/// Attribution memory it is that is allocated in a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owner {
    device: u32,
    /// The context's number in blocks; 0 if there are too many to have one.
    number: u8,
}

static KNOWN: Lazy<Mutex<Known>> = Lazy::new(Mutex::default);

/// Counts up whenever something that was known of a stream or context may be wrong from then on.
static GENERATION: AtomicU32 = AtomicU32::new(1);

/// How many captures are under way. It counts up before [`GENERATION`] does, so that whoever sees the one sees the other.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// The number of a block that is younger than the subscription, as the driver counts blocks. Whatever has a lower one is older, or
/// at least older than the first trace. [`u64::MAX`] while none is known.
static FIRST_BLOCK: AtomicU64 = AtomicU64::new(u64::MAX);

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

/// The stream that a thread last allocated on: all that the next allocation has to look at.
#[derive(Clone, Copy)]
struct Stream {
    handle: u64,
    /// What is here is right as long as [`GENERATION`] is the same. It is 0 if nothing is here.
    generation: u32,
    device: u32,
    /// From which size on blocks have their stack taken down.
    least: u64,
}

/// What a thread is about to give back, until the call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Giving {
    /// A block, which the fold remembers.
    Block,
    /// One reference to a handle.
    Handle { handle: u64, reference: Reference },
    /// The mappings that are noted under this thread.
    Mappings,
}

thread_local! {
    static PLACE: Cell<Place> = const {
        let owner = Owner { device: 0, number: 0 };
        Cell::new(Place { context: Context { handle: 0, uid: 0 }, generation: 0, owner })
    };
    static STREAM: Cell<Stream> = const { Cell::new(Stream { handle: 0, generation: 0, device: 0, least: 0 }) };
    static GIVING: Cell<Giving> = const { Cell::new(Giving::Block) };
    /// The imported memory that this thread gave back last, should the call turn out to have failed.
    static GIVEN_BACK: Cell<Option<Key>> = const { Cell::new(None) };
}

/// What is done with a call that was intercepted.
struct Observer<L>(PhantomData<L>);

impl<L: Listen> Observe for Observer<L> {
    #[allow(clippy::inline_always, reason = "a hook is one function, which takes fewer lines of the instruction cache")]
    #[inline(always)]
    fn pooled(caller: &Caller, address: u64, bytes: u64, stream: u64) {
        let last = STREAM.get();
        if last.handle == stream && last.generation == GENERATION.load(Relaxed) {
            let stack = if bytes < last.least { StackId::NONE } else { stacks::take_down() };
            let tag = Tag::new(cuda(last.device), MemKind::Pool, 0, stack);
            L::alloc(key(IdKind::Address, address), Bytes::new(bytes), tag);
        } else {
            let caller = *caller;
            calls::as_observer_cold(move || pooled_elsewhere(&caller, address, bytes, stream));
        }
    }

    #[allow(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn freeing(_: &Caller, address: u64) {
        if L::free(key(IdKind::Address, address)) == Answer::Untracked {
            calls::as_observer_cold(move || freed_unknown(IdKind::Address, address));
        }
    }

    fn other(caller: &Caller, call: &Call) {
        hear(caller, call);
    }
}

/// Stream-ordered memory was allocated, on another stream than this thread's last, or while a stream is being captured.
fn pooled_elsewhere(caller: &Caller, address: u64, bytes: u64, stream: u64) {
    match is_captured(stream) {
        Some(false) => pooled_on(address, bytes, device_of_stream(caller, stream, address)),
        // A node of a graph, which allocates when the graph is launched.
        Some(true) => {}
        None => lost(),
    }
}

/// Whether a call on this stream became a node of a graph. The stream need not be one on which a capture began: waiting for an
/// event of another stream makes it join that stream's.
fn is_captured(stream: u64) -> Option<bool> {
    // The legacy stream cannot be captured.
    if CAPTURES.load(SeqCst) == 0 || matches!(stream, 0 | CU_STREAM_LEGACY) {
        return Some(false);
    }
    let is_captured = cuda::is_capturing(stream);
    if is_captured == Some(true) {
        graphs::allocate();
    }
    is_captured
}

fn pooled_on(address: u64, bytes: u64, device: Where) {
    let key = key(IdKind::Address, address);
    note_block(address);
    match device {
        Where::Device(device) => allocated(key, device, bytes, MemKind::Pool, 0),
        Where::Host => allocated(key, 0, bytes, MemKind::PinnedHost, 0),
        Where::Unknown => lost(),
    }
}

/// A block of now.
fn note_block(address: u64) {
    if FIRST_BLOCK.load(Relaxed) == u64::MAX
        && let Some(number) = cuda::block_number(address)
    {
        FIRST_BLOCK.fetch_min(number, Relaxed);
    }
}

#[cold]
fn freed_unknown(id_kind: IdKind, id: u64) {
    // What frees nothing is no free.
    if id == 0 || was_never_counted(id_kind, id) {
        tell(&EventKind::FreeFailed);
    } else if let Some(block) = look_up(id_kind, id) {
        tell(&EventKind::LateLookup { block });
    } else {
        tell(&EventKind::Untracked);
    }
}

/// What belongs to somebody else or to a graph is no block that was counted.
fn was_never_counted(id_kind: IdKind, id: u64) -> bool {
    let key = key(id_kind, id);
    if known().elsewhere.remove(&key) {
        GIVEN_BACK.set(Some(key));
        return true;
    }
    if id_kind != IdKind::Address {
        return false;
    }
    // Nothing is there: a free that is captured names what a graph will allocate.
    cuda::belongs_to_graph(id).unwrap_or_else(|| CAPTURES.load(SeqCst) > 0)
}

/// The driver is not asked about handles.
fn free_handle(handle: u64) {
    if tell(&EventKind::Free { key: Key::new(Space::Handle, handle), block: None }) == Answer::Untracked {
        tell(&EventKind::Untracked);
    }
}

/// Every other call.
fn hear(caller: &Caller, call: &Call) {
    match *call {
        Call::Allocated { id_kind, id, bytes, memory } => match owner_of(caller) {
            Some(Owner { device, number }) => {
                if id_kind == IdKind::Address {
                    note_block(id);
                }
                allocated(key(id_kind, id), device, bytes, kind_of(memory), number);
            }
            None => lost(),
        },
        Call::Pooled { address, bytes, stream, pool } => {
            match is_captured(stream) {
                Some(false) => {}
                Some(true) => return,
                None => return lost(),
            }
            let device = match pool {
                Some(pool) => device_of_pool(pool, address),
                None => device_of_stream(caller, stream, address),
            };
            pooled_on(address, bytes, device);
        }
        Call::Uncounted => lost(),
        Call::Refused { bytes, memory, pool, stream } => hear_of_refusal(caller, bytes, memory, pool, stream),
        Call::NotCreated { bytes, device } => tell_of_refusal(Some(device), bytes, MemKind::Vmm),
        Call::Freeing { id_kind, id } => {
            if tell(&EventKind::Free { key: key(id_kind, id), block: None }) == Answer::Untracked {
                freed_unknown(id_kind, id);
            }
        }
        Call::Releasing { handle } => {
            let reference = known().handles.release(handle);
            if reference.gives_back() {
                free_handle(handle);
            }
            GIVING.set(Giving::Handle { handle, reference });
        }
        Call::Freed { succeeded } => match GIVING.replace(Giving::Block) {
            Giving::Mappings => {
                let unmapped = known().unmapping.remove(&thread::current().id()).unwrap_or_default();
                if !succeeded {
                    map_again(unmapped);
                }
            }
            _ if succeeded => {}
            Giving::Block => {
                known().elsewhere.extend(GIVEN_BACK.take());
                tell(&EventKind::FreeFailed);
            }
            Giving::Handle { handle, reference } => {
                known().handles.refer_again(handle, reference);
                if reference.gives_back() {
                    tell(&EventKind::FreeFailed);
                }
            }
        },
        Call::Created { handle, bytes, device } => {
            let kind = if device.is_some() { MemKind::Vmm } else { MemKind::PinnedHost };
            let stack = stacks::here(bytes);
            let block = Block { stack, ..Block::new(cuda(device.unwrap_or(0)), Bytes::new(bytes), kind) };
            known().handles.create(handle, block);
            tell(&EventKind::Alloc { key: Key::new(Space::Handle, handle), block });
            obtained(&block);
        }
        Call::Retained { handle } => known().handles.retain(handle),
        Call::ForeignHandle { handle } => known().handles.import(handle),
        Call::Foreign { id_kind, id } => {
            known().elsewhere.insert(key(id_kind, id));
        }
        Call::CaptureBegun { stream } => capture_begun(stream),
        Call::CaptureEnded { stream, succeeded } => capture_ended(stream, succeeded),
        Call::GraphNode => graphs::allocate(),
        Call::Graphs { done } => graphs::launched(owner_of(caller).map(|owner| owner.device), done),
        Call::Mapped { at, handle } => known().handles.map(at, handle),
        Call::Unmapping { at, bytes } => {
            let unmapped = known().handles.unmap(at, bytes);
            for Mapping { handle, .. } in unmapped.iter().filter(|mapping| mapping.reference.gives_back()) {
                free_handle(*handle);
            }
            known().unmapping.insert(thread::current().id(), unmapped);
            GIVING.set(Giving::Mappings);
        }
        Call::Pool { pool, device } => {
            known().pools.insert(pool, device);
        }
        Call::StreamCreated { stream } => {
            if let Some(Owner { device, .. }) = owner_of(caller) {
                known().streams.insert(stream, device);
                GENERATION.fetch_add(1, SeqCst);
            }
        }
        Call::StreamDestroyed { stream } => {
            // Its capture ends with it.
            known().end_capture(stream);
            known().streams.remove(&stream);
            GENERATION.fetch_add(1, SeqCst);
        }
        Call::ContextGone { handle } => context_gone(handle),
    }
}

fn hear_of_refusal(caller: &Caller, bytes: u64, memory: Option<Memory>, pool: Option<u64>, stream: u64) {
    let current = || owner_of(caller).map(|owner| owner.device);
    let kind = memory.map_or(MemKind::Pool, kind_of);
    let device = match (memory, pool) {
        (Some(_), _) => current(),
        // One that is not known may be on the host.
        (None, Some(pool)) => known().pools.get(&pool).copied().flatten(),
        (None, None) => match device_of_stream(caller, stream, 0) {
            Where::Device(device) => Some(device),
            _ => current(),
        },
    };
    tell_of_refusal(device, bytes, kind);
}

fn kind_of(memory: Memory) -> MemKind {
    match memory {
        Memory::Device => MemKind::Device,
        Memory::Managed => MemKind::Managed,
        Memory::PinnedHost => MemKind::PinnedHost,
    }
}

fn key(id_kind: IdKind, id: u64) -> Key {
    let space = match id_kind {
        IdKind::Address => Space::Address,
        IdKind::Array => Space::Array,
        IdKind::Registered => Space::Registered,
    };
    Key::new(space, id)
}

pub(super) fn cuda(ordinal: u32) -> Device {
    Device { family: Family::Cuda, ordinal }
}

fn allocated(key: Key, ordinal: u32, bytes: u64, kind: MemKind, context: u8) {
    let stack = stacks::here(bytes);
    let block = Block { context, stack, ..Block::new(cuda(ordinal), Bytes::new(bytes), kind) };
    tell(&EventKind::Alloc { key, block });
    obtained(&block);
}

/// Something was allocated that cannot be counted: better said than guessed.
pub(super) fn lost() {
    tell(&EventKind::Lost { count: 1 });
}

/// Who is told may give back what he can spare, and that is heard.
fn tell_of_refusal(ordinal: Option<u32>, bytes: u64, kind: MemKind) {
    calls::as_program(|| refused(ordinal.map(cuda), Bytes::new(bytes), kind));
    // The next allocation does not go the short way, on which nobody looks whether it is what was refused.
    STREAM.set(Stream { generation: 0, ..STREAM.get() });
}

fn capture_begun(stream: u64) {
    let mut known = known();
    known.captures.push(stream);
    CAPTURES.store(known.captures.len(), SeqCst);
    GENERATION.fetch_add(1, SeqCst);
}

/// A capture ended, if it succeeded; if not, it may have ended all the same.
fn capture_ended(stream: u64, succeeded: bool) {
    if !succeeded && cuda::is_capturing(stream) != Some(false) {
        return;
    }
    // One that began before anybody listened: what was allocated in it may have been counted.
    if !known().end_capture(stream) && succeeded {
        lost();
    }
}

/// Before and while a trace looks at a device: what only the driver can say.
pub(super) fn look_at(ordinal: u32) {
    calls::as_observer(|| {
        if FIRST_BLOCK.load(Relaxed) == u64::MAX
            && let Some(number) = cuda::next_block_number()
        {
            FIRST_BLOCK.fetch_min(number, Relaxed);
        }
        graphs::look_at(ordinal);
    });
}

/// The mappings are still there after all.
fn map_again(unmapped: Vec<Mapping>) {
    for Mapping { at, handle, reference } in unmapped {
        known().handles.map_again(at, handle, reference);
        if let (true, Behind::Block(block)) = (reference.was_last, reference.behind) {
            tell(&EventKind::Alloc { key: Key::new(Space::Handle, handle), block });
        }
    }
}

/// The device of the context that a call was made in, and the number that its blocks carry.
#[inline]
fn owner_of(caller: &Caller) -> Option<Owner> {
    let context = match caller {
        #[cfg(feature = "cupti")]
        Caller::Cupti(context) => *context,
        #[cfg(feature = "dispatch")]
        Caller::Dispatch => Context { handle: cuda::current_context()?, uid: 0 },
    };
    let generation = GENERATION.load(Relaxed);
    let place = PLACE.get();
    if place.context == context && place.generation == generation {
        return Some(place.owner);
    }
    let owner = find_owner_of(caller, context)?;
    PLACE.set(Place { context, generation, owner });
    Some(owner)
}

#[inline(never)]
fn find_owner_of(caller: &Caller, context: Context) -> Option<Owner> {
    // Not under the lock: it is another library that is asked.
    let (context, device) = match caller {
        #[cfg(feature = "cupti")]
        Caller::Cupti(_) => {
            let heard = known().contexts.get(&context).copied();
            if heard.is_some() {
                return heard;
            }
            (context, crate::sys::cupti::device_of(context)?)
        }
        #[cfg(feature = "dispatch")]
        Caller::Dispatch => {
            let (device, uid) = cuda::identify_context()?;
            (Context { uid, ..context }, device)
        }
    };
    Some(known().name_context(context, device))
}

const CU_STREAM_LEGACY: u64 = 1;
const CU_STREAM_PER_THREAD: u64 = 2;

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
fn device_of_stream(caller: &Caller, stream: u64, address: u64) -> Where {
    if matches!(stream, 0 | CU_STREAM_LEGACY | CU_STREAM_PER_THREAD) {
        return Where::of(owner_of(caller).map(|owner| owner.device));
    }
    let generation = GENERATION.load(SeqCst);
    let heard = known().streams.get(&stream).copied();
    // One that is older than the subscription: the memory itself says where it is.
    let Some(device) = heard.or_else(|| cuda::device_at(address)) else { return Where::Unknown };
    if heard.is_none() {
        known().streams.insert(stream, device);
    }
    // While a capture is under way, each call has to be looked at, and while this thread waits for memory.
    if CAPTURES.load(SeqCst) == 0 && !WAITS.get() {
        STREAM.set(Stream { handle: stream, generation, device, least: stacks::least() });
    }
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
    /// A context without a number of its own may have gone, and another one have come under its handle.
    fn forget_contexts(&mut self) {
        let unnumbered = self.contexts.extract_if(|context, _| context.uid == 0);
        self.frees_may_be_missing.extend(unnumbered.map(|(context, owner)| (context.handle, owner)));
    }

    /// Whether a capture of that stream was under way, which is over.
    fn end_capture(&mut self, stream: u64) -> bool {
        let at = self.captures.iter().position(|captured| *captured == stream);
        at.map(|at| self.captures.swap_remove(at));
        CAPTURES.store(self.captures.len(), SeqCst);
        at.is_some()
    }

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

/// A block that is freed and was never heard of, if it is older than the subscription. One that is younger was allocated in a way
/// that nobody intercepts, and was never counted. The driver knows it still, since the free has not been made yet, and the look-up
/// changes nothing.
fn look_up(id_kind: IdKind, id: u64) -> Option<Block> {
    let first = FIRST_BLOCK.load(Relaxed);
    // Where no block is known to be younger, nobody knows.
    if id_kind != IdKind::Address || first == u64::MAX || cuda::block_number(id)? >= first {
        return None;
    }
    let cuda::AddressRange { bytes, ordinal, managed, on_host } = cuda::range_at(id)?;
    let kind = match (on_host, managed) {
        (_, true) => MemKind::Managed,
        (true, false) => MemKind::PinnedHost,
        (false, false) => MemKind::Device,
    };
    Some(Block::new(cuda(ordinal), Bytes::new(bytes), kind))
}

/// What was allocated in a context goes with it. Blocks of pools do not: a pool is the device's.
fn context_gone(handle: usize) {
    // Nothing was allocated in a context that was never named. One may be known by two sources, and has a number for each.
    let gone: Vec<Owner> = {
        let mut known = known();
        GENERATION.fetch_add(1, Relaxed);
        let Known { contexts, frees_may_be_missing, .. } = &mut *known;
        let certain = contexts.extract_if(|context, _| context.handle == handle).map(|(_, owner)| owner);
        certain.chain(frees_may_be_missing.extract_if(.., |(of, _)| *of == handle).map(|(_, owner)| owner)).collect()
    };
    for Owner { number, .. } in gone {
        if number == 0 {
            // Which blocks were in this context is not known.
            lost();
        } else {
            tell(&EventKind::ContextDestroyed { context: number });
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
    behind: Behind,
}

impl Reference {
    /// Memory goes with it, as far as this process is concerned.
    fn gives_back(&self) -> bool {
        self.was_last && self.behind != Behind::Elsewhere
    }
}

/// What is behind a handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Behind {
    Block(Block),
    /// Something older than the subscription.
    #[default]
    Older,
    /// Memory that belongs to somebody else, or none.
    Elsewhere,
}

/// `cuMemCreate`'s handles. The memory is given back when nobody refers to it: not who created or retained the handle,
/// and no mapping.
#[derive(Debug, Default)]
struct Handles {
    referred: HashMap<u64, (u32, Behind)>,
    /// By the address of the mapping.
    mapped: BTreeMap<u64, u64>,
}

impl Handles {
    fn create(&mut self, handle: u64, block: Block) {
        self.referred.insert(handle, (1, Behind::Block(block)));
    }

    fn retain(&mut self, handle: u64) {
        self.referred.entry(handle).or_default().0 += 1;
    }

    /// A reference is there after all.
    fn refer_again(&mut self, handle: u64, reference: Reference) {
        self.referred.entry(handle).or_insert((0, reference.behind)).0 += 1;
    }

    /// A handle that this process exported itself may come back as the same one.
    fn import(&mut self, handle: u64) {
        self.referred.entry(handle).or_insert((0, Behind::Elsewhere)).0 += 1;
    }

    /// Takes one reference away. That of a handle that is older than the subscription is taken to be the last.
    fn release(&mut self, handle: u64) -> Reference {
        if let Some((references @ 2.., behind)) = self.referred.get_mut(&handle) {
            *references -= 1;
            return Reference { was_last: false, behind: *behind };
        }
        let behind = self.referred.remove(&handle).map_or(Behind::Older, |(_, behind)| behind);
        Reference { was_last: true, behind }
    }

    fn map(&mut self, at: u64, handle: u64) {
        // Memory that is older than the subscription is not counted.
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
        self.refer_again(handle, reference);
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
    fn imported_memory_is_forgotten_when_it_is_given_back() {
        let name = 0x7fff_1234_0000;
        known().elsewhere.insert(key(IdKind::Array, name));
        let [freed, freed_again] = [(); 2].map(|()| was_never_counted(IdKind::Array, name));
        assert!(freed && !freed_again);
    }

    #[test]
    fn a_handle_lives_as_long_as_somebody_refers_to_it() {
        let block = Block::new(cuda(0), Bytes::mib(2), MemKind::Vmm);
        let mut handles = Handles::default();
        handles.create(1, block);
        assert_eq!(
            handles.release(1),
            Reference { was_last: true, behind: Behind::Block(block) },
            "created and released"
        );

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
        let reference = Reference { was_last: true, behind: Behind::Block(block) };
        assert_eq!(unmapped, [Mapping { at: 0x3000, handle: 1, reference }]);
        handles.map_again(0x3000, 1, reference);
        assert_eq!(handles.unmap(0x3000, 1), unmapped, "as if nothing had happened");

        // One's own, which came back as the same handle; then somebody else's.
        handles.create(1, block);
        handles.import(1);
        assert!(!handles.release(1).gives_back());
        assert!(handles.release(1).gives_back());
        handles.import(1);
        let released = handles.release(1);
        assert!(released.was_last && !released.gives_back());
        handles.refer_again(1, released);
        assert!(!handles.release(1).gives_back(), "the release failed, and the next one did not");

        assert_eq!(
            handles.release(9),
            Reference { was_last: true, behind: Behind::Older },
            "older than the subscription"
        );
        handles.map(0x1000, 9);
        assert!(handles.unmap(0, u64::MAX).is_empty());
        assert!(handles.referred.is_empty() && handles.mapped.is_empty());
    }
}
