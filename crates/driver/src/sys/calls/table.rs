//! The table of the calls that are intercepted.

use super::{
    call::{IdKind, MemoryKind},
    shape::{CallShape, DefaultStream, DriverShape},
};

/// The calls that are intercepted. A row contains CUPTI's number (0 where CUPTI reports the event in another way), the function with all
/// its arguments, and its shape. The names and numbers come from NVIDIA's `cupti_driver_cbid.h` and `generated_cuda_meta.h`; NVIDIA does
/// not change them between versions. The two calls that programs make most often come first, so that all data that their hooks read is in
/// one cache line.
///
/// Memory that is imported from another process or API is not counted. A call that imports memory is in the table if the memory is freed by
/// a function that also frees allocations. `cuIpcOpenMemHandle` is not in the table, because its memory is closed only by
/// `cuIpcCloseMemHandle`. Around the calls with a [`DriverShape`], the memory that the driver holds for itself is read.
macro_rules! with_calls {
    ($use:ident) => {
        $use! {
            598 cuMemAllocAsync(out, bytes, stream): CallShape::AllocOnStream(DefaultStream::Legacy);
            600 cuMemFreeAsync(address, stream): CallShape::Free(IdKind::Address);
            243 cuMemAlloc_v2(out, bytes): CallShape::Alloc(MemoryKind::Device);
            244 cuMemAllocPitch_v2(out, pitch, width, height, element): CallShape::AllocPitch;
            371 cuMemAllocManaged(out, bytes, flags): CallShape::Alloc(MemoryKind::Managed);
            599 cuMemAllocAsync_ptsz(out, bytes, stream): CallShape::AllocOnStream(DefaultStream::PerThread);
            611 cuMemAllocFromPoolAsync(out, bytes, pool, stream): CallShape::AllocFromPool(DefaultStream::Legacy);
            612 cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream): CallShape::AllocFromPool(DefaultStream::PerThread);
            245 cuMemFree_v2(address): CallShape::Free(IdKind::Address);
            601 cuMemFreeAsync_ptsz(address, stream): CallShape::Free(IdKind::Address);
            294 cuMemAllocHost_v2(out, bytes): CallShape::Alloc(MemoryKind::PinnedHost);
            39 cuMemHostAlloc(out, bytes, flags): CallShape::Alloc(MemoryKind::PinnedHost);
            271 cuMemHostAlloc_v2(out, bytes, flags): CallShape::Alloc(MemoryKind::PinnedHost);
            38 cuMemFreeHost(address): CallShape::Free(IdKind::Address);
            301 cuMemHostRegister(address, bytes, flags): CallShape::Register;
            379 cuMemHostRegister_v2(address, bytes, flags): CallShape::Register;
            302 cuMemHostUnregister(address): CallShape::Free(IdKind::Registered);
            272 cuArrayCreate_v2(out, descriptor): CallShape::Array;
            274 cuArray3DCreate_v2(out, descriptor): CallShape::Array3D { levels: false };
            347 cuMipmappedArrayCreate(out, descriptor, levels): CallShape::Array3D { levels: true };
            89 cuArrayDestroy(array): CallShape::Free(IdKind::Array);
            349 cuMipmappedArrayDestroy(array): CallShape::Free(IdKind::Array);
            549 cuMemCreate(out, bytes, properties, flags): CallShape::Create;
            565 cuMemRetainAllocationHandle(out, address): CallShape::Retain;
            550 cuMemRelease(handle): CallShape::Release;
            551 cuMemMap(address, bytes, offset, handle, flags): CallShape::Map;
            552 cuMemUnmap(address, bytes): CallShape::Unmap;
            607 cuMemPoolCreate(out, properties): CallShape::PoolCreate;
            606 cuDeviceGetDefaultMemPool(out, device): CallShape::PoolOfDevice;
            610 cuDeviceGetMemPool(out, device): CallShape::PoolOfDevice;
            124 cuStreamCreate(out, flags): CallShape::StreamCreate;
            367 cuStreamCreateWithPriority(out, flags, priority): CallShape::StreamCreate;
            326 cuStreamDestroy_v2(stream): CallShape::StreamDestroy;
            0 cuStreamDestroy(stream): CallShape::StreamDestroy;
            555 cuMemImportFromShareableHandle(out, exported, kind): CallShape::ForeignHandle;
            706 cuMulticastCreate(out, properties): CallShape::ForeignHandle;
            616 cuMemPoolImportPointer(out, pool, exported): CallShape::Foreign(IdKind::Address);
            486 cuExternalMemoryGetMappedBuffer(out, external, descriptor): CallShape::Foreign(IdKind::Address);
            487 cuExternalMemoryGetMappedMipmappedArray(out, external, descriptor): CallShape::Foreign(IdKind::Array);
            495 cuStreamBeginCapture(stream): CallShape::CaptureStart(DefaultStream::Legacy);
            496 cuStreamBeginCapture_ptsz(stream): CallShape::CaptureStart(DefaultStream::PerThread);
            539 cuStreamBeginCapture_v2(stream, mode): CallShape::CaptureStart(DefaultStream::Legacy);
            540 cuStreamBeginCapture_v2_ptsz(stream, mode): CallShape::CaptureStart(DefaultStream::PerThread);
            720 cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode): CallShape::CaptureStart(DefaultStream::Legacy);
            721 cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode): CallShape::CaptureStart(DefaultStream::PerThread);
            497 cuStreamEndCapture(stream, out): CallShape::CaptureEnd(DefaultStream::Legacy);
            498 cuStreamEndCapture_ptsz(stream, out): CallShape::CaptureEnd(DefaultStream::PerThread);
            638 cuGraphAddMemAllocNode(out, graph, nodes, count, parameters): CallShape::GraphNode { parameters: None };
            712 cuGraphAddNode(out, graph, nodes, count, parameters): CallShape::GraphNode { parameters: Some(4) };
            723 cuGraphAddNode_v2(out, graph, nodes, edges, count, parameters): CallShape::GraphNode { parameters: Some(5) };
            514 cuGraphLaunch(graph, stream): CallShape::GraphLaunch;
            515 cuGraphLaunch_ptsz(graph, stream): CallShape::GraphLaunch;
            580 cuGraphUpload(graph, stream): CallShape::Graphs;
            581 cuGraphUpload_ptsz(graph, stream): CallShape::Graphs;
            656 cuGraphInstantiateWithParams(out, graph, parameters): CallShape::Driver(DriverShape::Instantiate { maps: true });
            657 cuGraphInstantiateWithParams_ptsz(out, graph, parameters): CallShape::Driver(DriverShape::Instantiate { maps: true });
            640 cuDeviceGraphMemTrim(device): CallShape::Graphs;
            0 cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra): CallShape::Driver(DriverShape::Launch { function: 0 });
            0 cuLaunchKernel_ptsz(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra): CallShape::Driver(DriverShape::Launch { function: 0 });
            0 cuLaunchKernelEx(config, function, parameters, extra): CallShape::Driver(DriverShape::Launch { function: 1 });
            0 cuLaunchKernelEx_ptsz(config, function, parameters, extra): CallShape::Driver(DriverShape::Launch { function: 1 });
            0 cuLaunchCooperativeKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters): CallShape::Driver(DriverShape::Launch { function: 0 });
            0 cuLaunchCooperativeKernel_ptsz(function, gx, gy, gz, bx, by, bz, shared, stream, parameters): CallShape::Driver(DriverShape::Launch { function: 0 });
            0 cuDevicePrimaryCtxRetain(out, device): CallShape::Driver(DriverShape::Context { device: 1 });
            0 cuCtxCreate_v2(out, flags, device): CallShape::Driver(DriverShape::Context { device: 2 });
            0 cuCtxCreate_v3(out, affinity, count, flags, device): CallShape::Driver(DriverShape::Context { device: 4 });
            0 cuCtxCreate_v4(out, parameters, flags, device): CallShape::Driver(DriverShape::Context { device: 3 });
            0 cuModuleLoad(out, file): CallShape::Driver(DriverShape::Module);
            0 cuModuleLoadData(out, image): CallShape::Driver(DriverShape::Module);
            0 cuModuleLoadDataEx(out, image, count, options, values): CallShape::Driver(DriverShape::Module);
            0 cuModuleLoadFatBinary(out, image): CallShape::Driver(DriverShape::Module);
            0 cuLibraryLoadData(out, image, a, b, c, d, e, f): CallShape::Driver(DriverShape::Module);
            0 cuLibraryLoadFromFile(out, file, a, b, c, d, e, f): CallShape::Driver(DriverShape::Module);
            0 cuModuleUnload(module): CallShape::Driver(DriverShape::Unload);
            0 cuLibraryUnload(library): CallShape::Driver(DriverShape::Unload);
            0 cuModuleGetFunction(out, module, name): CallShape::Driver(DriverShape::LookUp { handle: 1 });
            0 cuModuleGetGlobal_v2(out, bytes, module, name): CallShape::Driver(DriverShape::LookUp { handle: 2 });
            0 cuLibraryGetModule(out, library): CallShape::Driver(DriverShape::LookUp { handle: 1 });
            0 cuLibraryGetGlobal(out, bytes, library, name): CallShape::Driver(DriverShape::LookUp { handle: 2 });
            0 cuKernelGetFunction(out, kernel): CallShape::Driver(DriverShape::LoadFunction { function: 1 });
            0 cuFuncLoad(function): CallShape::Driver(DriverShape::LoadFunction { function: 0 });
            0 cuCtxSetLimit(limit, bytes): CallShape::Driver(DriverShape::Limit);
            0 cuCtxEnablePeerAccess(context, flags): CallShape::Driver(DriverShape::PeerAccess);
            0 cuGraphInstantiate(out, graph, node, log, size): CallShape::Driver(DriverShape::Instantiate { maps: false });
            0 cuGraphInstantiate_v2(out, graph, node, log, size): CallShape::Driver(DriverShape::Instantiate { maps: false });
            0 cuGraphInstantiateWithFlags(out, graph, flags): CallShape::Driver(DriverShape::Instantiate { maps: false });
            0 cuGraphExecDestroy(graph): CallShape::Driver(DriverShape::GraphDestroy);
            0 cuMemPoolTrimTo(pool, bytes): CallShape::Driver(DriverShape::Pool);
            0 cuMemPoolSetAttribute(pool, attribute, value): CallShape::Driver(DriverShape::Pool);
            0 cuMemPoolDestroy(pool): CallShape::Driver(DriverShape::PoolDestroy);
            0 cuCtxDestroy(context): CallShape::ContextDestroy;
            0 cuCtxDestroy_v2(context): CallShape::ContextDestroy;
            0 cuCtxDetach(context): CallShape::ContextDetach;
            0 cuDevicePrimaryCtxRelease(device): CallShape::PrimaryRelease;
            0 cuDevicePrimaryCtxRelease_v2(device): CallShape::PrimaryRelease;
            0 cuDevicePrimaryCtxReset(device): CallShape::PrimaryReset;
            0 cuDevicePrimaryCtxReset_v2(device): CallShape::PrimaryReset;
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
pub(in crate::sys) const CALLS: &[(u32, &str, CallShape)] = with_calls!(table);
