//! The driver calls that allocate and free memory: a table of the calls, and the code that decodes one call into a [`Call`].
//!
//! Every argument that is read here is 64 bits wide, or is the last one that is read. Therefore a row of the table and the arguments as
//! 64-bit words describe a call completely. CUPTI passes the arguments as a C struct that starts with the same words; a hook in the
//! dispatch table puts its arguments into an array.

mod arguments;
mod call;
mod decode;
mod graph_launches;
mod launches;
mod observer;
mod shape;
mod table;
mod thread_state;

pub(super) use self::{
    arguments::Arguments,
    decode::{record_entry, record_exit},
    launches::{is_new_launch, was_launched},
    observer::{CallRecorder, Uncounted},
    shape::CallShape,
    table::CALLS,
    thread_state::{STATE, ThreadState, as_library},
};
pub(crate) use self::{
    call::{Call, Caller, Context, DriverWork, IdKind, MemoryKind},
    graph_launches::{has_unrecorded_launches, record_graph_launches, take_unrecorded_launches},
    launches::{forget_launches, note_several_devices},
    observer::Observe,
    thread_state::{as_observer, as_observer_cold, as_program},
};
pub(super) use self::{
    shape::{DefaultStream, DriverShape},
    table::with_calls,
    thread_state::in_state,
};

/// Returns the names of the calls that are intercepted.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    CALLS.iter().map(|(_, name, _)| *name)
}

#[cfg(test)]
mod tests;
