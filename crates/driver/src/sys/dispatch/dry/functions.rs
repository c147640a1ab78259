//! The functions that replace the driver's.

use std::{mem, sync::atomic::Ordering::Relaxed};

use super::{
    blocks, card_calls, cards,
    copies::{self, Range, Rows},
    nodes, physical, questions,
    replaced::DRIVERS,
    state::{
        CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, IS_INSIDE, SUCCESS, get, inside, is_dry, is_dry_handle,
    },
    table::{CardCall, FUNCTIONS, Place, Replacement, with_functions},
    work,
};
use crate::{
    inbox::{Primitives, Std},
    sys::calls::{STATE, ThreadState},
};

macro_rules! functions {
    ($([$($name:ident),+]$arguments:tt: $shape:expr;)*) => {
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum FunctionIndex { $($($name),+),* }

        /// Each integer and each pointer is a whole word, as in the hooks.
        #[allow(non_snake_case)]
        mod replacement {
            use super::*;

            $($(functions!(@function $name $arguments $shape);)+)*
        }

        /// Returns the addresses of the functions, by row.
        pub(super) fn replacements() -> [usize; FUNCTIONS.len()] {
            [$($(replacement::$name as *const () as usize),+),*]
        }
    };
    (@function $name:ident($($argument:ident),*) $shape:expr) => {
        pub(super) unsafe extern "C-unwind" fn $name($($argument: u64),*) -> u32 {
            type Implementation = unsafe extern "C-unwind" fn($(functions!(@word $argument)),*) -> u32;
            let driver = |words: &[u64]| {
                let [$($argument),*] = *words else { return CUDA_ERROR_INVALID_VALUE };
                let driver = DRIVERS[FunctionIndex::$name as usize].load(Relaxed);
                // SAFETY: it is the address of the driver's implementation, which has these arguments and returns a `CUresult`. It was
                // stored before this function was put into the slot.
                unsafe { mem::transmute::<usize, Implementation>(driver)($($argument),*) }
            };
            // SAFETY: the words are the arguments of this call, which has this shape and these names of arguments.
            unsafe { run($shape, &[$(stringify!($argument)),*], &[$($argument),*], &driver) }
        }
    };
    (@word $argument:ident) => { u64 };
}
with_functions!(functions);

