//! The functions of the driver that are replaced.

use super::mode::Mode;

/// The effect of a replaced function on memory. A number is the index of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replacement {
    Alloc,
    AllocPitch,
    AllocManaged,
    AllocHost,
    FreeHost,
    /// `cuMemAllocAsync` and `cuMemAllocFromPoolAsync`.
    AllocPooled {
        pool: Option<usize>,
    },
    Free,
    Reserve,
    Create,
    Release,
    Retain,
    Map,
    Unmap,
    SetAccess,
    GetAccess,
    Properties,
    /// Exports physical memory to another process.
    Export,
    /// Imports memory that another process has exported.
    Import,
    Info,
    Total,
    Range,
    Attribute,
    Attributes,
    PoolAttribute,
    SetPoolAttribute,
    Trim,
    Synchronize,
    ContextDestroy,
    PrimaryReset,
    PrimaryRelease,
    /// Exports memory to another process or to a group of devices. Fails if the address is dry.
    RejectAddress(usize),
    /// Like `RejectAddress`, for a handle.
    RejectHandle(usize),
    /// Always fails: the parameters are not known, or the function allocates memory that the account would miss.
    Reject,
    /// Does nothing if one of these addresses is dry.
    Skip(&'static [usize]),
    /// Sets this number of bytes for each element. Does nothing if the address is dry.
    Set(u64),
    /// The same for rows.
    SetRows(u64),
    /// Copies bytes to and from these places. The arguments are the address of each place, and the number of bytes.
    Copy([Place; 2], [usize; 3]),
    /// A `CUDA_MEMCPY2D`.
    Copy2D,
    /// A `CUDA_MEMCPY3D` or `CUDA_MEMCPY3D_PEER`.
    Copy3D,
    CopyBatch,
    /// A launch of a function: the arguments with its parameters in the two forms.
    Launch {
        function: usize,
        parameters: usize,
        extra: Option<usize>,
    },
    /// A node of a graph that launches a kernel, copies or sets memory.
    KernelNode,
    CopyNode,
    SetNode,
    /// Any node.
    Node {
        parameters: usize,
    },
    /// New parameters of a node, with the index of their argument.
    ChangeKernelNode(usize),
    ChangeCopyNode(usize),
    ChangeSetNode(usize),
    ChangeNode(usize),
    /// A list of operations on memory.
    StreamOperations,
    /// A call that names devices. It is replaced if the program sees simulated GPUs.
    Card(CardCall),
}

/// The location of one side of a copy, according to the function or a field of its struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    Device,
    /// The driver looks the address up.
    Either,
    /// An array, which is real and has no address.
    Array,
}

/// The effect of a call that names devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CardCall {
    /// Has the same effect on each GPU.
    Plain,
    /// Not possible on simulated GPUs.
    Reject,
    Count,
    Ordinal,
    Uuid,
    BusId,
    ByBusId,
    Attribute,
    /// Queries two cards. The second one is in the next argument.
    CanAccess {
        device: usize,
    },
    EnablePeer,
    DisablePeer,
    CreateContext {
        device: usize,
    },
    CreatePool,
    CreateStream,
    EndStream,
    /// Returns the device of a context, or of the current one.
    ContextDevice {
        out: usize,
        context: Option<usize>,
    },
    StreamDevice,
    Retain,
    Release,
    SetFlags,
    State,
    DefaultPool {
        is_current: bool,
    },
    SetPool,
}

impl Replacement {
    /// The arguments that are addresses of structs or lists, which are read here. The driver rejects a call if one of them is null.
    pub(super) const fn structs(self) -> &'static [usize] {
        match self {
            Self::Copy2D | Self::Copy3D | Self::Launch { function: 1, .. } => &[0],
            Self::AllocPitch => &[0, 1],
            Self::CopyBatch => &[0, 1, 2],
            Self::ChangeKernelNode(1) | Self::ChangeCopyNode(1) | Self::ChangeSetNode(1) | Self::ChangeNode(1) => &[1],
            Self::ChangeKernelNode(_)
            | Self::ChangeCopyNode(_)
            | Self::ChangeSetNode(_)
            | Self::ChangeNode(_)
            | Self::PoolAttribute
            | Self::SetPoolAttribute
            | Self::SetAccess
            | Self::StreamOperations => &[2],
            Self::KernelNode | Self::CopyNode | Self::SetNode | Self::Node { parameters: 4 } => &[4],
            Self::Node { .. } => &[5],
            _ => &[],
        }
    }

    /// Returns whether the function is replaced.
    pub(super) const fn is_of(self, mode: Mode) -> bool {
        match mode {
            Mode::Dry { cards, .. } => cards > 0 || !matches!(self, Self::Card(_)),
            Mode::Limit { .. } => self.is_of_limit(),
        }
    }

    /// Returns whether the function is replaced on a smaller GPU, where all memory is real.
    const fn is_of_limit(self) -> bool {
        use Replacement as S;
        matches!(
            self,
            S::Alloc
                | S::AllocPitch
                | S::AllocPooled { .. }
                | S::Free
                | S::Create
                | S::Release
                | S::Retain
                | S::Map
                | S::Unmap
                | S::Info
                | S::Total
                | S::PoolAttribute
                | S::SetPoolAttribute
                | S::Trim
                | S::Synchronize
                | S::ContextDestroy
                | S::PrimaryReset
                | S::PrimaryRelease
        )
    }
}

