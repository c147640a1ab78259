//! The shapes of driver calls: the effect of a call on memory, and the arguments that it concerns.

use super::call::{IdKind, MemoryKind};

/// The effect of a driver call on memory, and the arguments that it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sys) enum CallShape {
    /// `(T *out, size_t bytes, …)`
    Alloc(MemoryKind),
    /// `(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, …)`
    AllocPitch,
    /// `(CUdeviceptr *out, size_t bytes, CUstream stream)`
    AllocOnStream(DefaultStream),
    /// `(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)`
    AllocFromPool(DefaultStream),
    /// `(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *)`
    Array,
    /// `(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *, [unsigned levels])`
    Array3D { levels: bool },
    /// `(void *host, size_t bytes, …)`
    Register,
    /// `(id, …)`
    Free(IdKind),
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
    /// `(CUcontext context)`: destroys the context unless `cuCtxAttach` added a reference.
    ContextDetach,
    /// `(CUdevice device)`: releases one reference to the device's primary context.
    PrimaryRelease,
    /// `(CUdevice device)`: destroys everything in the device's primary context.
    PrimaryReset,
    /// `(CUmemGenericAllocationHandle *out, …)`: a handle of imported memory, or a handle without memory.
    ForeignHandle,
    /// `(id *out, …)`: imported memory.
    Foreign(IdKind),
    /// `(CUstream stream, …)`
    CaptureStart(DefaultStream),
    /// `(CUstream stream, CUgraph *out)`
    CaptureEnd(DefaultStream),
    /// `(CUgraphNode *out, …, [CUgraphNodeParams *])`: may add a node that allocates. `parameters` is the index of the
    /// argument that contains the kind of the node; `None` if the call always adds a node that allocates.
    GraphNode { parameters: Option<usize> },
    /// `(…)`: the memory that is mapped for graphs may change, if any graph has a node that allocates.
    GraphLaunch,
    /// `(…)`: the memory that is mapped for graphs may change.
    Graphs,
    /// The driver may take memory for itself, or return it.
    Driver(DriverShape),
}

/// The arguments of a call after which the driver may hold more or less memory for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sys) enum DriverShape {
    /// `(CUcontext *out, …, CUdevice device)`: the index of the device.
    Context { device: usize },
    /// `(CUmodule *out or CUlibrary *out, const void *image or const char *file, …)`
    Module,
    /// `(…)`: a lookup, and the index of the `CUmodule` or `CUlibrary`.
    LookUp { handle: usize },
    /// `(…)`: the index of the `CUfunction` or `CUkernel`.
    LoadFunction { function: usize },
    /// `(CUmodule module)` or `(CUlibrary library)`
    Unload,
    /// `(…)`: a launch, and the index of the `CUfunction`.
    Launch { function: usize },
    /// `(CUlimit limit, size_t bytes)`
    Limit,
    /// `(…)`
    PeerAccess,
    /// `(CUgraphExec *out, …)`. `maps` is true if the memory that is mapped for graphs may change as well.
    Instantiate { maps: bool },
    /// `(CUgraphExec graph)`
    GraphDestroy,
    /// `(CUmemoryPool pool, …)`
    Pool,
    /// `(CUmemoryPool pool)`
    PoolDestroy,
}

/// The meaning of stream 0 in a call: the legacy stream of the whole context, or the stream of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sys) enum DefaultStream {
    Legacy,
    PerThread,
}

impl DefaultStream {
    /// Replaces 0 by the handle that has the same meaning in every call.
    #[inline]
    pub(super) const fn resolve(self, stream: u64) -> u64 {
        const CU_STREAM_PER_THREAD: u64 = 2;
        match (self, stream) {
            (Self::PerThread, 0) => CU_STREAM_PER_THREAD,
            _ => stream,
        }
    }
}
