//! Decodes one side of a call, and records its effect on memory.

use std::ffi::c_int;

use super::{
    arguments::{Arguments, Array3DDescriptor, ArrayDescriptor, allocated_array, device_of_properties},
    call::{Call, DriverWork, IdKind, MemoryKind},
    graph_launches,
    launches::forget_launches,
    observer::{CallRecorder, Observe},
    shape::{CallShape, DriverShape},
};

const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;

/// Decodes a call that is about to be made. A free is recorded before the call: as soon as the call has freed an address, the driver may
/// hand the same address to another thread.
///
/// # Safety
/// `arguments` must belong to a call of this shape.
#[allow(clippy::inline_always, reason = "the shape is a constant in each hook, so the compiler removes most of this")]
#[inline(always)]
pub(in crate::sys) unsafe fn record_entry(shape: CallShape, arguments: Arguments, to: &CallRecorder<impl Observe>) {
    // SAFETY: the words fit this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    match shape {
        CallShape::Free(IdKind::Address) => to.freeing(word(0)),
        CallShape::Free(id_kind) => to.record(&Call::Freeing { id_kind, id: word(0) }),
        CallShape::Release => to.record(&Call::Releasing { handle: word(0) }),
        CallShape::Unmap => to.record(&Call::Unmapping { at: word(0), bytes: word(1) }),
        // There is a second reason to record this before the call: the driver may return an error of earlier work and still destroy the
        // context.
        #[expect(clippy::cast_possible_truncation, reason = "a pointer is as wide as `usize`")]
        CallShape::ContextDestroy => to.record(&Call::ContextGone { handle: word(0) as usize }),
        CallShape::GraphLaunch if !graph_launches::launched() => {}
        CallShape::GraphLaunch | CallShape::Graphs => to.record(&Call::Graphs { done: false }),
        CallShape::StreamCreate => to.record(&Call::DriverStarts { device: None }),
        // SAFETY: the arguments belong to a call of this shape.
        CallShape::Driver(shape) => unsafe { record_driver_entry(shape, arguments, to) },
        _ => {}
    }
}

/// Decodes a call that is about to be made, after which the driver may hold more or less memory for itself.
///
/// # Safety
/// `arguments` must belong to a call of this shape.
#[cold]
unsafe fn record_driver_entry(shape: DriverShape, arguments: Arguments, to: &CallRecorder<impl Observe>) {
    // SAFETY: the words fit this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    match shape {
        DriverShape::Instantiate { maps: true } => to.record(&Call::Graphs { done: false }),
        DriverShape::PoolDestroy => to.record(&Call::PoolDestroyed { pool: word(0) }),
        _ => {}
    }
    #[expect(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
    let device = if let DriverShape::Context { device } = shape { Some(word(device) as u32) } else { None };
    to.record(&Call::DriverStarts { device });
}

/// Decodes a call that was made, after which the driver may hold more or less memory for itself.
///
/// # Safety
/// `arguments` must belong to a call of this shape that returned `result`.
#[cold]
unsafe fn record_driver_exit(shape: DriverShape, result: u32, arguments: Arguments, to: &CallRecorder<impl Observe>) {
    // SAFETY: the words fit this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    // SAFETY: this is used only for calls that succeeded and whose first argument is `*out`.
    let out = || unsafe { arguments.out() };
    #[expect(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
    let int = |at: usize| word(at) as u32;
    if let DriverShape::Instantiate { maps: true } = shape {
        to.record(&Call::Graphs { done: true });
    }
    if let DriverShape::Launch { .. } = shape
        && result != 0
    {
        // The next launch of the function is its first one.
        forget_launches();
    }
    let device = if let DriverShape::Context { device } = shape { Some(int(device)) } else { None };
    let done = match shape {
        _ if result != 0 => DriverWork::Failed,
        DriverShape::Context { .. } => DriverWork::Context,
        DriverShape::Module => DriverWork::Module { handle: out(), image: word(1) },
        DriverShape::LookUp { handle } => DriverWork::LookedUp { handle: word(handle) },
        DriverShape::LoadFunction { function } => DriverWork::FunctionLoaded { function: word(function) },
        DriverShape::Unload => DriverWork::Unloaded,
        DriverShape::Launch { function } => DriverWork::Launch { function: word(function) },
        DriverShape::Limit => DriverWork::Limit { limit: int(0), bytes: word(1) },
        DriverShape::PeerAccess => DriverWork::Streams,
        DriverShape::Instantiate { .. } => DriverWork::Graph { graph: out() },
        DriverShape::GraphDestroy => DriverWork::GraphDestroyed { graph: word(0) },
        DriverShape::Pool | DriverShape::PoolDestroy => DriverWork::Pools,
    };
    to.record(&Call::DriverDone { device, work: done });
}

