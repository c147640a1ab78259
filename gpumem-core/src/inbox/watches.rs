//! Who is told what is noticed.

use std::{panic::RefUnwindSafe, sync::Arc};

use crate::ledger::Noticed;

/// Is told what is noticed on a device.
pub trait Watch: Send + Sync + RefUnwindSafe {
    /// The calling thread has just allocated or freed. It is not in the inbox, and must not enter it: what it records
    /// meanwhile is lost. This may be called for more than the watch asked for, because several may watch one device.
    fn notice(&self, noticed: &Noticed);
}

/// Those that are told.
#[derive(Default)]
pub(super) struct Watches {
    pub(super) last: u64,
    pub(super) all: Vec<(u64, Arc<dyn Watch>)>,
}
