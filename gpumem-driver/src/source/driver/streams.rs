//! The streams on which threads allocate and free, for recordings. A thread records a stream only when it changes.

use std::{
    cell::Cell,
    sync::atomic::Ordering::{Relaxed, SeqCst},
    thread::LocalKey,
};

use super::{
    super::recorder::record,
    state::{CU_STREAM_LEGACY, GENERATION, state},
};
use crate::model::EventKind;

/// The stream that a thread has recorded last. It is recorded again when [`GENERATION`] has changed: the handle may be another stream's,
/// or a recording may have begun.
#[derive(Clone, Copy)]
pub(super) struct RecordedStream {
    handle: u64,
    /// 0 if there is no stream.
    generation: u32,
}

thread_local! {
    pub(super) static ALLOCATES_ON: Cell<RecordedStream> =
        const { Cell::new(RecordedStream { handle: 0, generation: 0 }) };
    pub(super) static FREES_ON: Cell<RecordedStream> =
        const { Cell::new(RecordedStream { handle: 0, generation: 0 }) };
}

impl RecordedStream {
    #[inline]
    pub(super) fn is(self, stream: u64) -> bool {
        self.handle == stream && self.generation == GENERATION.load(Relaxed)
    }
}

pub(super) fn allocates_on(stream: u64) {
    record_stream(&ALLOCATES_ON, false, stream);
}

pub(super) fn frees_on(stream: u64) {
    record_stream(&FREES_ON, true, stream);
}

fn record_stream(recorded: &'static LocalKey<Cell<RecordedStream>>, frees: bool, stream: u64) {
    if recorded.get().is(stream) {
        return;
    }
    // First: if it changes meanwhile, the stream is recorded again.
    let generation = GENERATION.load(SeqCst);
    let number = if matches!(stream, 0 | CU_STREAM_LEGACY) { 0 } else { state().number_of_stream(stream) };
    record(&EventKind::OnStream { frees, stream: number });
    recorded.set(RecordedStream { handle: stream, generation });
}

/// A recording begins: each thread records its streams anew.
pub(in crate::source) fn record_streams_again() {
    GENERATION.fetch_add(1, SeqCst);
}
