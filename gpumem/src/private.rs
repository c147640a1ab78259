//! The names that the code of the macros and of the other crates uses. They are not part of the public API and may change at any time.

use std::any::type_name;

#[cfg(feature = "sim")]
pub use crate::session::simulated_gpu;
pub use crate::{
    model::Gauge,
    print::notice,
    session::{BodyGuard, Budget, End, Figure, GpuMemTrace, GpuMemTraceBuilder, Lines, Relation, TraceSpec, Traced},
};

use crate::model::short_name;

/// Returns the name of the function that contains the closure `_here`: `forward`, `Model::forward`.
pub fn function_name<F>(_here: &F) -> String {
    short_name(type_name::<F>())
}

/// Returns the builder of the trace of the function that contains the closure `_here`, in this module.
#[inline]
pub fn builder_in<F>(_here: &F, module: &'static str) -> GpuMemTraceBuilder {
    GpuMemTrace::builder().function(type_name::<F>(), module)
}

/// This is never called. Its return value gives the compiler the type of the body.
pub fn return_type_hint<R>() -> R {
    unreachable!("gpumem: nothing calls this")
}

/// Panics with the location of its caller. The macros call it in the user's function, so the message names a line there.
///
/// # Panics
/// Always panics.
#[track_caller]
pub fn fail(text: &str) -> ! {
    panic!("{text}")
}