/// Decodes a call that was made. The most frequent calls come first. Each branch calls `record` in place. A function that returns a
/// [`Call`] would write it in pieces of other sizes than the copy reads, which causes a store-forwarding stall.
///
/// # Safety
/// `arguments` must belong to a call of this shape that returned `result`.
#[allow(clippy::inline_always, reason = "the shape is a constant in each hook, so the compiler removes most of this")]
#[inline(always)]
pub(in crate::sys) unsafe fn record_exit(
    shape: CallShape,
    result: u32,
    arguments: Arguments,
    to: &CallRecorder<impl Observe>,
) {
    match (shape, result) {
        (CallShape::Free(_), 0) => {}
        (CallShape::AllocOnStream(default), 0) => {
            // SAFETY: the call succeeded, its first argument is where it writes the address, and it has three arguments.
            let (address, bytes, stream) = unsafe { (arguments.out(), arguments.word(1), arguments.word(2)) };
            to.pooled(address, bytes, default.resolve(stream));
        }
        (CallShape::GraphLaunch, _) if !graph_launches::launched() => {}
        // SAFETY: the arguments belong to a call of this shape, which returned this result.
        (CallShape::Driver(shape), result) => unsafe { record_driver_exit(shape, result, arguments, to) },
        // SAFETY: the arguments belong to a call of this shape, which succeeded.
        (shape, 0) => unsafe { record_success(shape, arguments, to) },
        (shape, result) => {
            // SAFETY: the arguments belong to a call of this shape.
            if let Some(call) = unsafe { decode_failure(shape, result, arguments) } {
                to.record(&call);
            }
        }
    }
}

/// Decodes a call that has succeeded.
///
/// # Safety
/// `arguments` must belong to a call of this shape that succeeded.
#[inline(never)]
unsafe fn record_success(shape: CallShape, arguments: Arguments, to: &CallRecorder<impl Observe>) {
    // SAFETY: the words fit this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    // SAFETY: the call succeeded, and this is used only for shapes that start with `*out`.
    let out = || unsafe { arguments.out() };
    to.record(&match shape {
        CallShape::Alloc(memory) => Call::Allocated { id_kind: IdKind::Address, id: out(), bytes: word(1), memory },
        CallShape::AllocPitch => {
            // SAFETY: as for `out`; the second argument is the address of the pitch.
            let pitch = unsafe { (word(1) as *const u64).read() };
            let bytes = pitch.saturating_mul(word(3));
            Call::Allocated { id_kind: IdKind::Address, id: out(), bytes, memory: MemoryKind::Device }
        }
        CallShape::AllocFromPool(default) => {
            Call::Pooled { address: out(), bytes: word(1), stream: default.resolve(word(3)), pool: Some(word(2)) }
        }
        CallShape::Array => {
            // SAFETY: the second argument of a call that succeeded points to a descriptor.
            let ArrayDescriptor { width, height, format, channels } =
                unsafe { (word(1) as *const ArrayDescriptor).read() };
            allocated_array(out(), [width, height, 1], format, channels, 1)
        }
        CallShape::Array3D { levels } => {
            // SAFETY: as above.
            let Array3DDescriptor { width, height, depth, format, channels, .. } =
                unsafe { (word(1) as *const Array3DDescriptor).read() };
            #[expect(clippy::cast_possible_truncation, reason = "an unsigned int is the lower half of the word")]
            let levels = if levels { word(2) as u32 } else { 1 };
            allocated_array(out(), [width, height, depth], format, channels, levels)
        }
        CallShape::Register => {
            let (id, bytes) = (word(0), word(1));
            Call::Allocated { id_kind: IdKind::Registered, id, bytes, memory: MemoryKind::PinnedHost }
        }
        CallShape::Create => {
            // SAFETY: the third argument of a call that succeeded points to the properties.
            let device = unsafe { device_of_properties(word(2)) };
            Call::Created { handle: out(), bytes: word(1), device }
        }
        CallShape::Retain => Call::Retained { handle: out() },
        CallShape::Map => Call::Mapped { at: word(0), handle: word(3) },
        CallShape::PoolCreate => {
            // SAFETY: the second argument of a call that succeeded points to the properties.
            let device = unsafe { device_of_properties(word(1)) };
            Call::Pool { pool: out(), device }
        }
        #[expect(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
        CallShape::PoolOfDevice => Call::Pool { pool: out(), device: Some(word(1) as u32) },
        CallShape::StreamCreate => {
            to.record(&Call::StreamCreated { stream: out() });
            Call::DriverDone { device: None, work: DriverWork::Streams }
        }
        CallShape::StreamDestroy => Call::StreamDestroyed { stream: word(0) },
        CallShape::Release | CallShape::Unmap => Call::Freed { succeeded: true },
        CallShape::ForeignHandle => Call::ForeignHandle { handle: out() },
        CallShape::Foreign(id_kind) => Call::Foreign { id_kind, id: out() },
        CallShape::CaptureStart(default) => Call::CaptureStarted { stream: default.resolve(word(0)) },
        CallShape::CaptureEnd(default) => Call::CaptureEnded { stream: default.resolve(word(0)), succeeded: true },
        CallShape::GraphNode { parameters } => {
            /// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`
            const MEM_ALLOC: c_int = 10;
            // SAFETY: the call succeeded, and the first field of the node's parameters is its kind.
            let allocates = parameters.is_none_or(|at| unsafe { (word(at) as *const c_int).read() } == MEM_ALLOC);
            if !allocates {
                return;
            }
            Call::GraphNode
        }
        CallShape::GraphLaunch | CallShape::Graphs => Call::Graphs { done: true },
        // Whether the context still exists depends on references that are not known.
        CallShape::ContextDetach => Call::Uncounted,
        CallShape::ContextDestroy => Call::DriverDone { device: None, work: DriverWork::ContextEnded },
        // `record_entry` and `record_exit` record the first three; the dispatch table's hook records primary contexts.
        CallShape::AllocOnStream(_)
        | CallShape::Free(_)
        | CallShape::Driver(_)
        | CallShape::PrimaryRelease
        | CallShape::PrimaryReset => {
            return;
        }
    });
}

