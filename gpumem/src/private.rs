//! The names that the code of the macros uses. They are not part of the public API and may change at any time.

use std::any::type_name;

pub use crate::model::Gauge;
use crate::model::short_name;
#[cfg(feature = "nvml")]
pub use crate::query::machine::{CudaDevice, Gpu, Machine, cuda_devices, machine, processes_on};
#[cfg(any(feature = "baseline", feature = "capture"))]
pub use crate::session::LockFile;
#[cfg(feature = "capture")]
pub use crate::session::SharedMemory;
#[cfg(all(feature = "__internal", feature = "cupti", feature = "dispatch"))]
pub use crate::session::calls_of_both_sources;
#[cfg(all(feature = "backtrace", feature = "capture", feature = "dispatch"))]
pub use crate::session::run_in_python;
pub use crate::session::{
    BodyGuard, Budget, End, Figure, GpuMemTrace, GpuMemTraceBuilder, Lines, Relation, TraceSpec, Traced,
};
#[cfg(all(feature = "capture", feature = "dispatch"))]
pub use crate::session::{
    Injected, Keep, begin_injected, end_injected, exit_without_program, leave_own_file, run_beside_program,
    run_with_own_descriptors, with_high_number,
};
pub use crate::session::{Setting, can_intercept, cupti_version, settings_in_use};
#[cfg(feature = "sim")]
pub use crate::session::{TestSession, simulated_gpu};

/// The name of the function that contains the closure `_here`: `forward`, `Model::forward`.
pub fn function_name<F>(_here: &F) -> String {
    short_name(type_name::<F>())
}

/// The builder of the trace of the function that contains the closure `_here`, in this module.
#[inline]
pub fn builder_in<F>(_here: &F, module: &'static str) -> GpuMemTraceBuilder {
    GpuMemTrace::builder().function(type_name::<F>(), module)
}

/// Is never called. Its return value gives the compiler the type of the body.
pub fn return_type_hint<R>() -> R {
    unreachable!("gpumem: nothing calls this")
}

/// Panics with the location of its caller. The macros call it in the user's function, so the message names a line there.
///
/// # Panics
/// Always.
#[track_caller]
pub fn fail(text: &str) -> ! {
    panic!("{text}")
}

/// Parts of the library that the project's benchmarks measure alone.
#[cfg(feature = "__internal")]
pub mod internal {
    /// Records the calling thread's stack, as for a large block.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack() -> u32 {
        crate::session::WAYS_TO_A_STACK[0]().0
    }

    /// The same for a stack that was not recorded before.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack_walked() -> u32 {
        crate::session::WAYS_TO_A_STACK[1]().0
    }

    /// The same with the unwinder of the system, and at most 32 functions.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack_by_the_system() -> u32 {
        crate::session::WAYS_TO_A_STACK[2]().0
    }

    /// The lines of the calling thread's stack, innermost first, as a large block has them.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack_lines() -> Vec<String> {
        crate::session::stack_lines()
    }

    /// The Python functions that the calling thread is in, innermost first, each as `file:line function`.
    #[cfg(feature = "backtrace")]
    pub fn python_lines() -> Vec<String> {
        crate::session::python_lines()
    }

    /// The line of the instruction at an offset, by the table of a Python code object that begins on `first_line`.
    #[cfg(feature = "backtrace")]
    pub fn python_line_at(table: &[u8], first_line: i32, offset: isize) -> Option<u32> {
        crate::session::python_line_at(table, first_line, offset)
    }

    /// The functions of the driver that are intercepted. A driver need not have all of them.
    #[cfg(feature = "dispatch")]
    pub fn intercepted() -> Vec<&'static str> {
        crate::session::intercepted()
    }

    /// Puts hooks into the dispatch table that report nothing, to measure the cost of a hook alone.
    ///
    /// # Errors
    /// As for the source `dispatch`.
    #[cfg(feature = "dispatch")]
    pub fn hook_for_nobody() -> crate::error::Result<()> {
        crate::session::hook_for_nobody()
    }

    /// A stream-ordered allocation of this many bytes and its free: once intercepted by hooks that report nothing, once not
    /// intercepted.
    #[cfg(feature = "dispatch")]
    pub fn pairs() -> [fn(u64); 2] {
        crate::session::rehearse()
    }
}
