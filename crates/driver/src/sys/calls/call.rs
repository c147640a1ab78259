//! One intercepted call, decoded.

/// The kind of memory that a call allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Device,
    Managed,
    PinnedHost,
}

/// The kind of id by which a call identifies a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdKind {
    Address,
    /// A `CUarray` or `CUmipmappedArray`.
    Array,
    /// The address of host memory that was registered, not allocated, through the driver.
    Registered,
}

/// A `CUcontext`, and an id that no other context of the process has. The driver may reuse the pointer for a later context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) uid: u64,
}

/// The context in which a call was made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Caller {
    /// CUPTI passes the context with each call.
    Cupti(Context),
    /// The thread's current context. The driver is asked for it only when it matters, because most calls name a stream.
    Dispatch,
}

/// A call after which the driver may hold more or less memory for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriverWork {
    /// A context was created.
    Context,
    /// A context ended, or lost a reference.
    ContextEnded,
    /// A module or a library was loaded from the image at this address.
    Module { handle: u64, image: u64 },
    /// A function or a variable of a module or a library was looked up.
    LookedUp { handle: u64 },
    /// A function was loaded before its first launch.
    FunctionLoaded { function: u64 },
    /// A module or a library was unloaded.
    Unloaded,
    /// A function was launched for the first time.
    Launch { function: u64 },
    /// A limit of the context was set.
    Limit { limit: u32, bytes: u64 },
    /// A stream was created, or access to another device was enabled.
    Streams,
    /// A graph was made executable.
    Graph { graph: u64 },
    /// An executable graph was destroyed.
    GraphDestroyed { graph: u64 },
    /// A pool was trimmed, or its release threshold was changed.
    Pools,
    /// The call failed. It may have changed the memory as well.
    Failed,
}

/// The effect of a call that was made or is about to be made. A copy, which does not refer to the arguments of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Memory was allocated on the device of the context.
    Allocated {
        id_kind: IdKind,
        id: u64,
        bytes: u64,
        memory: MemoryKind,
    },
    /// Stream-ordered memory was allocated: on the device of the pool, or else of the stream, or else of the context.
    Pooled {
        address: u64,
        bytes: u64,
        stream: u64,
        pool: Option<u64>,
    },
    /// An allocation failed because there was not enough memory. With `memory`, it was on the device of the context. Without it, the
    /// allocation was stream-ordered.
    Rejected {
        bytes: u64,
        memory: Option<MemoryKind>,
        pool: Option<u64>,
        stream: u64,
    },
    /// A handle was not created because the device did not have enough memory.
    NotCreated {
        bytes: u64,
        device: u32,
    },
    /// A call that cannot be counted: the size of the array's format is unknown, or the observer made the call itself.
    Uncounted,
    /// A block is about to be freed.
    Freeing {
        id_kind: IdKind,
        id: u64,
    },
    /// A call that frees has returned. Not recorded for a plain free that succeeded.
    Freed {
        succeeded: bool,
    },
    /// Memory was imported. Freeing it releases no memory of this process.
    Foreign {
        id_kind: IdKind,
        id: u64,
    },
    /// Memory was imported behind a handle.
    ForeignHandle {
        handle: u64,
    },
    /// A capture started. Until it ends, stream-ordered calls on this stream, and on streams that join it, become nodes of a graph.
    CaptureStarted {
        stream: u64,
    },
    /// A call that ends a capture has returned.
    CaptureEnded {
        stream: u64,
        succeeded: bool,
    },
    /// A node that allocates was added to a graph.
    GraphNode,
    /// The memory that is mapped for graphs is about to change, or (`done`) has changed.
    Graphs {
        done: bool,
    },
    /// Physical memory was allocated behind a handle. `device` is `None` if the memory is on the host.
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
    /// All mappings in this range are about to be removed.
    Unmapping {
        at: u64,
        bytes: u64,
    },
    /// A pool and its device; `None` if its memory is on the host.
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
    /// A call is about to be made after which the driver may hold more or less memory for itself, on this device or on that of the context.
    DriverStarts {
        device: Option<u32>,
    },
    /// Such a call has returned.
    DriverDone {
        device: Option<u32>,
        work: DriverWork,
    },
    /// A pool is about to be destroyed.
    PoolDestroyed {
        pool: u64,
    },
    /// A context is destroyed, with everything in it.
    ContextGone {
        handle: usize,
    },
}
