//! What a budget is told of other threads.

use std::sync::Arc;

use super::{Inbox, Lock, Primitives, Tap, run_rare, watches::Watch};
use crate::{
    ledger::{Noticed, Noticing},
    model::Device,
};

impl<T: Tap, P: Primitives> Inbox<T, P> {
    /// From now on `watch` is told of these allocations and frees on the device, until [`unwatch`](Self::unwatch) with the
    /// number that this returns.
    pub fn watch(&self, device: Device, noticing: Noticing, watch: Arc<dyn Watch>) -> u64 {
        // In the child of a fork, a thread that does not exist there may hold the lock.
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

    /// Undoes [`watch`](Self::watch).
    pub fn unwatch(&self, id: u64) {
        if P::is_forked() {
            return;
        }
        self.enter(0, |state, _| state.ledger.unwatch(id));
        self.watches.lock().all.retain(|(known, _)| *known != id);
    }

    /// Tells those that watch what this thread did.
    #[cold]
    pub(super) fn tell(&self, noticed: &Noticed) {
        // An allocator that allocates GPU memory must not come here again.
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
