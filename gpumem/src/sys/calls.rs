//! The driver calls that allocate and free: which they are, what their arguments mean, and how a call becomes a fact.
//!
//! All arguments that are read here are 64 bits wide or the last that is read, so a row of the table and the words of the
//! arguments say all there is to know of a call. CUPTI hands over the arguments as a C struct, whose front has the same
//! layout; a hook in the dispatch table puts them into an array.

use std::{
    cell::Cell,
    ffi::c_int,
    marker::PhantomData,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;

/// What a driver call does to memory, and in which of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// `(T *out, size_t bytes, …)`
    Alloc(Memory),
    /// `(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, …)`
    AllocPitch,
    /// `(CUdeviceptr *out, size_t bytes, CUstream stream)`
    AllocOnStream(Null),
    /// `(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)`
    AllocFromPool(Null),
    /// `(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *)`
    Array,
    /// `(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *, [unsigned levels])`
    Array3D { levels: bool },
    /// `(void *host, size_t bytes, …)`
    Register,
    /// `(name, …)`
    Free(Named),
    /// `(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *)`
    Create,
    /// `(CUmemGenericAllocationHandle *out, …)`
    Retain,
    /// `(CUmemGenericAllocationHandle handle)`
    Release,
    /// `(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, …)`
    Map,
    /// `(CUdeviceptr at, size_t bytes)`
    Unmap,
    /// `(CUmemoryPool *out, const CUmemPoolProps *)`
    PoolCreate,
    /// `(CUmemoryPool *out, CUdevice device)`
    PoolOfDevice,
    /// `(CUstream *out, …)`
    StreamCreate,
    /// `(CUstream stream)`
    StreamDestroy,
    /// `(CUcontext context)`
    ContextDestroy,
    /// `(CUcontext context)`: destroyed unless `cuCtxAttach` added a reference.
    ContextDetach,
    /// `(CUdevice device)`: gives one reference to the device's primary context back.
    PrimaryRelease,
    /// `(CUdevice device)`: destroys what is in the device's primary context.
    PrimaryReset,
    /// `(CUmemGenericAllocationHandle *out, …)`: memory that belongs to somebody else, or a handle without memory.
    ForeignHandle,
    /// `(name *out, …)`: memory that belongs to somebody else.
    Foreign(Named),
    /// `(CUstream stream, …)`
    CaptureBegin(Null),
    /// `(CUstream stream, CUgraph *out)`
    CaptureEnd(Null),
    /// `(CUgraphNode *out, …, [CUgraphNodeParams *])`, with the place of the parameters where the kind of the node is in them:
    /// a graph may have a node that allocates.
    GraphNode { parameters: Option<usize> },
    /// `(…)`: what is mapped for memory nodes of graphs may change, if there are any.
    GraphLaunch,
    /// `(…)`: what is mapped for memory nodes of graphs may change.
    Graphs,
}

/// What stream 0 means to a call: the stream of the whole context, or the calling thread's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Null {
    Legacy,
    PerThread,
}

impl Null {
    /// The stream by a name that does not depend on the call.
    #[inline]
    const fn named(self, stream: u64) -> u64 {
        const CU_STREAM_PER_THREAD: u64 = 2;
        match (self, stream) {
            (Self::PerThread, 0) => CU_STREAM_PER_THREAD,
            _ => stream,
        }
    }
}

/// The sort of memory that a call gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Device,
    Managed,
    PinnedHost,
}

/// What a block is given back by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    Address,
    Array,
    Registered,
}

