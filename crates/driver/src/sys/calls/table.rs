//! The table of the calls that are intercepted.

use super::{
    call::{IdKind, Memory},
    shape::{DefaultStream, Shape},
};

/// The calls that are intercepted. A row contains CUPTI's number (0 where CUPTI reports the event in another way), the function with all
/// its arguments, and its shape. The names and numbers are those of NVIDIA's `cupti_driver_cbid.h` and `generated_cuda_meta.h`; NVIDIA does
/// not change them between versions. The two calls that programs make most often come first, so that all data that their hooks read is in
/// one cache line.
///
/// Memory that is imported from another process or API is not counted. A call that imports memory is in the table if the memory is freed by
/// a function that also frees allocations. `cuIpcOpenMemHandle` is not in the table, because its memory is closed only by
/// `cuIpcCloseMemHandle`. Memory that the driver allocates for itself (contexts, modules, stacks, printf buffers) is not counted either.
macro_rules! with_calls {
    ($use:ident) => {
        $use! {
            598 cuMemAllocAsync(out, bytes, stream): Shape::AllocOnStream(DefaultStream::Legacy);
            600 cuMemFreeAsync(address, stream): Shape::Free(IdKind::Address);
            243 cuMemAlloc_v2(out, bytes): Shape::Alloc(Memory::Device);
            244 cuMemAllocPitch_v2(out, pitch, width, height, element): Shape::AllocPitch;
            371 cuMemAllocManaged(out, bytes, flags): Shape::Alloc(Memory::Managed);
            599 cuMemAllocAsync_ptsz(out, bytes, stream): Shape::AllocOnStream(DefaultStream::PerThread);
            611 cuMemAllocFromPoolAsync(out, bytes, pool, stream): Shape::AllocFromPool(DefaultStream::Legacy);
            612 cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream): Shape::AllocFromPool(DefaultStream::PerThread);
            245 cuMemFree_v2(address): Shape::Free(IdKind::Address);
            601 cuMemFreeAsync_ptsz(address, stream): Shape::Free(IdKind::Address);
            294 cuMemAllocHost_v2(out, bytes): Shape::Alloc(Memory::PinnedHost);
            39 cuMemHostAlloc(out, bytes, flags): Shape::Alloc(Memory::PinnedHost);
            271 cuMemHostAlloc_v2(out, bytes, flags): Shape::Alloc(Memory::PinnedHost);
            38 cuMemFreeHost(address): Shape::Free(IdKind::Address);
            301 cuMemHostRegister(address, bytes, flags): Shape::Register;
            379 cuMemHostRegister_v2(address, bytes, flags): Shape::Register;
            302 cuMemHostUnregister(address): Shape::Free(IdKind::Registered);
            272 cuArrayCreate_v2(out, descriptor): Shape::Array;
            274 cuArray3DCreate_v2(out, descriptor): Shape::Array3D { levels: false };
            347 cuMipmappedArrayCreate(out, descriptor, levels): Shape::Array3D { levels: true };
            89 cuArrayDestroy(array): Shape::Free(IdKind::Array);
            349 cuMipmappedArrayDestroy(array): Shape::Free(IdKind::Array);
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
            616 cuMemPoolImportPointer(out, pool, exported): Shape::Foreign(IdKind::Address);
            486 cuExternalMemoryGetMappedBuffer(out, external, descriptor): Shape::Foreign(IdKind::Address);
            487 cuExternalMemoryGetMappedMipmappedArray(out, external, descriptor): Shape::Foreign(IdKind::Array);
            495 cuStreamBeginCapture(stream): Shape::CaptureBegin(DefaultStream::Legacy);
            496 cuStreamBeginCapture_ptsz(stream): Shape::CaptureBegin(DefaultStream::PerThread);
            539 cuStreamBeginCapture_v2(stream, mode): Shape::CaptureBegin(DefaultStream::Legacy);
            540 cuStreamBeginCapture_v2_ptsz(stream, mode): Shape::CaptureBegin(DefaultStream::PerThread);
            720 cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode): Shape::CaptureBegin(DefaultStream::Legacy);
            721 cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode): Shape::CaptureBegin(DefaultStream::PerThread);
            497 cuStreamEndCapture(stream, out): Shape::CaptureEnd(DefaultStream::Legacy);
            498 cuStreamEndCapture_ptsz(stream, out): Shape::CaptureEnd(DefaultStream::PerThread);
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
pub(in crate::sys) use with_calls;

macro_rules! table {
    ($($number:literal $name:ident($($argument:ident),*): $shape:expr;)*) => {
        &[$(($number, stringify!($name), $shape)),*]
    };
}

/// CUPTI's number, name and shape of each call.
pub(in crate::sys) const CALLS: &[(u32, &str, Shape)] = with_calls!(table);
