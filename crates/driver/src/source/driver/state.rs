//! The contexts, streams, pools, handles and captures that earlier calls have shown.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst},
    },
    thread::ThreadId,
};

use once_cell::sync::Lazy;

use super::{
    contexts::Contexts,
    handles::{Handles, Mapping},
};
use crate::model::Key;

/// The state of all intercepted calls. It is locked only for a look-up or a change, never while an event is recorded or the driver is
/// called.
#[derive(Debug, Default)]
pub(super) struct DriverState {
    pub(super) contexts: Contexts,
    /// The device of each stream.
    pub(super) streams: HashMap<u64, u32>,
    /// The device of each pool; `None` for a pool on the host.
    pub(super) pools: HashMap<u64, Option<u32>>,
    pub(super) handles: Handles,
    /// The mappings that each thread is about to remove.
    pub(super) unmapping: HashMap<ThreadId, Vec<Mapping>>,
    /// Imported memory, until it is freed.
    pub(super) imported: HashSet<Key>,
    /// The streams with a capture that has started and not ended.
    captures: Vec<u64>,
}

static STATE: Lazy<Mutex<DriverState>> = Lazy::new(Mutex::default);

/// Another handle of the default stream, next to 0.
pub(super) const CU_STREAM_LEGACY: u64 = 1;

/// A number that increases whenever cached data of threads about a stream or a context may have become invalid.
pub(super) static GENERATION: AtomicU32 = AtomicU32::new(1);

/// The number of captures that have not ended. It is changed before [`GENERATION`], so a thread that sees the new generation also sees the
/// new number of captures.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

pub(super) fn state() -> MutexGuard<'static, DriverState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether a stream is being captured, as far as the intercepted calls show.
pub(super) fn is_capture_active() -> bool {
    CAPTURES.load(SeqCst) > 0
}

/// Forgets streams and pools when a subscription starts. While nothing was intercepted, their handles may have been destroyed and reused.
pub(super) fn forget_handles() {
    let mut state = state();
    state.streams.clear();
    state.pools.clear();
    state.imported.clear();
    state.captures.clear();
    state.contexts.forget_unnumbered();
    CAPTURES.store(0, SeqCst);
    GENERATION.fetch_add(1, SeqCst);
}

impl DriverState {
    /// Forgets a destroyed stream, because another stream may get its handle.
    pub(super) fn stream_destroyed(&mut self, stream: u64) {
        // A capture of the stream ends with the stream.
        self.end_capture(stream);
        self.streams.remove(&stream);
        GENERATION.fetch_add(1, SeqCst);
    }

    pub(super) fn start_capture(&mut self, stream: u64) {
        self.captures.push(stream);
        CAPTURES.store(self.captures.len(), SeqCst);
        GENERATION.fetch_add(1, SeqCst);
    }

    /// Ends a capture of this stream. Returns whether one was active.
    pub(super) fn end_capture(&mut self, stream: u64) -> bool {
        let at = self.captures.iter().position(|captured| *captured == stream);
        at.map(|at| self.captures.swap_remove(at));
        CAPTURES.store(self.captures.len(), SeqCst);
        at.is_some()
    }
}
