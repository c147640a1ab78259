//! CUPTI's callback ids of the functions that gpumem intercepts and of a few others. A function without an id here makes no callback. For
//! the functions that cudarc declares, our arguments' layout is compared with the layout in NVIDIA's header.

use std::ffi::c_uint;
use std::mem::offset_of;

use cudarc::cupti::sys::{self, CUpti_driver_api_trace_cbid as Id};

macro_rules! callback_ids {
    ($($module:ident::$name:ident: $id:ident, $params:ident { $($field:ident),* };)*) => {
        const IDS: &[(&str, c_uint)] = &[$((stringify!($name), Id::$id as c_uint)),*];

        $(
            const _: () = {
                type Ours = crate::$module::params::$name;
                assert!(size_of::<Ours>() == size_of::<sys::$params>());
                assert!(same(Ours::OFFSETS, &[$(offset_of!(sys::$params, $field)),*]));
            };
        )*
    };
}

/// Functions whose arguments cudarc does not declare, because not every version has them.
const NOT_IN_CUDARC: &[(&str, c_uint)] = &[
    ("cuStreamBeginCaptureToGraph", 720),
    ("cuMulticastCreate", 706),
    ("cuLibraryLoadData", 678),
    ("cuLibraryUnload", 680),
    ("cuKernelGetFunction", 683),
    ("cuLaunchKernelEx", 652),
    ("cuLaunchKernelEx_ptsz", 653),
    ("cuGraphInstantiateWithParams", 656),
    ("cuGraphInstantiateWithParams_ptsz", 657),
];

/// Returns the id of a function, if it has one.
pub(crate) const fn id(function: &str) -> Option<c_uint> {
    match find(IDS, function) {
        None => find(NOT_IN_CUDARC, function),
        found => found,
    }
}

const fn find(ids: &[(&str, c_uint)], function: &str) -> Option<c_uint> {
    let mut at = 0;
    while at < ids.len() {
        let (name, id) = ids[at];
        if spelled_same(name.as_bytes(), function.as_bytes()) {
            return Some(id);
        }
        at += 1;
    }
    None
}

const fn spelled_same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