/// Makes a call on the program's simulated GPUs. `driver` makes it on the real one.
///
/// # Safety
/// `words` must be the arguments of a call of this shape, and `names` their names. Pointers among them must be valid as the driver
/// requires.
unsafe fn run(shape: Replacement, names: &[&str], words: &[u64], driver: &dyn Fn(&[u64]) -> u32) -> u32 {
    // In the child process of a fork, the lock may be held by a thread that does not exist there.
    if IS_INSIDE.get() || Std::is_forked() {
        return driver(words);
    }
    // SAFETY: `words` are the arguments of the call, by the contract of this function.
    let real = &|| inside(|| unsafe { cards::with_drivers_device(names, words, driver) });
    // A page that gpumem allocates for itself is on no simulated GPU.
    if STATE.get() == ThreadState::Library && shape == Replacement::Create {
        return real();
    }
    if shape.structs().iter().any(|at| words[*at] == 0) {
        return real();
    }
    // SAFETY: the caller passes the arguments of the function, which each of these takes.
    let result = unsafe {
        match shape {
            Replacement::Alloc => blocks::alloc(words[0], words[1], None, 0, real),
            // The memory of a graph would not be in the account.
            Replacement::AllocPooled { .. } if blocks::is_captured(words[words.len() - 1]) => CUDA_ERROR_NOT_SUPPORTED,
            Replacement::AllocPooled { pool } => {
                blocks::alloc(words[0], words[1], Some(pool.map_or(0, |at| words[at])), words[words.len() - 1], real)
            }
            Replacement::AllocPitch => blocks::alloc_pitch(words, real),
            Replacement::AllocManaged => blocks::alloc_managed(words, real),
            Replacement::AllocHost => blocks::alloc_host(words, real),
            Replacement::FreeHost => blocks::free_host(words[0], real),
            Replacement::Free => blocks::free(words[0], real),
            Replacement::ContextDestroy => blocks::destroy_context(words[0], real),
            Replacement::PrimaryRelease if cards::are_simulated() => {
                card_calls::run(CardCall::Release, words, real, driver)
            }
            Replacement::PrimaryRelease => blocks::leave_primary_context(words[0], real),
            Replacement::PrimaryReset => card_calls::reset_primary_context(words[0])
                .unwrap_or_else(|| blocks::leave_primary_context(words[0], real)),
            Replacement::Reserve => physical::reserve(words, real),
            Replacement::Create => physical::create(words, real),
            Replacement::Release => physical::release(words[0], real),
            Replacement::Retain => physical::retain(words[0], words[1], real),
            Replacement::Map => physical::map(words, real),
            Replacement::Unmap => physical::unmap(words[0], words[1]),
            Replacement::SetAccess => physical::set_access(words, real),
            Replacement::Export => physical::export(words, real),
            Replacement::Import => physical::import(words, real),
            Replacement::GetAccess => questions::access(words, real),
            Replacement::Properties => questions::properties(words, real),
            Replacement::Info => questions::info(words, real),
            Replacement::Total => questions::total(words, real),
            Replacement::Range => questions::range(words, real),
            Replacement::Attribute => questions::one_attribute(words, real),
            Replacement::Attributes => questions::attributes(words, real),
            Replacement::PoolAttribute => questions::pool_attribute(words, real),
            Replacement::SetPoolAttribute => questions::set_pool_attribute(words, real),
            Replacement::Trim => questions::trim(words[0], words[1], real),
            Replacement::Synchronize => questions::synchronize(real),
            Replacement::RejectAddress(at) if is_dry(words[at]) => CUDA_ERROR_NOT_SUPPORTED,
            Replacement::RejectHandle(at) if is_dry_handle(words[at]) => CUDA_ERROR_NOT_SUPPORTED,
            Replacement::Reject => CUDA_ERROR_NOT_SUPPORTED,
            Replacement::Skip(addresses) if addresses.iter().any(|at| is_dry(words[*at])) => SUCCESS,
            Replacement::Set(bytes) => copies::set(words[0], words[2].checked_mul(bytes), real),
            Replacement::SetRows(bytes) => copies::set(words[0], copies::bytes_of_rows(words, bytes), real),
            Replacement::Copy(places, at) => {
                let [to, from] = [0, 1].map(|side| Range::new(places[side], words[at[side]], words[at[2]]));
                copies::copy(to, from, real)
            }
            Replacement::Copy2D => copies::copy_rows(Rows::of_2d(words[0]).as_ref(), real),
            Replacement::Copy3D => copies::copy_rows(Rows::of_3d(words[0]).as_ref(), real),
            Replacement::CopyBatch => copies::copy_batch(words, real),
            Replacement::Launch { function, parameters, extra } => {
                let extra = extra.map_or(0, |extra| words[extra]);
                // The rows of the grid are an argument, or the second int of the `CUlaunchConfig`.
                let rows = if function == 0 { words[2] } else { get(words[0]) >> 32 };
                if work::is_skipped(words[function], rows, words[parameters], extra) { SUCCESS } else { real() }
            }
            Replacement::KernelNode if nodes::is_kernel_skipped(words[4]) => nodes::empty_node(words),
            Replacement::CopyNode => match copies::skipped_node(Rows::of_3d(words[4]).as_ref()) {
                Some(SUCCESS) => nodes::empty_node(words),
                skipped => skipped.unwrap_or_else(real),
            },
            Replacement::SetNode if is_dry(get(words[4])) => nodes::empty_node(words),
            Replacement::Node { parameters } => nodes::node(words, parameters, real),
            Replacement::ChangeKernelNode(at) if nodes::is_kernel_skipped(words[at]) => SUCCESS,
            Replacement::ChangeCopyNode(at) => {
                copies::skipped_node(Rows::of_3d(words[at]).as_ref()).unwrap_or_else(real)
            }
            Replacement::ChangeSetNode(at) if is_dry(get(words[at])) => SUCCESS,
            Replacement::ChangeNode(at) => nodes::skipped_node(words[at]).unwrap_or_else(real),
            Replacement::StreamOperations => work::stream_operations(words, real),
            Replacement::Card(call) => card_calls::run(call, words, real, driver),
            _ => real(),
        }
    };
    work::note_failure(result);
    result
}
