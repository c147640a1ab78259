//! CUPTI's callback id of each function, and a check that our arguments have the layout of NVIDIA's header.

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

/// Functions whose arguments cudarc does not declare: they have none, or not every version has the function.
const OTHERS: &[(&str, c_uint)] = &[
    ("cuCtxSynchronize", Id::CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize as c_uint),
    ("cuCtxCreate_v4", 757),
    ("cuCtxGetId", 695),
    ("cuStreamBeginCaptureToGraph", 720),
    ("cuMulticastCreate", 706),
    ("cuGraphInstantiateWithFlags", 643),
];

/// The id of a function, if it has one.
pub(crate) const fn id(function: &str) -> Option<c_uint> {
    match find(IDS, function) {
        None => find(OTHERS, function),
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
    cuda::cuInit: CUPTI_DRIVER_TRACE_CBID_cuInit, cuInit_params { Flags };
    cuda::cuDriverGetVersion: CUPTI_DRIVER_TRACE_CBID_cuDriverGetVersion, cuDriverGetVersion_params { driverVersion };
    cuda::cuDeviceGetCount: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetCount, cuDeviceGetCount_params { count };
    cuda::cuDeviceGet: CUPTI_DRIVER_TRACE_CBID_cuDeviceGet, cuDeviceGet_params { device, ordinal };
    cuda::cuDeviceGetName: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetName, cuDeviceGetName_params { name, len, dev };
    cuda::cuDeviceGetUuid: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetUuid, cuDeviceGetUuid_params { uuid, dev };
    cuda::cuDeviceGetUuid_v2: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetUuid_v2, cuDeviceGetUuid_v2_params { uuid, dev };
    cuda::cuDeviceTotalMem_v2: CUPTI_DRIVER_TRACE_CBID_cuDeviceTotalMem_v2, cuDeviceTotalMem_v2_params { bytes, dev };
    cuda::cuDeviceGetAttribute: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetAttribute, cuDeviceGetAttribute_params { pi, attrib, dev };
    cuda::cuDevicePrimaryCtxGetState: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState_params { dev, flags, active };
    cuda::cuDevicePrimaryCtxRetain: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain_params { pctx, dev };
    cuda::cuDevicePrimaryCtxRelease_v2: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease_v2_params { dev };
    cuda::cuDevicePrimaryCtxRelease: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_params { dev };
    cuda::cuDevicePrimaryCtxReset_v2: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset_v2_params { dev };
    cuda::cuDevicePrimaryCtxReset: CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_params { dev };
    cuda::cuCtxCreate_v2: CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v2, cuCtxCreate_v2_params { pctx, flags, dev };
    cuda::cuCtxCreate_v3: CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v3, cuCtxCreate_v3_params { pctx, paramsArray, numParams, flags, dev };
    cuda::cuCtxDestroy_v2: CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy_v2, cuCtxDestroy_v2_params { ctx };
    cuda::cuCtxDestroy: CUPTI_DRIVER_TRACE_CBID_cuCtxDestroy, cuCtxDestroy_params { ctx };
    cuda::cuCtxAttach: CUPTI_DRIVER_TRACE_CBID_cuCtxAttach, cuCtxAttach_params { pctx, flags };
    cuda::cuCtxDetach: CUPTI_DRIVER_TRACE_CBID_cuCtxDetach, cuCtxDetach_params { ctx };
    cuda::cuCtxGetCurrent: CUPTI_DRIVER_TRACE_CBID_cuCtxGetCurrent, cuCtxGetCurrent_params { pctx };
    cuda::cuCtxSetCurrent: CUPTI_DRIVER_TRACE_CBID_cuCtxSetCurrent, cuCtxSetCurrent_params { ctx };
    cuda::cuCtxPushCurrent_v2: CUPTI_DRIVER_TRACE_CBID_cuCtxPushCurrent_v2, cuCtxPushCurrent_v2_params { ctx };
    cuda::cuCtxPopCurrent_v2: CUPTI_DRIVER_TRACE_CBID_cuCtxPopCurrent_v2, cuCtxPopCurrent_v2_params { pctx };
    cuda::cuCtxGetDevice: CUPTI_DRIVER_TRACE_CBID_cuCtxGetDevice, cuCtxGetDevice_params { device };
    cuda::cuMemGetInfo_v2: CUPTI_DRIVER_TRACE_CBID_cuMemGetInfo_v2, cuMemGetInfo_v2_params { free, total };
    cuda::cuDeviceGetMemPool: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetMemPool, cuDeviceGetMemPool_params { pool, dev };
    cuda::cuDeviceGetDefaultMemPool: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool_params { pool_out, dev };
    cuda::cuMemPoolTrimTo: CUPTI_DRIVER_TRACE_CBID_cuMemPoolTrimTo, cuMemPoolTrimTo_params { pool, minBytesToKeep };
    cuda::cuMemPoolGetAttribute: CUPTI_DRIVER_TRACE_CBID_cuMemPoolGetAttribute, cuMemPoolGetAttribute_params { pool, attr, value };
    cuda::cuMemPoolSetAttribute: CUPTI_DRIVER_TRACE_CBID_cuMemPoolSetAttribute, cuMemPoolSetAttribute_params { pool, attr, value };
    cuda::cuMemsetD8_v2: CUPTI_DRIVER_TRACE_CBID_cuMemsetD8_v2, cuMemsetD8_v2_params { dstDevice, uc, N };
    cuda::cuMemsetD8Async: CUPTI_DRIVER_TRACE_CBID_cuMemsetD8Async, cuMemsetD8Async_params { dstDevice, uc, N, hStream };
    cuda::cuMemcpyHtoD_v2: CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_params { dstDevice, srcHost, ByteCount };
    cuda::cuMemcpyHtoDAsync_v2: CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_params { dstDevice, srcHost, ByteCount, hStream };
    cuda::cuMemcpyDtoH_v2: CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_params { dstHost, srcDevice, ByteCount };
    cuda::cuMemcpyDtoHAsync_v2: CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_params { dstHost, srcDevice, ByteCount, hStream };
    cuda::cuMemcpyDtoD_v2: CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_params { dstDevice, srcDevice, ByteCount };
    cuda::cuMemcpyDtoDAsync_v2: CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_params { dstDevice, srcDevice, ByteCount, hStream };
    cuda::cuStreamCreate: CUPTI_DRIVER_TRACE_CBID_cuStreamCreate, cuStreamCreate_params { phStream, Flags };
    cuda::cuStreamCreateWithPriority: CUPTI_DRIVER_TRACE_CBID_cuStreamCreateWithPriority, cuStreamCreateWithPriority_params { phStream, flags, priority };
    cuda::cuStreamDestroy_v2: CUPTI_DRIVER_TRACE_CBID_cuStreamDestroy_v2, cuStreamDestroy_v2_params { hStream };
    cuda::cuStreamDestroy: CUPTI_DRIVER_TRACE_CBID_cuStreamDestroy, cuStreamDestroy_params { hStream };
    cuda::cuStreamGetCtx: CUPTI_DRIVER_TRACE_CBID_cuStreamGetCtx, cuStreamGetCtx_params { hStream, pctx };
    cuda::cuStreamSynchronize: CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize, cuStreamSynchronize_params { hStream };
    cuda::cuStreamQuery: CUPTI_DRIVER_TRACE_CBID_cuStreamQuery, cuStreamQuery_params { hStream };
    cuda::cuStreamWaitEvent: CUPTI_DRIVER_TRACE_CBID_cuStreamWaitEvent, cuStreamWaitEvent_params { hStream, hEvent, Flags };
    cuda::cuEventCreate: CUPTI_DRIVER_TRACE_CBID_cuEventCreate, cuEventCreate_params { phEvent, Flags };
    cuda::cuEventRecord: CUPTI_DRIVER_TRACE_CBID_cuEventRecord, cuEventRecord_params { hEvent, hStream };
    cuda::cuEventQuery: CUPTI_DRIVER_TRACE_CBID_cuEventQuery, cuEventQuery_params { hEvent };
    cuda::cuEventSynchronize: CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize, cuEventSynchronize_params { hEvent };
    cuda::cuEventDestroy_v2: CUPTI_DRIVER_TRACE_CBID_cuEventDestroy_v2, cuEventDestroy_v2_params { hEvent };
    graphs::cuStreamBeginCapture: CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture, cuStreamBeginCapture_params { hStream };
    graphs::cuStreamBeginCapture_v2: CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_params { hStream, mode };
    graphs::cuStreamBeginCapture_v2_ptsz: CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_v2_ptsz, cuStreamBeginCapture_v2_ptsz_params { hStream, mode };
    graphs::cuStreamEndCapture: CUPTI_DRIVER_TRACE_CBID_cuStreamEndCapture, cuStreamEndCapture_params { hStream, phGraph };
    graphs::cuStreamEndCapture_ptsz: CUPTI_DRIVER_TRACE_CBID_cuStreamEndCapture_ptsz, cuStreamEndCapture_ptsz_params { hStream, phGraph };
    graphs::cuStreamIsCapturing: CUPTI_DRIVER_TRACE_CBID_cuStreamIsCapturing, cuStreamIsCapturing_params { hStream, captureStatus };
    graphs::cuThreadExchangeStreamCaptureMode: CUPTI_DRIVER_TRACE_CBID_cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode_params { mode };
    graphs::cuGraphCreate: CUPTI_DRIVER_TRACE_CBID_cuGraphCreate, cuGraphCreate_params { phGraph, flags };
    graphs::cuGraphDestroy: CUPTI_DRIVER_TRACE_CBID_cuGraphDestroy, cuGraphDestroy_params { hGraph };
    graphs::cuGraphAddMemAllocNode: CUPTI_DRIVER_TRACE_CBID_cuGraphAddMemAllocNode, cuGraphAddMemAllocNode_params { phGraphNode, hGraph, dependencies, numDependencies, nodeParams };
    graphs::cuGraphAddMemFreeNode: CUPTI_DRIVER_TRACE_CBID_cuGraphAddMemFreeNode, cuGraphAddMemFreeNode_params { phGraphNode, hGraph, dependencies, numDependencies, dptr };
    graphs::cuGraphExecDestroy: CUPTI_DRIVER_TRACE_CBID_cuGraphExecDestroy, cuGraphExecDestroy_params { hGraphExec };
    graphs::cuGraphUpload: CUPTI_DRIVER_TRACE_CBID_cuGraphUpload, cuGraphUpload_params { hGraph, hStream };
    graphs::cuGraphLaunch: CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch, cuGraphLaunch_params { hGraph, hStream };
    graphs::cuGraphLaunch_ptsz: CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz, cuGraphLaunch_ptsz_params { hGraphExec, hStream };
    graphs::cuDeviceGetGraphMemAttribute: CUPTI_DRIVER_TRACE_CBID_cuDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute_params { device, attr, value };
    graphs::cuDeviceGraphMemTrim: CUPTI_DRIVER_TRACE_CBID_cuDeviceGraphMemTrim, cuDeviceGraphMemTrim_params { device };
    imports::cuMemExportToShareableHandle: CUPTI_DRIVER_TRACE_CBID_cuMemExportToShareableHandle, cuMemExportToShareableHandle_params { shareableHandle, handle, handleType, flags };
    imports::cuMemImportFromShareableHandle: CUPTI_DRIVER_TRACE_CBID_cuMemImportFromShareableHandle, cuMemImportFromShareableHandle_params { handle, osHandle, shHandleType };
    imports::cuMemPoolImportFromShareableHandle: CUPTI_DRIVER_TRACE_CBID_cuMemPoolImportFromShareableHandle, cuMemPoolImportFromShareableHandle_params { pool_out, handle, handleType, flags };
    imports::cuMemPoolImportPointer: CUPTI_DRIVER_TRACE_CBID_cuMemPoolImportPointer, cuMemPoolImportPointer_params { ptr_out, pool, shareData };
    imports::cuIpcCloseMemHandle: CUPTI_DRIVER_TRACE_CBID_cuIpcCloseMemHandle, cuIpcCloseMemHandle_params { dptr };
    imports::cuImportExternalMemory: CUPTI_DRIVER_TRACE_CBID_cuImportExternalMemory, cuImportExternalMemory_params { extMem_out, memHandleDesc };
    imports::cuExternalMemoryGetMappedBuffer: CUPTI_DRIVER_TRACE_CBID_cuExternalMemoryGetMappedBuffer, cuExternalMemoryGetMappedBuffer_params { devPtr, extMem, bufferDesc };
    imports::cuDestroyExternalMemory: CUPTI_DRIVER_TRACE_CBID_cuDestroyExternalMemory, cuDestroyExternalMemory_params { extMem };
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
    memory::cuMemGetAddressRange_v2: CUPTI_DRIVER_TRACE_CBID_cuMemGetAddressRange_v2, cuMemGetAddressRange_v2_params { pbase, psize, dptr };
    memory::cuPointerGetAttribute: CUPTI_DRIVER_TRACE_CBID_cuPointerGetAttribute, cuPointerGetAttribute_params { data, attribute, ptr };
    memory::cuMemPoolCreate: CUPTI_DRIVER_TRACE_CBID_cuMemPoolCreate, cuMemPoolCreate_params { pool, poolProps };
    memory::cuMemPoolDestroy: CUPTI_DRIVER_TRACE_CBID_cuMemPoolDestroy, cuMemPoolDestroy_params { pool };
    memory::cuDeviceSetMemPool: CUPTI_DRIVER_TRACE_CBID_cuDeviceSetMemPool, cuDeviceSetMemPool_params { dev, pool };
    physical::cuMemGetAllocationGranularity: CUPTI_DRIVER_TRACE_CBID_cuMemGetAllocationGranularity, cuMemGetAllocationGranularity_params { granularity, prop, option };
    physical::cuMemCreate: CUPTI_DRIVER_TRACE_CBID_cuMemCreate, cuMemCreate_params { handle, size, prop, flags };
    physical::cuMemRetainAllocationHandle: CUPTI_DRIVER_TRACE_CBID_cuMemRetainAllocationHandle, cuMemRetainAllocationHandle_params { handle, addr };
    physical::cuMemRelease: CUPTI_DRIVER_TRACE_CBID_cuMemRelease, cuMemRelease_params { handle };
    physical::cuMemAddressReserve: CUPTI_DRIVER_TRACE_CBID_cuMemAddressReserve, cuMemAddressReserve_params { ptr, size, alignment, addr, flags };
    physical::cuMemAddressFree: CUPTI_DRIVER_TRACE_CBID_cuMemAddressFree, cuMemAddressFree_params { ptr, size };
    physical::cuMemMap: CUPTI_DRIVER_TRACE_CBID_cuMemMap, cuMemMap_params { ptr, size, offset, handle, flags };
    physical::cuMemUnmap: CUPTI_DRIVER_TRACE_CBID_cuMemUnmap, cuMemUnmap_params { ptr, size };
    physical::cuMemSetAccess: CUPTI_DRIVER_TRACE_CBID_cuMemSetAccess, cuMemSetAccess_params { ptr, size, desc, count };
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

#[cfg(test)]
mod tests {
    use super::id;
    use crate::{cuda, cupti, memory, nvml, physical};

    #[test]
    fn every_function_of_the_driver_has_its_id() {
        // Numbers from cupti_driver_cbid.h.
        for (name, number) in [
            ("cuInit", 1),
            ("cuMemFreeHost", 38),
            ("cuMemHostAlloc", 39),
            ("cuMemAlloc_v2", 243),
            ("cuMemFree_v2", 245),
            ("cuMemAllocAsync", 598),
            ("cuMemFreeAsync", 600),
            ("cuMemCreate", 549),
            ("cuMemRelease", 550),
        ] {
            assert_eq!(id(name), Some(number), "{name}");
        }
        for name in cuda::FUNCTIONS.iter().chain(memory::FUNCTIONS).chain(physical::FUNCTIONS) {
            assert!(id(name).is_some(), "{name}");
        }
        for name in nvml::FUNCTIONS.iter().chain(cupti::FUNCTIONS) {
            assert_eq!(id(name), None, "{name}");
        }
    }
}
