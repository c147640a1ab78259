//! The collectives of NCCL in a dry run. They move nothing between ranks: each rank continues as if all ranks had its own values.
//!
//! A kernel of NCCL waits for the kernels of other ranks, and NCCL's threads wait for the kernels. If some of them were skipped, the
//! program would not end. Therefore the command preloads the library into dry runs, and the loader finds these functions before those of
//! NCCL. Communicators are still created by NCCL. The arguments come from `nccl.h`.
//!
//! NCCL does not accept two ranks of one process on one GPU. Therefore the communicators that one process creates for several simulated
//! GPUs are ours.

#![allow(unsafe_code, non_snake_case, reason = "the functions precede a C library's")]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    mem::transmute,
    panic::catch_unwind,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpumem_driver::{
    dry::{self, Mode, nccl},
    process,
};

/// `ncclSuccess`, `ncclInternalError`, `ncclInvalidArgument` and `ncclInvalidUsage`
const SUCCESS: c_int = 0;
const FAILED: c_int = 3;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

/// The type of each argument. C passes an `int` as the lower half of a word.
macro_rules! word {
    ($argument:ident) => {
        usize
    };
}

/// Defines functions that replace NCCL's in a dry run. If the code of one returns `None`, NCCL's own function is called.
macro_rules! functions {
    ($($name:ident($($argument:ident),*) $answer:block)*) => {
        $(
            // SAFETY: only NCCL's own function has the same name, and this one is meant to replace it.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: usize),*) -> c_int {
                if matches!(dry::mode(), Some(Mode::Dry { .. })) {
                    // In the child process of a fork, the lock of the ranks may be held by a thread that does not exist there, and NCCL
                    // does not work.
                    let is_alive = !process::is_forked();
                    // No panic may unwind into the callers of NCCL.
                    let answer = is_alive.then(|| catch_unwind(|| -> Option<c_int> { $answer }).ok()).flatten();
                    if let Some(answer) = answer.unwrap_or(Some(FAILED)) {
                        return answer;
                    }
                }
                let Some(function) = nccl::function(stringify!($name)) else { return FAILED };
                // SAFETY: NCCL's function of this name takes this number of words, and the arguments are the caller's.
                unsafe {
                    transmute::<*mut c_void, unsafe extern "C" fn($(word!($argument)),*) -> c_int>(function.as_ptr())($($argument),*)
                }
            }
        )*
    };
}

macro_rules! collectives {
    ($($name:ident($($argument:ident),*) $copies:block)*) => {
        functions! { $($name($($argument),*) { $copies; Some(SUCCESS) })* }
    };
}

functions! {
    ncclCommInitAll(comms, count, devices) {
        matches!(dry::mode(), Some(Mode::Dry { cards: 1.., .. })).then(|| {
            let count = int(count);
            if comms == 0 || count > i32::MAX as usize {
                return INVALID_ARGUMENT;
            }
            for rank in 0..count {
                // SAFETY: the caller passes arrays with this many elements; the devices may be null.
                unsafe {
                    let device = if devices == 0 { rank } else { (devices as *const c_int).add(rank).read().unsigned_abs() as usize };
                    (comms as *mut usize).add(rank).write(register(Joint { rank, count, device }));
                }
            }
            SUCCESS
        })
    }
    ncclCommCount(comm, out) { write_value(comm, out, |joint| joint.count) }
    ncclCommUserRank(comm, out) { write_value(comm, out, |joint| joint.rank) }
    ncclCommCuDevice(comm, out) { write_value(comm, out, |joint| joint.device) }
    ncclCommGetAsyncError(comm, out) { write_value(comm, out, |_| SUCCESS as usize) }
    ncclCommFinalize(comm) { joint(comm).map(|_| SUCCESS) }
    ncclCommDestroy(comm) { joints().remove(&comm).map(|_| SUCCESS) }
    ncclCommAbort(comm) { joints().remove(&comm).map(|_| SUCCESS) }
    ncclCommSplit(comm, _color, _key, _out, _config) { joint(comm).map(|_| INVALID_USAGE) }
}

/// A rank of a communicator that this process created for several simulated GPUs.
#[derive(Clone, Copy)]
struct Joint {
    rank: usize,
    count: usize,
    device: usize,
}

/// Returns the ranks by their handles.
fn joints() -> MutexGuard<'static, BTreeMap<usize, Joint>> {
    static JOINTS: Mutex<BTreeMap<usize, Joint>> = Mutex::new(BTreeMap::new());

    JOINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn joint(comm: usize) -> Option<Joint> {
    joints().get(&comm).copied()
}