/// The calls that are intercepted: CUPTI's number (0 where CUPTI reports the event in another way), the function with all
/// its arguments, and its shape. Names and numbers are those of NVIDIA's `cupti_driver_cbid.h` and
/// `generated_cuda_meta.h`, which do not change between versions. The two that programs call most often come first: all that
/// their hooks read lies in one line of the cache then.
///
/// Memory of another process or API that is opened here belongs to somebody else, and is not counted. Calls that import it are
/// here where calls that allocate share their way to give it back. `cuIpcOpenMemHandle` is not here: what it opens is given back
/// by `cuIpcCloseMemHandle` alone. What the driver allocates for itself (contexts, modules, stacks, printf buffers) is not
/// counted either.
macro_rules! with_calls {
    ($use:ident) => {
        $use! {
            598 cuMemAllocAsync(out, bytes, stream): Shape::AllocOnStream(Null::Legacy);
            600 cuMemFreeAsync(address, stream): Shape::Free(Named::Address);
            243 cuMemAlloc_v2(out, bytes): Shape::Alloc(Memory::Device);
            244 cuMemAllocPitch_v2(out, pitch, width, height, element): Shape::AllocPitch;
            371 cuMemAllocManaged(out, bytes, flags): Shape::Alloc(Memory::Managed);
            599 cuMemAllocAsync_ptsz(out, bytes, stream): Shape::AllocOnStream(Null::PerThread);
            611 cuMemAllocFromPoolAsync(out, bytes, pool, stream): Shape::AllocFromPool(Null::Legacy);
            612 cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream): Shape::AllocFromPool(Null::PerThread);
            245 cuMemFree_v2(address): Shape::Free(Named::Address);
            601 cuMemFreeAsync_ptsz(address, stream): Shape::Free(Named::Address);
            294 cuMemAllocHost_v2(out, bytes): Shape::Alloc(Memory::PinnedHost);
            39 cuMemHostAlloc(out, bytes, flags): Shape::Alloc(Memory::PinnedHost);
            271 cuMemHostAlloc_v2(out, bytes, flags): Shape::Alloc(Memory::PinnedHost);
            38 cuMemFreeHost(address): Shape::Free(Named::Address);
            301 cuMemHostRegister(address, bytes, flags): Shape::Register;
            379 cuMemHostRegister_v2(address, bytes, flags): Shape::Register;
            302 cuMemHostUnregister(address): Shape::Free(Named::Registered);
            272 cuArrayCreate_v2(out, descriptor): Shape::Array;
            274 cuArray3DCreate_v2(out, descriptor): Shape::Array3D { levels: false };
            347 cuMipmappedArrayCreate(out, descriptor, levels): Shape::Array3D { levels: true };
            89 cuArrayDestroy(array): Shape::Free(Named::Array);
            349 cuMipmappedArrayDestroy(array): Shape::Free(Named::Array);
            549 cuMemCreate(out, bytes, properties, flags): Shape::Create;
            565 cuMemRetainAllocationHandle(out, address): Shape::Retain;
            550 cuMemRelease(handle): Shape::Release;
            551 cuMemMap(address, bytes, offset, handle, flags): Shape::Map;
            552 cuMemUnmap(address, bytes): Shape::Unmap;
            607 cuMemPoolCreate(out, properties): Shape::PoolCreate;
            606 cuDeviceGetDefaultMemPool(out, device): Shape::PoolOfDevice;
            610 cuDeviceGetMemPool(out, device): Shape::PoolOfDevice;
            124 cuStreamCreate(out, flags): Shape::StreamCreate;
            367 cuStreamCreateWithPriority(out, flags, priority): Shape::StreamCreate;
            326 cuStreamDestroy_v2(stream): Shape::StreamDestroy;
            0 cuStreamDestroy(stream): Shape::StreamDestroy;
            555 cuMemImportFromShareableHandle(out, exported, kind): Shape::ForeignHandle;
            706 cuMulticastCreate(out, properties): Shape::ForeignHandle;
            616 cuMemPoolImportPointer(out, pool, exported): Shape::Foreign(Named::Address);
            486 cuExternalMemoryGetMappedBuffer(out, external, descriptor): Shape::Foreign(Named::Address);
            487 cuExternalMemoryGetMappedMipmappedArray(out, external, descriptor): Shape::Foreign(Named::Array);
            495 cuStreamBeginCapture(stream): Shape::CaptureBegin(Null::Legacy);
            496 cuStreamBeginCapture_ptsz(stream): Shape::CaptureBegin(Null::PerThread);
            539 cuStreamBeginCapture_v2(stream, mode): Shape::CaptureBegin(Null::Legacy);
            540 cuStreamBeginCapture_v2_ptsz(stream, mode): Shape::CaptureBegin(Null::PerThread);
            720 cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode): Shape::CaptureBegin(Null::Legacy);
            721 cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode): Shape::CaptureBegin(Null::PerThread);
            497 cuStreamEndCapture(stream, out): Shape::CaptureEnd(Null::Legacy);
            498 cuStreamEndCapture_ptsz(stream, out): Shape::CaptureEnd(Null::PerThread);
            638 cuGraphAddMemAllocNode(out, graph, nodes, count, parameters): Shape::GraphNode { parameters: None };
            712 cuGraphAddNode(out, graph, nodes, count, parameters): Shape::GraphNode { parameters: Some(4) };
            723 cuGraphAddNode_v2(out, graph, nodes, edges, count, parameters): Shape::GraphNode { parameters: Some(5) };
            514 cuGraphLaunch(graph, stream): Shape::GraphLaunch;
            515 cuGraphLaunch_ptsz(graph, stream): Shape::GraphLaunch;
            580 cuGraphUpload(graph, stream): Shape::Graphs;
            581 cuGraphUpload_ptsz(graph, stream): Shape::Graphs;
            656 cuGraphInstantiateWithParams(out, graph, parameters): Shape::Graphs;
            657 cuGraphInstantiateWithParams_ptsz(out, graph, parameters): Shape::Graphs;
            640 cuDeviceGraphMemTrim(device): Shape::Graphs;
            0 cuCtxDestroy(context): Shape::ContextDestroy;
            0 cuCtxDestroy_v2(context): Shape::ContextDestroy;
            0 cuCtxDetach(context): Shape::ContextDetach;
            0 cuDevicePrimaryCtxRelease(device): Shape::PrimaryRelease;
            0 cuDevicePrimaryCtxRelease_v2(device): Shape::PrimaryRelease;
            0 cuDevicePrimaryCtxReset(device): Shape::PrimaryReset;
            0 cuDevicePrimaryCtxReset_v2(device): Shape::PrimaryReset;
        }
    };
}
#[cfg(feature = "dispatch")]
pub(super) use with_calls;

macro_rules! table {
    ($($number:literal $name:ident($($argument:ident),*): $shape:expr;)*) => {
        &[$(($number, stringify!($name), $shape)),*]
    };
}

/// CUPTI's number, name and shape of each call.
pub(super) const CALLS: &[(u32, &str, Shape)] = with_calls!(table);

/// `CUcontext` and a number that no other context of the process has: the pointer may be given out again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) uid: u64,
}