/// Functions with the same arguments and shape are in one row. Names and arguments come from `cuda.h`; `cards` defines which argument
/// names mean a card. A function that a driver lacks is left out. Functions from before CUDA 4 (without `_v2`) are not in the table,
/// because current programs do not link to them.
macro_rules! with_functions {
    ($use:ident) => {
        $use! {
            [cuMemAlloc_v2](out, bytes): Replacement::Alloc;
            [cuMemAllocPitch_v2](out, pitch, width, height, element): Replacement::AllocPitch;
            [cuMemAllocManaged](out, bytes, flags): Replacement::AllocManaged;
            [cuMemAllocHost_v2](out, bytes): Replacement::AllocHost;
            [cuMemHostAlloc, cuMemHostAlloc_v2](out, bytes, flags): Replacement::AllocHost;
            [cuMemFreeHost](address): Replacement::FreeHost;
            [cuMemAllocAsync, cuMemAllocAsync_ptsz](out, bytes, stream): Replacement::AllocPooled { pool: None };
            [cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz](out, bytes, pool, stream): Replacement::AllocPooled { pool: Some(2) };
            [cuMemFree_v2](address): Replacement::Free;
            [cuMemFreeAsync, cuMemFreeAsync_ptsz](address, stream): Replacement::Free;
            [cuMemAddressReserve](out, bytes, alignment, address, flags): Replacement::Reserve;
            [cuMemCreate](out, bytes, properties, flags): Replacement::Create;
            [cuMemRelease](handle): Replacement::Release;
            [cuMemRetainAllocationHandle](out, address): Replacement::Retain;
            [cuMemMap](address, bytes, offset, handle, flags): Replacement::Map;
            [cuMemUnmap](address, bytes): Replacement::Unmap;
            [cuMemSetAccess](address, bytes, descriptors, count): Replacement::SetAccess;
            [cuMemGetAccess](flags, place, address): Replacement::GetAccess;
            [cuMemGetAllocationPropertiesFromHandle](out, handle): Replacement::Properties;
            [cuMemExportToShareableHandle](out, handle, kind, flags): Replacement::Export;
            [cuMemImportFromShareableHandle](out, shared, kind): Replacement::Import;
            [cuMulticastBindMem](multicast, offset, handle, at, bytes, flags): Replacement::RejectHandle(2);
            [cuMulticastBindAddr](multicast, offset, address, bytes, flags): Replacement::RejectAddress(2);
            [cuMemGetHandleForAddressRange](out, address, bytes, kind, flags): Replacement::RejectAddress(1);
            [cuIpcGetMemHandle, cuMemPoolExportPointer](out, address): Replacement::RejectAddress(1);
            [cuMemGetInfo_v2](free, total): Replacement::Info;
            [cuDeviceTotalMem_v2](out, device): Replacement::Total;
            [cuMemGetAddressRange_v2](start, bytes, address): Replacement::Range;
            [cuPointerGetAttribute](data, attribute, address): Replacement::Attribute;
            [cuPointerGetAttributes](count, attributes, data, address): Replacement::Attributes;
            [cuPointerSetAttribute](value, attribute, address): Replacement::Skip(&[2]);
            [cuMemPoolGetAttribute](pool, attribute, value): Replacement::PoolAttribute;
            [cuMemPoolSetAttribute](pool, attribute, value): Replacement::SetPoolAttribute;
            [cuMemPoolTrimTo](pool, keep): Replacement::Trim;
            [cuCtxSynchronize](): Replacement::Synchronize;
            [cuCtxSynchronize_v2](context): Replacement::Synchronize;
            [cuStreamSynchronize, cuStreamSynchronize_ptsz](stream): Replacement::Synchronize;
            [cuEventSynchronize](event): Replacement::Synchronize;
            [cuCtxDestroy_v2, cuCtxDestroy](context): Replacement::ContextDestroy;
            [cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset](device): Replacement::PrimaryReset;
            [cuMemAdvise](address, bytes, advice, device): Replacement::Skip(&[0]);
            [cuMemAdvise_v2](address, bytes, advice, location): Replacement::Skip(&[0]);
            [cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz](address, bytes, device, stream): Replacement::Skip(&[0]);
            [cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz](address, bytes, location, flags, stream): Replacement::Skip(&[0]);
            [cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz](stream, address, bytes, flags): Replacement::Skip(&[1]);
            [cuMemcpy, cuMemcpy_ptds](to, from, bytes): Replacement::Copy([Place::Either; 2], [0, 1, 2]);
            [cuMemcpyAsync, cuMemcpyAsync_ptsz](to, from, bytes, stream): Replacement::Copy([Place::Either; 2], [0, 1, 2]);
            [cuMemcpyPeer, cuMemcpyPeer_ptds](to, context, from, other, bytes): Replacement::Copy([Place::Device; 2], [0, 2, 4]);
            [cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz](to, context, from, other, bytes, stream): Replacement::Copy([Place::Device; 2], [0, 2, 4]);
            [cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds](to, from, bytes): Replacement::Copy([Place::Device, Place::Host], [0, 1, 2]);
            [cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz](to, from, bytes, stream): Replacement::Copy([Place::Device, Place::Host], [0, 1, 2]);
            [cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds](to, from, bytes): Replacement::Copy([Place::Host, Place::Device], [0, 1, 2]);
            [cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz](to, from, bytes, stream): Replacement::Copy([Place::Host, Place::Device], [0, 1, 2]);
            [cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds](to, from, bytes): Replacement::Copy([Place::Device; 2], [0, 1, 2]);
            [cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz](to, from, bytes, stream): Replacement::Copy([Place::Device; 2], [0, 1, 2]);
            [cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds](array, offset, from, bytes): Replacement::Copy([Place::Array, Place::Device], [0, 2, 3]);
            [cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds](to, array, offset, bytes): Replacement::Copy([Place::Device, Place::Array], [0, 1, 3]);
            [cuMemcpy2D_v2, cuMemcpy2D_v2_ptds, cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds](copy): Replacement::Copy2D;
            [cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz](copy, stream): Replacement::Copy2D;
            [cuMemcpy3D_v2, cuMemcpy3D_v2_ptds, cuMemcpy3DPeer, cuMemcpy3DPeer_ptds](copy): Replacement::Copy3D;
            [cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz, cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz](copy, stream): Replacement::Copy3D;
            [cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz]
                (to, from, bytes, count, attributes, indexes, kinds, failed, stream): Replacement::CopyBatch;
            [cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz]
                (to, from, bytes, count, attributes, indexes, kinds, stream): Replacement::CopyBatch;
            [cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz](count, operations, failed, flags, stream): Replacement::Reject;
            [cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz](count, operations, flags, stream): Replacement::Reject;
            [cuMemsetD8_v2, cuMemsetD8_v2_ptds](to, value, count): Replacement::Set(1);
            [cuMemsetD8Async, cuMemsetD8Async_ptsz](to, value, count, stream): Replacement::Set(1);
            [cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds](to, pitch, value, width, height): Replacement::SetRows(1);
            [cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz](to, pitch, value, width, height, stream): Replacement::SetRows(1);
            [cuMemsetD16_v2, cuMemsetD16_v2_ptds](to, value, count): Replacement::Set(2);
            [cuMemsetD16Async, cuMemsetD16Async_ptsz](to, value, count, stream): Replacement::Set(2);
            [cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds](to, pitch, value, width, height): Replacement::SetRows(2);
            [cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz](to, pitch, value, width, height, stream): Replacement::SetRows(2);
            [cuMemsetD32_v2, cuMemsetD32_v2_ptds](to, value, count): Replacement::Set(4);
            [cuMemsetD32Async, cuMemsetD32Async_ptsz](to, value, count, stream): Replacement::Set(4);
            [cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds](to, pitch, value, width, height): Replacement::SetRows(4);
            [cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz](to, pitch, value, width, height, stream): Replacement::SetRows(4);
            [cuLaunchKernel, cuLaunchKernel_ptsz]
                (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra): Replacement::Launch { function: 0, parameters: 9, extra: Some(10) };
            [cuLaunchKernelEx, cuLaunchKernelEx_ptsz]
                (config, function, parameters, extra): Replacement::Launch { function: 1, parameters: 2, extra: Some(3) };
            [cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz]
                (function, gx, gy, gz, bx, by, bz, shared, stream, parameters): Replacement::Launch { function: 0, parameters: 9, extra: None };
            [cuLaunchCooperativeKernelMultiDevice](launches, count, flags): Replacement::Reject;
            [cuLaunch](function): Replacement::Reject;
            [cuLaunchGrid](function, width, height): Replacement::Reject;
            [cuLaunchGridAsync](function, width, height, stream): Replacement::Reject;
            [cuGraphAddKernelNode, cuGraphAddKernelNode_v2](out, graph, nodes, count, parameters): Replacement::KernelNode;
            [cuGraphAddMemcpyNode](out, graph, nodes, count, copy, context): Replacement::CopyNode;
            [cuGraphAddMemsetNode](out, graph, nodes, count, parameters, context): Replacement::SetNode;
            [cuGraphAddNode](out, graph, nodes, count, parameters): Replacement::Node { parameters: 4 };
            [cuGraphAddNode_v2](out, graph, nodes, edges, count, parameters): Replacement::Node { parameters: 5 };
            [cuGraphAddMemAllocNode](out, graph, nodes, count, parameters): Replacement::Reject;
            [cuGraphKernelNodeSetParams, cuGraphKernelNodeSetParams_v2](node, parameters): Replacement::ChangeKernelNode(1);
            [cuGraphExecKernelNodeSetParams, cuGraphExecKernelNodeSetParams_v2](executable, node, parameters): Replacement::ChangeKernelNode(2);
            [cuGraphMemcpyNodeSetParams](node, parameters): Replacement::ChangeCopyNode(1);
            [cuGraphExecMemcpyNodeSetParams](executable, node, parameters, context): Replacement::ChangeCopyNode(2);
            [cuGraphMemsetNodeSetParams](node, parameters): Replacement::ChangeSetNode(1);
            [cuGraphExecMemsetNodeSetParams](executable, node, parameters, context): Replacement::ChangeSetNode(2);
            [cuGraphNodeSetParams](node, parameters): Replacement::ChangeNode(1);
            [cuGraphExecNodeSetParams](executable, node, parameters): Replacement::ChangeNode(2);
            [cuStreamWriteValue32, cuStreamWriteValue32_ptsz, cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz, cuStreamWriteValue64,
             cuStreamWriteValue64_ptsz, cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz, cuStreamWaitValue32,
             cuStreamWaitValue32_ptsz, cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz, cuStreamWaitValue64, cuStreamWaitValue64_ptsz,
             cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz](stream, address, value, flags): Replacement::Skip(&[1]);
            [cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz, cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz]
                (stream, count, operations, flags): Replacement::StreamOperations;
            [cuDeviceGetCount](out): Replacement::Card(CardCall::Count);
            [cuDeviceGet](out, ordinal): Replacement::Card(CardCall::Ordinal);
            [cuDeviceGetUuid, cuDeviceGetUuid_v2](out, device): Replacement::Card(CardCall::Uuid);
            [cuDeviceGetPCIBusId](text, length, device): Replacement::Card(CardCall::BusId);
            [cuDeviceGetByPCIBusId](out, text): Replacement::Card(CardCall::ByBusId);
            [cuDeviceGetAttribute](out, attribute, device): Replacement::Card(CardCall::Attribute);
            [cuDeviceGetName](text, length, device): Replacement::Card(CardCall::Plain);
            [cuDeviceGetLuid](out, mask, device): Replacement::Card(CardCall::Plain);
            [cuDeviceGetProperties](out, device): Replacement::Card(CardCall::Plain);
            [cuDeviceComputeCapability](major, minor, device): Replacement::Card(CardCall::Plain);
            [cuDeviceGetTexture1DLinearMaxWidth](out, format, channels, device): Replacement::Card(CardCall::Plain);
            [cuDeviceGetExecAffinitySupport](out, kind, device): Replacement::Card(CardCall::Plain);
            [cuDeviceGetNvSciSyncAttributes](out, device, flags): Replacement::Card(CardCall::Plain);
            [cuDeviceGetGraphMemAttribute, cuDeviceSetGraphMemAttribute](device, attribute, value): Replacement::Card(CardCall::Plain);
            [cuDeviceGraphMemTrim](device): Replacement::Card(CardCall::Plain);
            [cuDeviceRegisterAsyncNotification](device, callback, data, out): Replacement::Card(CardCall::Plain);
            [cuDeviceUnregisterAsyncNotification](device, callback): Replacement::Card(CardCall::Plain);
            [cuDeviceGetDevResource](device, out, kind): Replacement::Card(CardCall::Reject);
            [cuGreenCtxCreate](out, description, device, flags): Replacement::Card(CardCall::Reject);
            [cuMulticastCreate](out, properties): Replacement::Card(CardCall::Reject);
            [cuMulticastAddDevice](multicast, device): Replacement::Card(CardCall::Reject);
            [cuDeviceCanAccessPeer](out, device, peer): Replacement::Card(CardCall::CanAccess { device: 1 });
            [cuDeviceGetP2PAttribute](out, attribute, device, peer): Replacement::Card(CardCall::CanAccess { device: 2 });
            [cuCtxEnablePeerAccess](context, flags): Replacement::Card(CardCall::EnablePeer);
            [cuCtxDisablePeerAccess](context): Replacement::Card(CardCall::DisablePeer);
            [cuDevicePrimaryCtxRetain](out, device): Replacement::Card(CardCall::Retain);
            [cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2](device): Replacement::PrimaryRelease;
            [cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2](device, flags): Replacement::Card(CardCall::SetFlags);
            [cuDevicePrimaryCtxGetState](device, flags, active): Replacement::Card(CardCall::State);
            [cuCtxCreate, cuCtxCreate_v2](out, flags, device): Replacement::Card(CardCall::CreateContext { device: 2 });
            [cuCtxCreate_v3](out, affinity, count, flags, device): Replacement::Card(CardCall::CreateContext { device: 4 });
            [cuCtxCreate_v4](out, parameters, flags, device): Replacement::Card(CardCall::CreateContext { device: 3 });
            [cuCtxGetDevice](out): Replacement::Card(CardCall::ContextDevice { out: 0, context: None });
            [cuCtxGetDevice_v2](out, context): Replacement::Card(CardCall::ContextDevice { out: 0, context: Some(1) });
            [cuStreamCreate](out, flags): Replacement::Card(CardCall::CreateStream);
            [cuStreamCreateWithPriority](out, flags, priority): Replacement::Card(CardCall::CreateStream);
            [cuStreamDestroy, cuStreamDestroy_v2](stream): Replacement::Card(CardCall::EndStream);
            [cuStreamGetDevice, cuStreamGetDevice_ptsz](stream, out): Replacement::Card(CardCall::StreamDevice);
            [cuDeviceGetDefaultMemPool](out, device): Replacement::Card(CardCall::DefaultPool { is_current: false });
            [cuDeviceGetMemPool](out, device): Replacement::Card(CardCall::DefaultPool { is_current: true });
            [cuDeviceSetMemPool](device, pool): Replacement::Card(CardCall::SetPool);
            [cuMemPoolCreate](out, pool_properties): Replacement::Card(CardCall::CreatePool);
            [cuMemPoolSetAccess](pool, descriptors, count): Replacement::Card(CardCall::Plain);
            [cuMemPoolGetAccess](flags, pool, place): Replacement::Card(CardCall::Plain);
            [cuMemGetAllocationGranularity](out, properties, option): Replacement::Card(CardCall::Plain);
            [cuKernelGetAttribute](out, attribute, kernel, device): Replacement::Card(CardCall::Plain);
            [cuKernelSetAttribute](attribute, value, kernel, device): Replacement::Card(CardCall::Plain);
            [cuKernelSetCacheConfig](kernel, config, device): Replacement::Card(CardCall::Plain);
        }
    };
}
pub(super) use with_functions;

