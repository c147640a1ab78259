//! Where sources record events.

use std::sync::Arc;

use once_cell::sync::OnceCell;

use crate::model::{Answer, Bytes, EventKind, Key, StackId, Tag};
#[cfg(any(feature = "cupti", feature = "dispatch"))]
use crate::{error::Result, model::Source};

/// Receives the events of all sources. It is a type and not a value, so that the compiler inlines its functions into the hooks.
pub(crate) trait RecordEvents: 'static {
    /// A block was allocated. Not called in the child of a fork.
    fn alloc(key: Key, bytes: Bytes, tag: Tag);

    /// A block is about to be freed. Not called in the child of a fork.
    fn free(key: Key) -> Answer;

    /// Any event, including these two.
    fn record(event: &EventKind) -> Answer;

    /// The number of a stack.
    fn number_stack(addresses: &[usize]) -> StackId;

    /// The addresses of a stack, by its number.
    fn addresses(stack: StackId) -> Arc<[usize]>;
}

/// The functions of the type that receives events.
pub(super) struct EventRecorder {
    pub(super) record: fn(&EventKind) -> Answer,
    pub(super) number_stack: fn(&[usize]) -> StackId,
    pub(super) addresses: fn(StackId) -> Arc<[usize]>,
    /// From now on it receives the calls that this source intercepts.
    #[cfg(any(feature = "cupti", feature = "dispatch"))]
    pub(super) subscribe: fn(Source) -> Result<()>,
}

/// Set when the session begins. Until then an event costs one load.
static RECORDER: OnceCell<EventRecorder> = OnceCell::new();

/// Only the first call has an effect. The process has one session, and so one type that receives events.
pub(super) fn set(recorder: EventRecorder) {
    let _ = RECORDER.set(recorder);
}

/// `None` before the session begins.
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(super) fn get() -> Option<&'static EventRecorder> {
    RECORDER.get()
}

#[cfg(any(feature = "sim", feature = "cupti", feature = "dispatch"))]
pub(super) fn record(event: &EventKind) -> Answer {
    RECORDER.get().map_or(Answer::Applied, |recorder| (recorder.record)(event))
}

#[cfg(feature = "backtrace")]
pub(super) fn number_stack(addresses: &[usize]) -> StackId {
    RECORDER.get().map_or(StackId::NONE, |recorder| (recorder.number_stack)(addresses))
}

#[cfg(feature = "backtrace")]
pub(super) fn addresses(stack: StackId) -> Arc<[usize]> {
    RECORDER.get().map_or_else(Arc::default, |recorder| (recorder.addresses)(stack))
}