/// In which context a call was made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Caller {
    /// CUPTI says it with each call.
    #[cfg(feature = "cupti")]
    Cupti(Context),
    /// In the thread's current context. The driver is asked for it only where that matters: most calls name a stream.
    #[cfg(feature = "dispatch")]
    Dispatch,
}

/// A fact about memory, copied out of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Memory of the context's device.
    Allocated {
        named: Named,
        name: u64,
        bytes: u64,
        memory: Memory,
    },
    /// Stream-ordered memory: of the pool's device, else of the stream's, else of the context's.
    Pooled {
        address: u64,
        bytes: u64,
        stream: u64,
        pool: Option<u64>,
    },
    /// There was not enough memory for so much: of the context's device where the sort is said, else stream-ordered.
    Refused {
        bytes: u64,
        memory: Option<Memory>,
        pool: Option<u64>,
        stream: u64,
    },
    /// There was not enough memory on the device for a handle.
    NotCreated {
        bytes: u64,
        device: u32,
    },
    /// Something that cannot be counted: an array whose format has no known size, or what was called while the observer
    /// was at work.
    Uncounted,
    /// About to be given back.
    Freeing {
        named: Named,
        name: u64,
    },
    /// The call that was about to give something back has ended. Not told of a plain free that worked.
    Freed {
        worked: bool,
    },
    /// Memory that belongs to somebody else: its free gives nothing back.
    Foreign {
        named: Named,
        name: u64,
    },
    /// A handle of such memory.
    ForeignHandle {
        handle: u64,
    },
    /// Stream-ordered calls on this stream, and on those that join it, become nodes of a graph from now on.
    CaptureBegun {
        stream: u64,
    },
    /// They do not any more, if it worked.
    CaptureEnded {
        stream: u64,
        worked: bool,
    },
    /// A graph has a node that allocates.
    GraphNode,
    /// What is mapped for memory nodes of graphs is about to change, or has changed.
    Graphs {
        done: bool,
    },
    /// Physical memory behind a handle; no device if it is on the host.
    Created {
        handle: u64,
        bytes: u64,
        device: Option<u32>,
    },
    Retained {
        handle: u64,
    },
    Releasing {
        handle: u64,
    },
    Mapped {
        at: u64,
        handle: u64,
    },
    /// About to be unmapped: everything in this range.
    Unmapping {
        at: u64,
        bytes: u64,
    },
    /// A pool and its device; no device if it is on the host.
    Pool {
        pool: u64,
        device: Option<u32>,
    },
    StreamCreated {
        stream: u64,
    },
    StreamDestroyed {
        stream: u64,
    },
    /// A context is destroyed, with everything in it.
    ContextGone {
        handle: usize,
    },
}

/// The arguments of one call: 64-bit words, as many as its row in [`CALLS`] has.
#[derive(Clone, Copy)]
pub(super) struct Arguments(*const u64);

impl Arguments {
    /// # Safety
    /// `words` points to the arguments of a call, which stay there while this is used.
    pub(super) unsafe fn new(words: *const u64) -> Self {
        Self(words)
    }

    /// One of the arguments.
    ///
    /// # Safety
    /// The call has 64-bit arguments from the first to this one; the last may be narrower, and then the upper half of the
    /// word means nothing.
    #[inline]
    unsafe fn word(self, at: usize) -> u64 {
        // SAFETY: the pointer is to the arguments, of which this is one.
        unsafe { self.0.add(at).read() }
    }

    /// What the call wrote to where its first argument points.
    ///
    /// # Safety
    /// The call has succeeded, and its first argument is where it writes one word.
    #[inline]
    unsafe fn out(self) -> u64 {
        // SAFETY: a call that succeeded has written it.
        unsafe { (self.word(0) as *const u64).read() }
    }
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
struct Array3DDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// The front of `CUmemAllocationProp` and of `CUmemPoolProps`.
#[repr(C)]
struct Located {
    kind: u32,
    handle_types: u32,
    location: u32,
    id: c_int,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<ArrayDescriptor>() == 24);
    assert!(size_of::<Array3DDescriptor>() == 40);
    assert!(std::mem::offset_of!(Located, location) == 8);
};

/// Who is told of each fact, on the thread that makes the call, while no observer is [`at_work`] on it.
///
/// It is a type, not a value: its functions become a part of each hook, which is then one function without calls. What runs
/// between two calls of the driver is rarely in the processor's instruction cache, so that each line of it counts.
pub(crate) trait Observe: 'static {
    /// [`Call::Pooled`] on a stream. The observer itself says where it is [`at_work`]. It must not panic: nothing catches that.
    fn pooled(caller: &Caller, address: u64, bytes: u64, stream: u64);

    /// As [`pooled`](Self::pooled), for [`Call::Freeing`] of an address.
    fn freeing(caller: &Caller, address: u64);

    /// Every other call. The observer is [`at_work`].
    fn other(caller: &Caller, call: &Call);
}

/// Where a call that is read is reported.
pub(super) trait Tell {
    fn tell(&self, call: &Call);

    /// [`Call::Pooled`] on a stream.
    #[inline]
    fn pooled(&self, address: u64, bytes: u64, stream: u64) {
        self.tell(&Call::Pooled { address, bytes, stream, pool: None });
    }

    /// [`Call::Freeing`] of an address.
    #[inline]
    fn freeing(&self, address: u64) {
        self.tell(&Call::Freeing { named: Named::Address, name: address });
    }
}

