//! Records the streams on which threads allocate and free. A thread records its stream only when it changes.

use std::{
    cell::Cell,
    sync::atomic::{
        AtomicBool,
        Ordering::{Relaxed, SeqCst},
    },
    thread::LocalKey,
};

use super::{
    super::recorder::record,
    state::{CU_STREAM_LEGACY, GENERATION, state},
};
use crate::model::EventKind;

/// The stream that a thread recorded last. It is recorded again after [`GENERATION`] has changed: another stream may have the handle now,
/// or a recording may have started.
#[derive(Clone, Copy)]
struct RecordedStream {
    handle: u64,
    /// 0 if there is no stream.
    generation: u32,
}

/// True if this process has been recorded. Without a recording, a free does not look up its stream, which would take 15 ns.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static ALLOCATES_ON: Cell<RecordedStream> =
        const { Cell::new(RecordedStream { handle: 0, generation: 0 }) };
    static FREES_ON: Cell<RecordedStream> =
        const { Cell::new(RecordedStream { handle: 0, generation: 0 }) };
}

impl RecordedStream {
    #[inline]
    fn is(self, stream: u64) -> bool {
        self.handle == stream && self.generation == GENERATION.load(Relaxed)
    }
}

pub(super) fn allocates_on(stream: u64) {
    record_stream(&ALLOCATES_ON, false, stream);
}

/// Returns whether [`frees_on`] has something to record.
#[inline]
pub(super) fn is_new_for_frees(stream: u64) -> bool {
    IS_RECORDED.load(Relaxed) && !FREES_ON.get().is(stream)
}

pub(super) fn frees_on(stream: u64) {
    record_stream(&FREES_ON, true, stream);
}

fn record_stream(recorded: &'static LocalKey<Cell<RecordedStream>>, frees: bool, stream: u64) {
    if !IS_RECORDED.load(Relaxed) || recorded.get().is(stream) {
        return;
    }
    // The generation is read first: if it changes before the stream is recorded, the stream is recorded again.
    let generation = GENERATION.load(SeqCst);
    let number = if matches!(stream, 0 | CU_STREAM_LEGACY) { 0 } else { state().number_of_stream(stream) };
    record(&EventKind::OnStream { frees, stream: number });
    recorded.set(RecordedStream { handle: stream, generation });
}

/// Makes each thread record its streams again, because a recording starts.
pub(in crate::source) fn record_streams_again() {
    IS_RECORDED.store(true, SeqCst);
    GENERATION.fetch_add(1, SeqCst);
}
