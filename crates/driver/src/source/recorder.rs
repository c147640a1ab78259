//! Sends the events of sources to their receiver.

use std::sync::Arc;

use once_cell::sync::OnceCell;

#[cfg(feature = "cuda")]
use crate::model::Source;
use crate::{
    error::Result,
    model::{Answer, Bytes, Device, EventKind, Key, Label, MemKind, StackId, Tag},
};

/// Receives the events of all sources. The receiver is a type instead of a value, so that the compiler can inline its functions into the
/// hooks.
pub trait RecordEvents: 'static {
    /// Records that a block was allocated. Not called in the child process of a fork.
    fn alloc(key: Key, bytes: Bytes, tag: Tag);

    /// Records that a block is about to be freed. Not called in the child process of a fork.
    fn free(key: Key) -> Answer;

    /// Records any event, including these two.
    fn record(event: &EventKind) -> Answer;

    /// Returns the id of a stack.
    fn number_stack(addresses: &[usize]) -> StackId;

    /// Returns an id for the file that contains the code before this return address. It is recorded instead of a stack.
    fn number_file(_: usize) -> StackId {
        StackId::NONE
    }

    /// Returns the addresses of the stack with this id.
    fn addresses(stack: StackId) -> Arc<[usize]>;

    /// Returns the live memory on a device.
    fn live(_: Device) -> LiveMemory {
        LiveMemory::default()
    }

    /// Returns the bytes that the driver maps for the live blocks of a device in addition to their sizes. `None` if there are too many
    /// blocks.
    fn rounding(_: Device) -> Option<u64> {
        Some(0)
    }
}

/// The live memory on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct LiveMemory {
    /// The bytes of each kind, in the order of [`MemKind::ALL`].
    pub kinds: [u64; MemKind::ALL.len()],
    /// The number of allocations and frees so far.
    pub events: u64,
}

/// Labels the block with this key. The address is only for the text of the error.
pub type LabelBlock = fn(Key, &Label, u64) -> Result<()>;

static LABEL: OnceCell<LabelBlock> = OnceCell::new();

/// Sets the function that labels the blocks of simulated devices. Only the first call has an effect.
pub fn label_with(label: LabelBlock) {
    let _ = LABEL.set(label);
}

/// Labels a block.
#[cfg(any(feature = "sim", feature = "cuda"))]
pub(super) fn label(key: Key, label: &Label, address: u64) -> Result<()> {
    match LABEL.get() {
        Some(with) => with(key, label, address),
        None => Err(crate::error::Kind::UnknownBlock { address, why: None }.into()),
    }
}

static BEFORE_ALLOCATIONS: OnceCell<fn()> = OnceCell::new();

/// Sets a function that is called on each thread before its first allocation is recorded, and before many later ones. The thread holds no
/// gpumem lock during the call. Only the first call of this function has an effect.
pub fn call_before_allocations(function: fn()) {
    let _ = BEFORE_ALLOCATIONS.set(function);
}

/// Calls that function, because an allocation is about to be recorded.
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
    /// Starts to send the calls that a source intercepts to the type.
    #[cfg(feature = "cuda")]
    pub(super) subscribe: fn(Source) -> Result<()>,
    #[cfg(feature = "cuda")]
    pub(super) live: fn(Device) -> LiveMemory,
    #[cfg(feature = "cuda")]
    pub(super) rounding: fn(Device) -> Option<u64>,
}

/// The receiver, which is set when the session starts. Until then, an event costs one load.
static RECORDER: OnceCell<EventRecorder> = OnceCell::new();

/// Sets the receiver. Only the first call has an effect, because a process has one session and one type that receives events.
pub(super) fn set(recorder: EventRecorder) {
    let _ = RECORDER.set(recorder);
}

/// Returns the receiver, or `None` before the session starts.
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

/// See [`RecordEvents::live`].
#[cfg(feature = "cuda")]
pub(super) fn live(device: Device) -> LiveMemory {
    RECORDER.get().map_or_else(LiveMemory::default, |recorder| (recorder.live)(device))
}

/// See [`RecordEvents::rounding`].
#[cfg(feature = "cuda")]
pub(super) fn rounding(device: Device) -> Option<u64> {
    RECORDER.get().and_then(|recorder| (recorder.rounding)(device))
}