/// Decodes a call that failed.
///
/// # Safety
/// `arguments` must belong to a call of this shape.
#[cold]
unsafe fn decode_failure(shape: CallShape, result: u32, arguments: Arguments) -> Option<Call> {
    // SAFETY: the words fit this shape.
    let word = |at: usize| unsafe { arguments.word(at) };
    match shape {
        CallShape::Free(_) | CallShape::Release | CallShape::Unmap => {
            return Some(Call::Freed { succeeded: false });
        }
        // The capture may have ended even though the call failed.
        CallShape::CaptureEnd(default) => {
            return Some(Call::CaptureEnded { stream: default.resolve(word(0)), succeeded: false });
        }
        // The driver may return an error of earlier work and still launch the graph.
        CallShape::GraphLaunch | CallShape::Graphs => return Some(Call::Graphs { done: true }),
        CallShape::StreamCreate => return Some(Call::DriverDone { device: None, work: DriverWork::Failed }),
        CallShape::ContextDestroy => {
            return Some(Call::DriverDone { device: None, work: DriverWork::ContextEnded });
        }
        _ => {}
    }
    if result != CUDA_ERROR_OUT_OF_MEMORY {
        return None;
    }
    let of_context = |bytes, memory| Call::Rejected { bytes, memory: Some(memory), pool: None, stream: 0 };
    Some(match shape {
        CallShape::Alloc(memory) => of_context(word(1), memory),
        CallShape::AllocPitch => of_context(word(2).saturating_mul(word(3)), MemoryKind::Device),
        CallShape::AllocOnStream(default) => {
            Call::Rejected { bytes: word(1), memory: None, pool: None, stream: default.resolve(word(2)) }
        }
        CallShape::AllocFromPool(default) => {
            Call::Rejected { bytes: word(1), memory: None, pool: Some(word(2)), stream: default.resolve(word(3)) }
        }
        CallShape::Create => {
            // SAFETY: a call that ran out of memory has already read its third argument, the properties.
            let device = unsafe { device_of_properties(word(2)) }?;
            Call::NotCreated { bytes: word(1), device }
        }
        _ => return None,
    })
}