/// Registers a rank and returns its handle. The handle is an address that no other memory has, because it is never released.
fn register(joint: Joint) -> usize {
    let handle = Box::leak(Box::new([0_u64; 8])).as_ptr() as usize;
    joints().insert(handle, joint);
    handle
}

/// Writes a value of a communicator that this process created to `out`. Returns `None` for a communicator of NCCL.
fn write_value(comm: usize, out: usize, what: impl FnOnce(Joint) -> usize) -> Option<c_int> {
    let value = what(joint(comm)?);
    if out == 0 {
        return Some(INVALID_ARGUMENT);
    }
    // SAFETY: the caller passes a pointer to an `int`.
    unsafe { (out as *mut c_int).write(c_int::try_from(value).unwrap_or(0)) };
    Some(SUCCESS)
}

collectives! {
    ncclAllReduce(from, to, count, kind, _operation, _comm, stream) {
        copy(from, to, bytes(count, kind), stream);
    }
    ncclReduce(from, to, count, kind, _operation, root, comm, stream) {
        if query("ncclCommUserRank", comm) == int(root) {
            copy(from, to, bytes(count, kind), stream);
        }
    }
    ncclBroadcast(from, to, count, kind, root, comm, stream) {
        if query("ncclCommUserRank", comm) == int(root) {
            copy(from, to, bytes(count, kind), stream);
        }
    }
    ncclBcast(_buffer, _count, _kind, _root, _comm, _stream) {}
    ncclReduceScatter(from, to, count, kind, _operation, comm, stream) {
        let bytes = bytes(count, kind);
        copy(from + query("ncclCommUserRank", comm) * bytes, to, bytes, stream);
    }
    ncclAllGather(from, to, count, kind, comm, stream) {
        let bytes = bytes(count, kind);
        (0..query("ncclCommCount", comm)).for_each(|rank| copy(from, to + rank * bytes, bytes, stream));
    }
    ncclAlltoAll(from, to, count, kind, comm, stream) {
        copy(from, to, query("ncclCommCount", comm) * bytes(count, kind), stream);
    }
    ncclGather(from, to, count, kind, root, comm, stream) {
        let bytes = bytes(count, kind);
        if query("ncclCommUserRank", comm) == int(root) {
            (0..query("ncclCommCount", comm)).for_each(|rank| copy(from, to + rank * bytes, bytes, stream));
        }
    }
    ncclScatter(from, to, count, kind, root, comm, stream) {
        let (bytes, rank) = (bytes(count, kind), query("ncclCommUserRank", comm));
        if rank == int(root) {
            copy(from + rank * bytes, to, bytes, stream);
        }
    }
    ncclSend(_buffer, _count, _kind, _peer, _comm, _stream) {}
    ncclRecv(_buffer, _count, _kind, _peer, _comm, _stream) {}
}

/// Returns the value of a caller's `int` that is not negative.
fn int(word: usize) -> usize {
    word & 0xffff_ffff
}

/// Returns the size of `count` values of an `ncclDataType_t`, in bytes.
fn bytes(count: usize, kind: usize) -> usize {
    const SIZES: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
    // Values of an unknown type are not copied.
    count * SIZES.get(int(kind)).unwrap_or(&0)
}

/// Returns the number of ranks of a communicator, or the rank of the caller in it. `question` is the name of NCCL's function for that. It
/// is called unless this process created the communicator. Returns 0 if NCCL returns an error.
fn query(question: &str, comm: usize) -> usize {
    if let Some(joint) = joint(comm) {
        return if question == "ncclCommCount" { joint.count } else { joint.rank };
    }
    let mut answer: c_int = 0;
    if let Some(function) = nccl::function(question) {
        // SAFETY: both functions have this type, and the communicator is the caller's.
        let ask =
            unsafe { transmute::<*mut c_void, unsafe extern "C" fn(usize, *mut c_int) -> c_int>(function.as_ptr()) };
        // SAFETY: the variable is live.
        if unsafe { ask(comm, &raw mut answer) } != SUCCESS {
            return 0;
        }
    }
    usize::try_from(answer).unwrap_or(0)
}

/// Copies memory that is on the device. Other memory is skipped, as in every copy of a dry run.
fn copy(from: usize, to: usize, bytes: usize, stream: usize) {
    if from != to && bytes > 0 {
        // SAFETY: the program requests a collective with these buffers, which writes this rank's part to `to`.
        unsafe { nccl::copy_on_device(from as u64, to as u64, bytes, stream as u64) };
    }
}