const fn same(a: &[usize], b: &[usize]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

callback_ids! {
    cuda::cuDevicePrimaryCtxRelease_v2: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease_v2_params { dev };
    cuda::cuDevicePrimaryCtxRelease: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_params { dev };
    cuda::cuDevicePrimaryCtxReset_v2: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset_v2_params { dev };
    cuda::cuDevicePrimaryCtxReset: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_params { dev };
    cuda::cuCtxDestroy_v2: CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy_v2, cuCtxDestroy_v2_params { ctx };
    cuda::cuCtxDestroy: CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy, cuCtxDestroy_params { ctx };
    cuda::cuCtxDetach: CUPTI_DRIVER_TRACE_CBID_cuCtxDetach, cuCtxDetach_params { ctx };
    cuda::cuDevicePrimaryCtxRetain: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain_params { pctx, dev };
    cuda::cuCtxCreate_v2: CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v2, cuCtxCreate_v2_params { pctx, flags, dev };
    cuda::cuCtxSetLimit: CUPTI_DRIVER_TRACE_CBID_cuCtxSetLimit, cuCtxSetLimit_params { limit, value };
    modules::cuModuleLoadData: CUPTI_DRIVER_TRACE_CBID_cuModuleLoadData, cuModuleLoadData_params { module, image };
    modules::cuModuleLoadDataEx: CUPTI_DRIVER_TRACE_CBID_cuModuleLoadDataEx, cuModuleLoadDataEx_params { module, image, numOptions, options, optionValues };
    modules::cuModuleLoadFatBinary: CUPTI_DRIVER_TRACE_CBID_cuModuleLoadFatBinary, cuModuleLoadFatBinary_params { module, fatCubin };
    modules::cuModuleUnload: CUPTI_DRIVER_TRACE_CBID_cuModuleUnload, cuModuleUnload_params { hmod };
    modules::cuModuleGetFunction: CUPTI_DRIVER_TRACE_CBID_cuModuleGetFunction, cuModuleGetFunction_params { hfunc, hmod, name };
    work::cuLaunchKernel: CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, cuLaunchKernel_params { f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams, extra };
    work::cuLaunchKernel_ptsz: CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz, cuLaunchKernel_ptsz_params { f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams, extra };
    work::cuLaunchCooperativeKernel: CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_params { f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams };
    work::cuLaunchCooperativeKernel_ptsz: CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel_ptsz_params { f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams };
    cuda::cuDeviceGetMemPool: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetMemPool, cuDeviceGetMemPool_params { pool, dev };
    cuda::cuDeviceGetDefaultMemPool: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool_params { pool_out, dev };
    cuda::cuStreamCreate: CUPTI_DRIVER_TRACE_CBID_cuStreamCreate, cuStreamCreate_params { phStream, Flags };
    cuda::cuStreamCreateWithPriority: CUPTI_DRIVER_TRACE_CBID_cuStreamCreateWithPriority, cuStreamCreateWithPriority_params { phStream, flags, priority };
    cuda::cuStreamDestroy_v2: CUPTI_DRIVER_TRACE_CBID_cuStreamDestroy_v2, cuStreamDestroy_v2_params { hStream };
    cuda::cuStreamDestroy: CUPTI_DRIVER_TRACE_CBID_cuStreamDestroy, cuStreamDestroy_params { hStream };
    graphs::cuStreamBeginCapture: CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture, cuStreamBeginCapture_params { hStream };
    graphs::cuStreamBeginCapture_v2: CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_params { hStream, mode };
    graphs::cuStreamBeginCapture_v2_ptsz: CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_v2_ptsz, cuStreamBeginCapture_v2_ptsz_params { hStream, mode };
    graphs::cuStreamEndCapture: CUPTI_DRIVER_TRACE_CBID_cuStreamEndCapture, cuStreamEndCapture_params { hStream, phGraph };
    graphs::cuStreamEndCapture_ptsz: CUPTI_DRIVER_TRACE_CBID_cuStreamEndCapture_ptsz, cuStreamEndCapture_ptsz_params { hStream, phGraph };
    graphs::cuGraphAddMemAllocNode: CUPTI_DRIVER_TRACE_CBID_cuGraphAddMemAllocNode, cuGraphAddMemAllocNode_params { phGraphNode, hGraph, dependencies, numDependencies, nodeParams };
    graphs::cuGraphInstantiate: CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate, cuGraphInstantiate_params { phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize };
    graphs::cuGraphInstantiate_v2: CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiate_v2, cuGraphInstantiate_v2_params { phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize };
    graphs::cuGraphInstantiateWithFlags: CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags_params { phGraphExec, hGraph, flags };
    graphs::cuGraphExecDestroy: CUPTI_DRIVER_TRACE_CBID_cuGraphExecDestroy, cuGraphExecDestroy_params { hGraphExec };
    graphs::cuGraphUpload: CUPTI_DRIVER_TRACE_CBID_cuGraphUpload, cuGraphUpload_params { hGraph, hStream };
    graphs::cuGraphLaunch: CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch, cuGraphLaunch_params { hGraph, hStream };
    graphs::cuGraphLaunch_ptsz: CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz, cuGraphLaunch_ptsz_params { hGraphExec, hStream };
    graphs::cuDeviceGraphMemTrim: CUPTI_DRIVER_TRACE_CBID_cuDeviceGraphMemTrim, cuDeviceGraphMemTrim_params { device };
    imports::cuMemImportFromShareableHandle: CUPTI_DRIVER_TRACE_CBID_cuMemImportFromShareableHandle, cuMemImportFromShareableHandle_params { handle, osHandle, shHandleType };
    imports::cuMemPoolImportPointer: CUPTI_DRIVER_TRACE_CBID_cuMemPoolImportPointer, cuMemPoolImportPointer_params { ptr_out, pool, shareData };
    imports::cuExternalMemoryGetMappedBuffer: CUPTI_DRIVER_TRACE_CBID_cuExternalMemoryGetMappedBuffer, cuExternalMemoryGetMappedBuffer_params { devPtr, extMem, bufferDesc };
    memory::cuMemAlloc_v2: CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, cuMemAlloc_v2_params { dptr, bytesize };
    memory::cuMemAllocPitch_v2: CUPTI_DRIVER_TRACE_CBID_cuMemAllocPitch_v2, cuMemAllocPitch_v2_params { dptr, pPitch, WidthInBytes, Height, ElementSizeBytes };
    memory::cuMemAllocManaged: CUPTI_DRIVER_TRACE_CBID_cuMemAllocManaged, cuMemAllocManaged_params { dptr, bytesize, flags };
    memory::cuMemFree_v2: CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2, cuMemFree_v2_params { dptr };
    memory::cuMemAllocAsync: CUPTI_DRIVER_TRACE_CBID_cuMemAllocAsync, cuMemAllocAsync_params { dptr, bytesize, hStream };
    memory::cuMemAllocAsync_ptsz: CUPTI_DRIVER_TRACE_CBID_cuMemAllocAsync_ptsz, cuMemAllocAsync_ptsz_params { dptr, bytesize, hStream };
    memory::cuMemAllocFromPoolAsync: CUPTI_DRIVER_TRACE_CBID_cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_params { dptr, bytesize, pool, hStream };
    memory::cuMemAllocFromPoolAsync_ptsz: CUPTI_DRIVER_TRACE_CBID_cuMemAllocFromPoolAsync_ptsz, cuMemAllocFromPoolAsync_ptsz_params { dptr, bytesize, pool, hStream };
    memory::cuMemFreeAsync: CUPTI_DRIVER_TRACE_CBID_cuMemFreeAsync, cuMemFreeAsync_params { dptr, hStream };
    memory::cuMemFreeAsync_ptsz: CUPTI_DRIVER_TRACE_CBID_cuMemFreeAsync_ptsz, cuMemFreeAsync_ptsz_params { dptr, hStream };
    cuda::cuMemPoolTrimTo: CUPTI_DRIVER_TRACE_CBID_cuMemPoolTrimTo, cuMemPoolTrimTo_params { pool, minBytesToKeep };
    cuda::cuMemPoolSetAttribute: CUPTI_DRIVER_TRACE_CBID_cuMemPoolSetAttribute, cuMemPoolSetAttribute_params { pool, attr, value };
    memory::cuMemPoolDestroy: CUPTI_DRIVER_TRACE_CBID_cuMemPoolDestroy, cuMemPoolDestroy_params { pool };
    memory::cuMemPoolCreate: CUPTI_DRIVER_TRACE_CBID_cuMemPoolCreate, cuMemPoolCreate_params { pool, poolProps };
    physical::cuMemCreate: CUPTI_DRIVER_TRACE_CBID_cuMemCreate, cuMemCreate_params { handle, size, prop, flags };
    physical::cuMemRetainAllocationHandle: CUPTI_DRIVER_TRACE_CBID_cuMemRetainAllocationHandle, cuMemRetainAllocationHandle_params { handle, addr };
    physical::cuMemRelease: CUPTI_DRIVER_TRACE_CBID_cuMemRelease, cuMemRelease_params { handle };
    physical::cuMemMap: CUPTI_DRIVER_TRACE_CBID_cuMemMap, cuMemMap_params { ptr, size, offset, handle, flags };
    physical::cuMemUnmap: CUPTI_DRIVER_TRACE_CBID_cuMemUnmap, cuMemUnmap_params { ptr, size };
    memory::cuMemAllocHost_v2: CUPTI_DRIVER_TRACE_CBID_cuMemAllocHost_v2, cuMemAllocHost_v2_params { pp, bytesize };
    memory::cuMemHostAlloc: CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc, cuMemHostAlloc_params { pp, bytesize, Flags };
    memory::cuMemFreeHost: CUPTI_DRIVER_TRACE_CBID_cuMemFreeHost, cuMemFreeHost_params { p };
    memory::cuMemHostRegister_v2: CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister_v2, cuMemHostRegister_v2_params { p, bytesize, Flags };
    memory::cuMemHostRegister: CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister, cuMemHostRegister_params { p, bytesize, Flags };
    memory::cuMemHostUnregister: CUPTI_DRIVER_TRACE_CBID_cuMemHostUnregister, cuMemHostUnregister_params { p };
    memory::cuArrayCreate_v2: CUPTI_DRIVER_TRACE_CBID_cuArrayCreate_v2, cuArrayCreate_v2_params { pHandle, pAllocateArray };
    memory::cuArray3DCreate_v2: CUPTI_DRIVER_TRACE_CBID_cuArray3DCreate_v2, cuArray3DCreate_v2_params { pHandle, pAllocateArray };
    memory::cuArrayDestroy: CUPTI_DRIVER_TRACE_CBID_cuArrayDestroy, cuArrayDestroy_params { hArray };
    memory::cuMipmappedArrayCreate: CUPTI_DRIVER_TRACE_CBID_cuMipmappedArrayCreate, cuMipmappedArrayCreate_params { pHandle, pMipmappedArrayDesc, numMipmapLevels };
    memory::cuMipmappedArrayDestroy: CUPTI_DRIVER_TRACE_CBID_cuMipmappedArrayDestroy, cuMipmappedArrayDestroy_params { hMipmappedArray };
}
