//! The receiver of the events of sources.

use std::sync::Arc;

use once_cell::sync::OnceCell;

#[cfg(feature = "cuda")]
use crate::model::Source;
use crate::{
    error::Result,
    model::{Answer, Bytes, EventKind, Key, Label, StackId, Tag},
};

/// Receives the events of all sources. It is a type and not a value, so that the compiler inlines its functions into the hooks.
pub trait RecordEvents: 'static {
    /// A block was allocated. This is not called in the child of a fork.
    fn alloc(key: Key, bytes: Bytes, tag: Tag);

    /// A block is about to be freed. This is not called in the child of a fork.
    fn free(key: Key) -> Answer;

    /// Any event, including these two.
    fn record(event: &EventKind) -> Answer;

    /// Returns the number of a stack.
    fn number_stack(addresses: &[usize]) -> StackId;

    /// Returns the number of the file with the code before this return address, in the place of a stack.
    fn number_file(_: usize) -> StackId {
        StackId::NONE
    }

    /// Returns the addresses of a stack, by its number.
    fn addresses(stack: StackId) -> Arc<[usize]>;
}

/// Labels the block with this key. The address is for the error's text.
pub type LabelBlock = fn(Key, &Label, u64) -> Result<()>;

static LABEL: OnceCell<LabelBlock> = OnceCell::new();

/// Sets the function that labels the blocks of simulated devices. Only the first call has an effect.
pub fn label_with(label: LabelBlock) {
    let _ = LABEL.set(label);
}

/// Labels a block.
#[cfg(feature = "sim")]
pub(super) fn label(key: Key, label: &Label, address: u64) -> Result<()> {
    match LABEL.get() {
        Some(with) => with(key, label, address),
        None => Err(crate::error::Kind::UnknownBlock { address, why: None }.into()),
    }
}

static BEFORE_ALLOCATIONS: OnceCell<fn()> = OnceCell::new();

/// Sets a function that is called on each thread before its first allocation is recorded, and before many others. The thread holds no
/// lock of gpumem then. Only the first call has an effect.
pub fn call_before_allocations(function: fn()) {
    let _ = BEFORE_ALLOCATIONS.set(function);
}

/// An allocation is about to be recorded.
#[cfg(feature = "cuda")]
pub(super) fn before_allocation() {
    if let Some(function) = BEFORE_ALLOCATIONS.get() {
        crate::sys::calls::as_program(function);
    }
}

/// The functions of the type that receives events.
#[cfg_attr(not(feature = "backtrace"), allow(dead_code, reason = "no stack is walked"))]
pub(super) struct EventRecorder {
    pub(super) record: fn(&EventKind) -> Answer,
    pub(super) number_stack: fn(&[usize]) -> StackId,
    pub(super) number_file: fn(usize) -> StackId,
    pub(super) addresses: fn(StackId) -> Arc<[usize]>,
    /// The type receives the calls that this source intercepts.
    #[cfg(feature = "cuda")]
    pub(super) subscribe: fn(Source) -> Result<()>,
}

/// It is set when the session begins. Until then an event costs one load.
static RECORDER: OnceCell<EventRecorder> = OnceCell::new();

/// Only the first call has an effect. The process has one session, and so one type that receives events.
pub(super) fn set(recorder: EventRecorder) {
    let _ = RECORDER.set(recorder);
}

/// `None` before the session begins.
#[cfg(feature = "cuda")]
pub(super) fn get() -> Option<&'static EventRecorder> {
    RECORDER.get()
}

#[cfg(any(feature = "sim", feature = "cuda"))]
pub(super) fn record(event: &EventKind) -> Answer {
    RECORDER.get().map_or(Answer::Applied, |recorder| (recorder.record)(event))
}

#[cfg(feature = "backtrace")]
pub(super) fn number_stack(addresses: &[usize]) -> StackId {
    RECORDER.get().map_or(StackId::NONE, |recorder| (recorder.number_stack)(addresses))
}

#[cfg(feature = "backtrace")]
pub(super) fn number_file(address: usize) -> StackId {
    RECORDER.get().map_or(StackId::NONE, |recorder| (recorder.number_file)(address))
}

#[cfg(feature = "backtrace")]
pub(super) fn addresses(stack: StackId) -> Arc<[usize]> {
    RECORDER.get().map_or_else(Arc::default, |recorder| (recorder.addresses)(stack))
}