/// Reports the calls of one caller to an observer. A panic of the observer ends here.
pub(super) struct Told<O> {
    caller: Caller,
    observer: PhantomData<O>,
}

impl<O: Observe> Told<O> {
    pub(super) const fn by(caller: Caller) -> Self {
        Self { caller, observer: PhantomData }
    }

    /// For calls that the observer makes while it is at work: reports each as [`Call::Uncounted`].
    pub(super) const fn of_observer(&self) -> impl Tell {
        OfObserver(self)
    }
}

struct OfObserver<'a, O>(&'a Told<O>);

impl<O: Observe> Tell for OfObserver<'_, O> {
    fn tell(&self, _: &Call) {
        self.0.tell(&Call::Uncounted);
    }
}

impl<O: Observe> Tell for Told<O> {
    #[inline(never)]
    fn tell(&self, call: &Call) {
        at_rare_work(|| O::other(&self.caller, call));
    }

    #[allow(clippy::inline_always, reason = "a hook is one function, which takes fewer lines of the instruction cache")]
    #[inline(always)]
    fn pooled(&self, address: u64, bytes: u64, stream: u64) {
        O::pooled(&self.caller, address, bytes, stream);
    }

    #[allow(clippy::inline_always, reason = "a hook is one function, which takes fewer lines of the instruction cache")]
    #[inline(always)]
    fn freeing(&self, address: u64) {
        O::freeing(&self.caller, address);
    }
}

/// For the observer: runs code that may hold a lock of its own, so that calls which this code makes are not told to it.
pub(crate) fn at_work<T>(code: impl FnOnce() -> T) -> T {
    in_state(State::Observer, code)
}

/// As [`at_work`], for what is rare in [`Observe::pooled`] and [`Observe::freeing`], and away from what is frequent. `None` if
/// the code panicked.
#[cold]
#[inline(never)]
pub(crate) fn at_rare_work<T>(code: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(|| at_work(code))).map_err(mem::forget).ok()
}

/// For the observer: runs code that holds no lock of its own, so that calls which it makes are counted as any others.
pub(crate) fn outside<T>(code: impl FnOnce() -> T) -> T {
    in_state(State::Program, code)
}

/// What is known of the graphs of this process. Launches are not reported until some graph has a node that allocates: programs
/// launch graphs of kernels in a microsecond each.
struct Graphs {
    allocate: AtomicBool,
    /// One was launched, and was not reported.
    were_launched: AtomicBool,
}

static GRAPHS: Graphs = Graphs { allocate: AtomicBool::new(false), were_launched: AtomicBool::new(false) };

impl Graphs {
    /// A graph is launched. Says whether that is to be reported.
    #[inline]
    fn launched(&self) -> bool {
        if self.allocate.load(Relaxed) {
            return true;
        }
        if !self.were_launched.load(Relaxed) {
            self.were_launched.store(true, Relaxed);
        }
        false
    }
}

/// Has launches of graphs reported from now on. Says whether they were already.
pub(crate) fn report_graph_launches() -> bool {
    GRAPHS.allocate.swap(true, Relaxed)
}

/// Whether graphs were launched that were not reported.
pub(crate) fn launches_are_unreported() -> bool {
    !GRAPHS.allocate.load(Relaxed) && GRAPHS.were_launched.load(Relaxed)
}

/// For calls of the driver that are this library's own: they are told to nobody.
pub(super) fn unheard<T>(code: impl FnOnce() -> T) -> T {
    in_state(State::Own, code)
}

/// Runs code as if the thread were doing this.
#[inline]
pub(super) fn in_state<T>(state: State, code: impl FnOnce() -> T) -> T {
    struct Restored(State);

    impl Drop for Restored {
        fn drop(&mut self) {
            STATE.set(self.0);
        }
    }

    let _restored = Restored(STATE.replace(state));
    code()
}

/// What the calling thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Program,
    /// It is in a driver function whose call is counted. What this function calls in turn is part of that call.
    #[cfg_attr(not(feature = "dispatch"), expect(dead_code, reason = "CUPTI reports only the outer call"))]
    Driver,
    /// It calls the driver for this library itself.
    Own,
    /// The observer is at work, and may hold a lock that it would wait for if it were told of another call.
    Observer,
}

thread_local! {
    pub(super) static STATE: Cell<State> = const { Cell::new(State::Program) };
}

/// Reads a call that is about to be made: what gives memory back is told before, since another thread may be given its name as
/// soon as the driver has it.
///
/// # Safety
/// `arguments` are those of a call of this shape.
#[allow(clippy::inline_always, reason = "in a hook the shape is a constant, and most of this is not there then")]
#[inline(always)]
pub(super) unsafe fn at_enter(shape: Shape, arguments: Arguments, to: &impl Tell) {
    // SAFETY: the words are those of this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    match shape {
        Shape::Free(Named::Address) => to.freeing(word(0)),
        Shape::Free(named) => to.tell(&Call::Freeing { named, name: word(0) }),
        Shape::Release => to.tell(&Call::Releasing { handle: word(0) }),
        Shape::Unmap => to.tell(&Call::Unmapping { at: word(0), bytes: word(1) }),
        // Told before also because the driver may report an error of earlier work, and destroys the context all the same.
        #[expect(clippy::cast_possible_truncation, reason = "a pointer is as wide as `usize`")]
        Shape::ContextDestroy => to.tell(&Call::ContextGone { handle: word(0) as usize }),
        Shape::GraphLaunch if !GRAPHS.launched() => {}
        Shape::GraphLaunch | Shape::Graphs => to.tell(&Call::Graphs { done: false }),
        _ => {}
    }
}

