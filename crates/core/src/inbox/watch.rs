//! Tells budgets about the allocations and frees of other threads.

use std::sync::Arc;

use super::{Inbox, Lock, Primitives, Tap, run_rare, watches::Watch};
use crate::{
    ledger::{Noticed, Noticing},
    model::Device,
};

impl<T: Tap, P: Primitives> Inbox<T, P> {
    /// Tells `watch` about these allocations and frees on the device, until [`unwatch`](Self::unwatch) is called with the id that
    /// this returns.
    pub fn watch(&self, device: Device, noticing: Noticing, watch: Arc<dyn Watch>) -> u64 {
        // A thread that does not exist in the child of a fork may hold the lock there.
        if P::is_forked() {
            return 0;
        }
        let id = {
            let mut watches = self.watches.lock();
            watches.last += 1;
            let id = watches.last;
            watches.all.push((id, watch));
            id
        };
        self.enter(0, |state, thread| state.ledger.watch(id, device, noticing, thread));
        id
    }

    /// Ends the [`watch`](Self::watch) with this id.
    pub fn unwatch(&self, id: u64) {
        if P::is_forked() {
            return;
        }
        self.enter(0, |state, _| state.ledger.unwatch(id));
        self.watches.lock().all.retain(|(known, _)| *known != id);
    }

    /// Tells the watches what this thread did.
    #[cold]
    pub(super) fn notify(&self, noticed: &Noticed) {
        // An allocator that allocates GPU memory must not recurse into this.
        let is_inside = |inside| P::with_thread(|thread| thread.set_inside(inside));
        is_inside(true);
        run_rare::<P, _>(|| {
            let watches: Vec<_> = self.watches.lock().all.iter().map(|(_, watch)| Arc::clone(watch)).collect();
            for watch in watches {
                watch.notice(noticed);
            }
        });
        is_inside(false);
    }
}