macro_rules! table {
    ($([$($name:ident),+]$arguments:tt: $shape:expr;)*) => {
        &[$($((stringify!($name), $shape)),+),*]
    };
}

/// The name and the shape of each function.
pub(super) const FUNCTIONS: &[(&str, Replacement)] = with_functions!(table);

#[cfg(test)]
mod tests {
    use super::FUNCTIONS;
    use crate::sys::calls::{CALLS, CallShape, IdKind, MemoryKind};

    /// A call that is counted and not replaced would allocate real memory, which a dry run does not count.
    #[test]
    fn each_call_that_allocates_memory_of_a_device_is_replaced() {
        let allocates = |shape| {
            matches!(
                shape,
                CallShape::Alloc(MemoryKind::Device | MemoryKind::Managed)
                    | CallShape::AllocPitch
                    | CallShape::AllocOnStream(_)
                    | CallShape::AllocFromPool(_)
                    | CallShape::Free(IdKind::Address)
                    | CallShape::Create
                    | CallShape::Release
                    | CallShape::Map
                    | CallShape::Unmap
            )
        };
        for (_, name, _) in CALLS.iter().filter(|(.., shape)| allocates(*shape)) {
            assert!(FUNCTIONS.iter().any(|(replaced, _)| replaced == name), "{name} needs a row in this table");
        }
    }
}