/// Reads a call that was made. What programs call by the million comes first. Each fact is told where it is made: one that is
/// handed back is copied in other pieces than it was written in, and the processor waits for that (store forwarding).
///
/// # Safety
/// `arguments` are those of a call of this shape, which returned `result`.
#[allow(clippy::inline_always, reason = "in a hook the shape is a constant, and most of this is not there then")]
#[inline(always)]
pub(super) unsafe fn at_exit(shape: Shape, result: u32, arguments: Arguments, to: &impl Tell) {
    match (shape, result) {
        (Shape::Free(_), 0) => {}
        (Shape::AllocOnStream(null), 0) => {
            // SAFETY: the call succeeded, its first argument is where it writes the address, and it has three.
            let (address, bytes, stream) = unsafe { (arguments.out(), arguments.word(1), arguments.word(2)) };
            to.pooled(address, bytes, null.named(stream));
        }
        (Shape::GraphLaunch, _) if !GRAPHS.launched() => {}
        // SAFETY: the arguments are those of a call of this shape, which succeeded.
        (shape, 0) => unsafe { succeeded(shape, arguments, to) },
        (shape, result) => {
            // SAFETY: the arguments are those of a call of this shape.
            if let Some(call) = unsafe { failed(shape, result, arguments) } {
                to.tell(&call);
            }
        }
    }
}

/// Reads a call that has succeeded.
///
/// # Safety
/// `arguments` are those of a call of this shape, which succeeded.
#[inline(never)]
unsafe fn succeeded(shape: Shape, arguments: Arguments, to: &impl Tell) {
    // SAFETY: the words are those of this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    // SAFETY: the call succeeded, and only of shapes that begin with `*out` this is asked.
    let out = || unsafe { arguments.out() };
    to.tell(&match shape {
        Shape::Alloc(memory) => Call::Allocated { named: Named::Address, name: out(), bytes: word(1), memory },
        Shape::AllocPitch => {
            // SAFETY: as for `out`; the second argument's target is the pitch.
            let pitch = unsafe { (word(1) as *const u64).read() };
            let bytes = pitch.saturating_mul(word(3));
            Call::Allocated { named: Named::Address, name: out(), bytes, memory: Memory::Device }
        }
        Shape::AllocFromPool(null) => {
            Call::Pooled { address: out(), bytes: word(1), stream: null.named(word(3)), pool: Some(word(2)) }
        }
        Shape::Array => {
            // SAFETY: the second argument of a call that succeeded points to a descriptor.
            let ArrayDescriptor { width, height, format, channels } =
                unsafe { (word(1) as *const ArrayDescriptor).read() };
            array(out(), [width, height, 1], format, channels, 1)
        }
        Shape::Array3D { levels } => {
            // SAFETY: as above.
            let Array3DDescriptor { width, height, depth, format, channels, .. } =
                unsafe { (word(1) as *const Array3DDescriptor).read() };
            #[expect(clippy::cast_possible_truncation, reason = "an unsigned int lies in the word's lower half")]
            let levels = if levels { word(2) as u32 } else { 1 };
            array(out(), [width, height, depth], format, channels, levels)
        }
        Shape::Register => {
            let (name, bytes) = (word(0), word(1));
            Call::Allocated { named: Named::Registered, name, bytes, memory: Memory::PinnedHost }
        }
        Shape::Create => {
            // SAFETY: the third argument of a call that succeeded points to the properties.
            let device = unsafe { located(word(2)) };
            Call::Created { handle: out(), bytes: word(1), device }
        }
        Shape::Retain => Call::Retained { handle: out() },
        Shape::Map => Call::Mapped { at: word(0), handle: word(3) },
        Shape::PoolCreate => {
            // SAFETY: the second argument of a call that succeeded points to the properties.
            let device = unsafe { located(word(1)) };
            Call::Pool { pool: out(), device }
        }
        #[expect(clippy::cast_possible_truncation, reason = "an int lies in the word's lower half")]
        Shape::PoolOfDevice => Call::Pool { pool: out(), device: Some(word(1) as u32) },
        Shape::StreamCreate => Call::StreamCreated { stream: out() },
        Shape::StreamDestroy => Call::StreamDestroyed { stream: word(0) },
        Shape::Release | Shape::Unmap => Call::Freed { worked: true },
        Shape::ForeignHandle => Call::ForeignHandle { handle: out() },
        Shape::Foreign(named) => Call::Foreign { named, name: out() },
        Shape::CaptureBegin(null) => Call::CaptureBegun { stream: null.named(word(0)) },
        Shape::CaptureEnd(null) => Call::CaptureEnded { stream: null.named(word(0)), worked: true },
        Shape::GraphNode { parameters } => {
            /// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`
            const MEM_ALLOC: c_int = 10;
            // SAFETY: the call succeeded, and the first field of the node's parameters is its kind.
            let allocates = parameters.is_none_or(|at| unsafe { (word(at) as *const c_int).read() } == MEM_ALLOC);
            if !allocates {
                return;
            }
            Call::GraphNode
        }
        Shape::GraphLaunch | Shape::Graphs => Call::Graphs { done: true },
        // Whether the context is still there depends on references that are not known.
        Shape::ContextDetach => Call::Uncounted,
        // `at_enter` and `at_exit` tell the first three; the dispatch table's hook tells of primary contexts.
        Shape::AllocOnStream(_)
        | Shape::Free(_)
        | Shape::ContextDestroy
        | Shape::PrimaryRelease
        | Shape::PrimaryReset => {
            return;
        }
    });
}

