//! The pools of a session, by id.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::{Device, PoolId};

/// The pools of a session, by id; the first one has id 1.
#[derive(Default)]
pub(in crate::session) struct PoolTable(Mutex<Vec<NamedPool>>);

pub(super) struct NamedPool {
    pub(super) name: String,
    pub(super) device: Device,
    pub(super) is_closed: bool,
}

impl PoolTable {
    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<NamedPool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the pool as closed, so that another pool can reuse the id.
    pub(super) fn close(&self, id: PoolId) {
        if let Some(pool) = self.lock().get_mut(usize::from(id.0).wrapping_sub(1)) {
            pool.is_closed = true;
        }
    }

    /// Returns whether the program has registered no pool.
    pub(in crate::session) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Returns the name of a pool, which is unique on its device.
    pub(in crate::session) fn name(&self, id: PoolId) -> String {
        let at = usize::from(id.0).wrapping_sub(1);
        self.lock().get(at).map(|pool| pool.name.clone()).unwrap_or_default()
    }
}
