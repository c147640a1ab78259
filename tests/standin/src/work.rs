//! `libcuda`: copies and launches. Blocks have no content here: copies to the host always write the same byte, and launches are counted and
//! take memory for their function (`modules.rs`).

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::cuda::{Address, ErrorCode, Handle, INVALID_HANDLE, INVALID_VALUE, address_in, current, ready};
use crate::driver::Call;
use crate::ffi::Out;
use crate::{graphs, modules};

/// The content of blocks.
const CONTENT: u8 = 0xab;

/// The handle of a function with the name and the parameters of PyTorch's function that joins tensors.
const JOINS: Handle = 1000;
/// That of PyTorch's function that computes a sequence from a value.
const SEQUENCE: Handle = 1001;
/// That of a function that writes all of its second parameter, by the types in its name.
const SCALES: Handle = 1002;
/// That of PyTorch's reduction of values to whether any of them is true.
const ANY: Handle = 1003;
/// That of a function that writes addresses, by the type of its first parameter.
const POINTS: Handle = 1004;
/// From this handle on, functions are NCCL's.
const COLLECTIVES: Handle = 100;

/// A `CUlaunchConfig`.
#[derive(Clone, Copy)]
#[repr(C)]
struct LaunchConfig {
    sizes: [c_uint; 7],
    stream: Handle,
    attributes: Out<c_void>,
    count: c_uint,
}

// This is as in cuda.h.
const _: () = assert!(size_of::<LaunchConfig>() == 56);

static EXECUTED: AtomicU32 = AtomicU32::new(0);

/// Returns the number of copies and launches.
#[unsafe(no_mangle)]
extern "C" fn standin_executed() -> c_int {
    EXECUTED.load(Relaxed).cast_signed()
}

/// Copies bytes from or to a block, which must contain all of them.
fn copied(call: &Call, address: Address, bytes: usize) -> Result<(), ErrorCode> {
    let (gpu, at) = address_in(call, address)?;
    let (start, length) = gpu.memory().block_at(at).ok_or(INVALID_VALUE)?;
    if at - start + bytes as u64 > length {
        return Err(INVALID_VALUE);
    }
    EXECUTED.fetch_add(1, Relaxed);
    Ok(())
}

/// Counts a copy without checking its source and destination. gpumem checks them in dry runs.
fn unseen(call: &Call) -> Result<(), ErrorCode> {
    current(call)?;
    EXECUTED.fetch_add(1, Relaxed);
    Ok(())
}

/// Counts a launch. If the stream is being captured, it becomes a node of the graph.
fn launch(call: &Call, function: Handle, stream: Handle) -> Result<(), ErrorCode> {
    modules::launch(call, function)?;
    if let Some(graph) = graphs::captured(call, stream)? {
        graphs::add_kernel(call, graph)?;
    }
    EXECUTED.fetch_add(1, Relaxed);
    Ok(())
}

dispatched! { jumps;
    fn cuMemcpyHtoD_v2(to: Address, from: Address, bytes: usize) |call| {
        let is_on_device = address_in(call, from).is_ok_and(|(gpu, at)| gpu.memory().block_at(at).is_some());
        if is_on_device {
            return Err(INVALID_VALUE);
        }
        copied(call, to, bytes)
    }

    fn cuMemcpyDtoD_v2 | cuMemcpy(to: Address, from: Address, bytes: usize) |call| {
        copied(call, from, bytes)?;
        copied(call, to, bytes)
    }

    fn cuMemcpyPeer(_to: Address, _context: Handle, _from: Address, _other: Handle, _bytes: usize) |call| {
        unseen(call)
    }

    fn cuMemcpy2D_v2 | cuMemcpy3D_v2(_copy: Out<c_void>) |call| {
        unseen(call)
    }

    fn cuMemcpyBatchAsync_v2(_to: Out<Address>, _from: Out<Address>, _bytes: Out<usize>, _count: usize, _attributes: Out<c_void>,
        _indexes: Out<usize>, _kinds: usize, _stream: Handle) |call| {
        unseen(call)
    }

    fn cuMemcpyDtoH_v2(to: Out<u8>, from: Address, bytes: usize) |call| {
        copied(call, from, bytes)?;
        Ok(to.put_all(&vec![CONTENT; bytes])?)
    }

    fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, _stream: Handle) |call| {
        copied(call, from, bytes)?;
        copied(call, to, bytes)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: c_int) |call| {
        ready(call)?;
        let (_, gpu) = crate::cuda::device(call, ordinal)?;
        Ok(bytes.put(usize::try_from(crate::cuda::total(gpu.memory().cuda())).unwrap_or(usize::MAX))?)
    }

    fn cuLaunchKernel | cuLaunchKernel_ptsz(function: Handle, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint,
        _bz: c_uint, _shared: c_uint, stream: Handle, _parameters: Out<Out<c_void>>, _extra: Out<Out<c_void>>) |call| {
        launch(call, function, stream)
    }

    fn cuLaunchKernelEx | cuLaunchKernelEx_ptsz(config: Out<LaunchConfig>, function: Handle, _parameters: Out<Out<c_void>>,
        _extra: Out<Out<c_void>>) |call| {
        launch(call, function, config.get()?.stream)
    }

    fn cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz(function: Handle, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint,
        _by: c_uint, _bz: c_uint, _shared: c_uint, stream: Handle, _parameters: Out<Out<c_void>>) |call| {
        launch(call, function, stream)
    }

    // The handle of a function determines how many parameters it has, of one word each. PyTorch's functions have one of 128 words.
    fn cuFuncGetParamInfo(function: Handle, at: usize, offset: Out<usize>, bytes: Out<usize>) |call| {
        let (count, words) = match function {
            JOINS | ANY => (1, 128),
            SEQUENCE | SCALES | POINTS => (2, 1),
            _ => (modules::parameters(call, function).unwrap_or(function % COLLECTIVES), 1),
        };
        if at >= count {
            return Err(INVALID_VALUE);
        }
        offset.put(at * 8)?;
        Ok(bytes.put(words * 8)?)
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: Handle) |call| {
        if let Some(known) = modules::function_name(call, function) {
            return Ok(name.put(known.as_ptr())?);
        }
        if modules::is_kernel(call, function) {
            return Err(INVALID_HANDLE);
        }
        let known = match function {
            JOINS => c"_ZN2at6native19CatArrayBatchedCopyE",
            SEQUENCE => c"_Z29elementwise_kernel_with_indexlPl",
            SCALES => c"_Z5scalePKfPf",
            POINTS => c"_Z11set_pointerPPfS_",
            ANY => c"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIiNS0_14func_wrapper_tIbZZZNS0_14or_kernel_cudaEEEvT1_",
            COLLECTIVES.. => c"ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            _ => c"add",
        };
        Ok(name.put(known.as_ptr())?)
    }
}