/// What is to be told of a call that failed.
///
/// # Safety
/// `arguments` are those of a call of this shape.
#[cold]
unsafe fn failed(shape: Shape, result: u32, arguments: Arguments) -> Option<Call> {
    // SAFETY: the words are those of this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    match shape {
        Shape::Free(_) | Shape::Release | Shape::Unmap => return Some(Call::Freed { worked: false }),
        // It may have ended all the same.
        Shape::CaptureEnd(null) => return Some(Call::CaptureEnded { stream: null.named(word(0)), worked: false }),
        // The driver may report an error of earlier work, and do it all the same.
        Shape::GraphLaunch | Shape::Graphs => return Some(Call::Graphs { done: true }),
        _ => {}
    }
    if result != CUDA_ERROR_OUT_OF_MEMORY {
        return None;
    }
    let of_context = |bytes, memory| Call::Refused { bytes, memory: Some(memory), pool: None, stream: 0 };
    Some(match shape {
        Shape::Alloc(memory) => of_context(word(1), memory),
        Shape::AllocPitch => of_context(word(2).saturating_mul(word(3)), Memory::Device),
        Shape::AllocOnStream(null) => {
            Call::Refused { bytes: word(1), memory: None, pool: None, stream: null.named(word(2)) }
        }
        Shape::AllocFromPool(null) => {
            Call::Refused { bytes: word(1), memory: None, pool: Some(word(2)), stream: null.named(word(3)) }
        }
        Shape::Create => {
            // SAFETY: a call that ran out of memory has looked at its third argument, the properties.
            let device = unsafe { located(word(2)) }?;
            Call::NotCreated { bytes: word(1), device }
        }
        _ => return None,
    })
}

/// The device at which properties place memory; `None` for the host.
///
/// # Safety
/// `properties` is the address of a `CUmemAllocationProp` or a `CUmemPoolProps`.
unsafe fn located(properties: u64) -> Option<u32> {
    const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    // SAFETY: both structs begin with these four.
    let Located { location, id, .. } = unsafe { (properties as *const Located).read() };
    (location == CU_MEM_LOCATION_TYPE_DEVICE).then(|| u32::try_from(id).ok()).flatten()
}

