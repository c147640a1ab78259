//! The watches that are told about noticed events.

use std::{panic::RefUnwindSafe, sync::Arc};

use crate::ledger::Noticed;

/// A watch that is told about noticed events on a device.
pub trait Watch: Send + Sync + RefUnwindSafe {
    /// The calling thread has just allocated or freed. The thread is not in the inbox and must not enter it: events that it
    /// records during this call are lost. This may be called for more events than the watch requested, because several may watch
    /// one device.
    fn notice(&self, noticed: &Noticed);
}

/// All watches.
#[derive(Default)]
pub(super) struct Watches {
    pub(super) last: u64,
    pub(super) all: Vec<(u64, Arc<dyn Watch>)>,
}