/// An array's size is what its elements add up to; the driver may pad it.
fn array(name: u64, [width, height, depth]: [usize; 3], format: u32, channels: u32, levels: u32) -> Call {
    let element = match format {
        // CU_AD_FORMAT_UNSIGNED_INT8, SIGNED_INT8
        0x01 | 0x08 => 1_u64,
        // UNSIGNED_INT16, SIGNED_INT16, HALF
        0x02 | 0x09 | 0x10 => 2,
        // UNSIGNED_INT32, SIGNED_INT32, FLOAT
        0x03 | 0x0a | 0x20 => 4,
        _ => return Call::Uncounted,
    };
    let level = |level: u32| {
        let side = |side: usize| (side as u64).checked_shr(level).unwrap_or(0).max(1);
        side(width).saturating_mul(side(height)).saturating_mul(side(depth))
    };
    let elements = (0..levels.min(64)).map(level).fold(0, u64::saturating_add);
    let bytes = elements.saturating_mul(element).saturating_mul(channels.into());
    Call::Allocated { named: Named::Array, name, bytes, memory: Memory::Device }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[derive(Clone, Copy)]
    enum Side {
        Enter,
        Exit(u32),
    }
    use Side::{Enter, Exit};

    /// The fact that one side of a call tells.
    fn call(name: &str, side: Side, words: &[u64]) -> Option<Call> {
        struct Once(Cell<Option<Call>>);

        impl Tell for Once {
            fn tell(&self, call: &Call) {
                assert_eq!(self.0.replace(Some(*call)), None, "one fact for each side");
            }
        }

        let (.., shape) = *CALLS.iter().find(|(_, of, _)| *of == name).expect("it is in the table");
        let told = Once(Cell::new(None));
        // SAFETY: the tests pass the arguments that the call has.
        unsafe {
            let arguments = Arguments::new(words.as_ptr());
            match side {
                Enter => at_enter(shape, arguments, &told),
                Exit(result) => at_exit(shape, result, arguments, &told),
            }
        }
        told.0.get()
    }

    fn address<T>(of: &T) -> u64 {
        ptr::from_ref(of) as u64
    }

    #[test]
    fn an_allocation_is_read_when_it_has_succeeded() {
        let out = 0x7000_u64;
        let params = [address(&out), 512];
        assert_eq!(call("cuMemAlloc_v2", Enter, &params), None, "nothing is read before the call");
        assert_eq!(call("cuMemAlloc_v2", Exit(1), &params), None, "nothing is read of a call that failed");
        let expected = Call::Allocated { named: Named::Address, name: out, bytes: 512, memory: Memory::Device };
        assert_eq!(call("cuMemAlloc_v2", Exit(0), &params), Some(expected));
        // A call that failed may leave its out-parameter pointing nowhere.
        assert_eq!(call("cuMemAlloc_v2", Exit(1), &[8, 512]), None);
    }

    #[test]
    fn what_was_refused_is_read_without_out_parameters() {
        let of_context = |bytes, memory| Call::Refused { bytes, memory: Some(memory), pool: None, stream: 0 };
        assert_eq!(call("cuMemAlloc_v2", Exit(2), &[8, 512]), Some(of_context(512, Memory::Device)));
        assert_eq!(call("cuMemAllocManaged", Exit(2), &[8, 512]), Some(of_context(512, Memory::Managed)));
        assert_eq!(call("cuMemAllocPitch_v2", Exit(2), &[8, 8, 1000, 10, 4]), Some(of_context(10_000, Memory::Device)));
        let pooled = |pool, stream| Call::Refused { bytes: 64, memory: None, pool, stream };
        assert_eq!(call("cuMemAllocAsync", Exit(2), &[8, 64, 9]), Some(pooled(None, 9)));
        assert_eq!(call("cuMemAllocFromPoolAsync", Exit(2), &[8, 64, 5, 9]), Some(pooled(Some(5), 9)));
        let on_device = Located { kind: 1, handle_types: 0, location: 1, id: 3 };
        let created = Call::NotCreated { bytes: 64, device: 3 };
        assert_eq!(call("cuMemCreate", Exit(2), &[8, 64, address(&on_device), 0]), Some(created));
        assert_eq!(call("cuMemFree_v2", Exit(2), &[7]), Some(Call::Freed { worked: false }), "a free asks for nothing");
    }

    #[test]
    fn a_free_is_read_before_the_call_and_its_result_after() {
        for name in ["cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz", "cuMemFreeHost"] {
            let freeing = Call::Freeing { named: Named::Address, name: 7 };
            assert_eq!(call(name, Enter, &[7, 0]), Some(freeing));
            assert_eq!(call(name, Exit(0), &[7, 0]), None, "it was told before");
            assert_eq!(call(name, Exit(1), &[7, 0]), Some(Call::Freed { worked: false }));
        }
        assert_eq!(call("cuMemHostUnregister", Enter, &[7]), Some(Call::Freeing { named: Named::Registered, name: 7 }));
        assert_eq!(call("cuMemRelease", Enter, &[7]), Some(Call::Releasing { handle: 7 }));
        assert_eq!(call("cuMemUnmap", Enter, &[7, 8]), Some(Call::Unmapping { at: 7, bytes: 8 }));
    }

    #[test]
    fn arguments_are_read_from_their_places() {
        let (out, pitch) = (0x7000_u64, 1024_u64);
        let pitched = Call::Allocated { named: Named::Address, name: out, bytes: 10_240, memory: Memory::Device };
        assert_eq!(call("cuMemAllocPitch_v2", Exit(0), &[address(&out), address(&pitch), 1000, 10, 4]), Some(pitched));
        let pooled = Call::Pooled { address: out, bytes: 64, stream: 9, pool: None };
        assert_eq!(call("cuMemAllocAsync", Exit(0), &[address(&out), 64, 9]), Some(pooled));
        let pooled = Call::Pooled { address: out, bytes: 64, stream: 9, pool: Some(5) };
        assert_eq!(call("cuMemAllocFromPoolAsync", Exit(0), &[address(&out), 64, 5, 9]), Some(pooled));
        assert_eq!(call("cuMemMap", Exit(0), &[1, 2, 3, 4, 5]), Some(Call::Mapped { at: 1, handle: 4 }));
        assert_eq!(
            call("cuDeviceGetDefaultMemPool", Exit(0), &[address(&out), 0xffff_ffff_0000_0001]),
            Some(Call::Pool { pool: out, device: Some(1) })
        );
        let on_device = Located { kind: 1, handle_types: 0, location: 1, id: 3 };
        let created = Call::Created { handle: out, bytes: 64, device: Some(3) };
        assert_eq!(call("cuMemCreate", Exit(0), &[address(&out), 64, address(&on_device), 0]), Some(created));
        let on_host = Located { kind: 1, handle_types: 0, location: 2, id: 0 };
        assert_eq!(
            call("cuMemPoolCreate", Exit(0), &[address(&out), address(&on_host)]),
            Some(Call::Pool { pool: out, device: None })
        );
    }

    #[test]
    fn arrays_are_as_large_as_their_elements() {
        let out = 0x7000_u64;
        let flat = ArrayDescriptor { width: 10, height: 0, format: 0x20, channels: 2 };
        let expected = |bytes| Call::Allocated { named: Named::Array, name: out, bytes, memory: Memory::Device };
        assert_eq!(call("cuArrayCreate_v2", Exit(0), &[address(&out), address(&flat)]), Some(expected(80)));
        let cube = Array3DDescriptor { width: 8, height: 4, depth: 2, format: 0x01, channels: 4, flags: 0 };
        assert_eq!(call("cuArray3DCreate_v2", Exit(0), &[address(&out), address(&cube)]), Some(expected(256)));
        // 8·4·2 + 4·2·1 + 2·1·1 + 1 = 75 elements
        assert_eq!(call("cuMipmappedArrayCreate", Exit(0), &[address(&out), address(&cube), 4]), Some(expected(300)));
        let strange = ArrayDescriptor { width: 10, height: 1, format: 0xb0, channels: 1 };
        assert_eq!(call("cuArrayCreate_v2", Exit(0), &[address(&out), address(&strange)]), Some(Call::Uncounted));
    }

    #[test]
    fn the_end_of_a_context_is_told_before_the_call() {
        for name in ["cuCtxDestroy", "cuCtxDestroy_v2"] {
            assert_eq!(call(name, Enter, &[7]), Some(Call::ContextGone { handle: 7 }));
            assert_eq!([call(name, Exit(0), &[7]), call(name, Exit(700), &[7])], [None, None]);
        }
        assert_eq!(call("cuCtxDetach", Exit(0), &[7]), Some(Call::Uncounted), "references are not known");
    }

    #[test]
    fn what_the_observer_calls_is_uncounted_unless_it_is_outside() {
        thread_local! {
            static TOLD: std::cell::RefCell<Vec<Call>> = const { std::cell::RefCell::new(Vec::new()) };
        }
        struct Observer;

        fn free(name: u64) {
            #[cfg(feature = "cupti")]
            let caller = Caller::Cupti(Context::default());
            #[cfg(not(feature = "cupti"))]
            let caller = Caller::Dispatch;
            let told = Told::<Observer>::by(caller);
            if STATE.get() == State::Observer { told.of_observer().freeing(name) } else { told.freeing(name) }
        }

        impl Observe for Observer {
            fn pooled(_: &Caller, _: u64, _: u64, _: u64) {}

            fn freeing(_: &Caller, name: u64) {
                TOLD.with_borrow_mut(|told| told.push(Call::Freeing { named: Named::Address, name }));
                if name == 1 {
                    at_work(|| {
                        free(2);
                        outside(|| free(3));
                        free(4);
                    });
                }
            }

            fn other(_: &Caller, call: &Call) {
                TOLD.with_borrow_mut(|told| told.push(*call));
            }
        }

        free(1);
        free(5);
        let freeing = |name| Call::Freeing { named: Named::Address, name };
        let expected = [freeing(1), Call::Uncounted, freeing(3), Call::Uncounted, freeing(5)];
        assert_eq!(TOLD.take(), expected);
    }

    #[test]
    fn captures_graphs_and_imports_are_read() {
        let out = 0x7000_u64;
        let at = address(&out);
        for (name, stream) in [("cuStreamBeginCapture_v2", 0), ("cuStreamBeginCapture_v2_ptsz", 2)] {
            assert_eq!(call(name, Enter, &[0, 1]), None, "it may fail");
            assert_eq!(call(name, Exit(0), &[0, 1]), Some(Call::CaptureBegun { stream }));
            assert_eq!(call(name, Exit(0), &[9, 1]), Some(Call::CaptureBegun { stream: 9 }));
            assert_eq!(call(name, Exit(900), &[9, 1]), None);
        }
        for (name, stream) in [("cuStreamEndCapture", 0), ("cuStreamEndCapture_ptsz", 2)] {
            for (result, worked) in [(0, true), (901, false)] {
                assert_eq!(call(name, Exit(result), &[0, at]), Some(Call::CaptureEnded { stream, worked }));
            }
        }
        // The calling thread's own stream, where stream 0 means that one.
        let pooled = |stream| Some(Call::Pooled { address: out, bytes: 64, stream, pool: None });
        assert_eq!(call("cuMemAllocAsync", Exit(0), &[at, 64, 0]), pooled(0));
        assert_eq!(call("cuMemAllocAsync_ptsz", Exit(0), &[at, 64, 0]), pooled(2));
        assert_eq!(call("cuMemAllocAsync_ptsz", Exit(0), &[at, 64, 9]), pooled(9));
        // Launches are told from the moment a graph is known to allocate.
        assert_eq!([call("cuGraphLaunch", Enter, &[7, 9]), call("cuGraphLaunch", Exit(0), &[7, 9])], [None, None]);
        assert!(launches_are_unreported() && !report_graph_launches() && !launches_are_unreported());
        for name in ["cuGraphLaunch", "cuGraphUpload_ptsz", "cuDeviceGraphMemTrim"] {
            assert_eq!(call(name, Enter, &[7, 9]), Some(Call::Graphs { done: false }));
            for result in [0, 700] {
                assert_eq!(call(name, Exit(result), &[7, 9]), Some(Call::Graphs { done: true }));
            }
        }
        assert_eq!(
            call("cuMemImportFromShareableHandle", Exit(0), &[at, 77, 1]),
            Some(Call::ForeignHandle { handle: out })
        );
        let foreign = |named| Some(Call::Foreign { named, name: out });
        assert_eq!(call("cuMemPoolImportPointer", Exit(0), &[at, 5, 8]), foreign(Named::Address));
        assert_eq!(call("cuExternalMemoryGetMappedMipmappedArray", Exit(0), &[at, 5, 8]), foreign(Named::Array));
        assert_eq!(call("cuMemPoolImportPointer", Exit(1), &[8, 5, 8]), None, "nothing is read of a call that failed");
    }

    #[test]
    fn no_call_is_listed_twice() {
        for (at, (number, name, _)) in CALLS.iter().enumerate() {
            let others = || CALLS[at + 1..].iter();
            assert!(others().all(|(_, other, _)| other != name), "{name}");
            assert!(*number == 0 || others().all(|(other, ..)| other != number), "{number}");
        }
    }
}
