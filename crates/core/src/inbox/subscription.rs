//! Tracks whether allocations are intercepted. One thread may start or stop interception while another one opens a scope.

use super::{Counter, Lock, Primitives, Std};

/// The state of the interception of allocations. `E` is the reason why they are not intercepted.
pub struct Subscription<E, P: Primitives = Std> {
    /// The state is locked while a thread starts or stops interception, so that the last request decides.
    state: P::Lock<SubscriptionState<E>>,
    /// The number of times that interception was stopped.
    interruptions: P::Counter,
}

#[derive(Debug)]
struct SubscriptionState<E> {
    /// True if interception was stopped on request. Interception then does not restart automatically.
    is_stopped: bool,
    /// The reason why the last attempt to start failed.
    error: Option<E>,
}

impl<E: Clone, P: Primitives> Default for Subscription<E, P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E: Clone, P: Primitives> Subscription<E, P> {
    /// Creates the state in which allocations are not intercepted, and nothing was tried.
    pub fn new() -> Self {
        let state = SubscriptionState { is_stopped: false, error: None };
        Self { state: P::Lock::new(state), interruptions: P::Counter::new(0) }
    }

    /// Starts interception by `subscribe`. If it was stopped, this fails with the error `stopped`, unless `again` is true.
    ///
    /// # Errors
    /// Returns `stopped`, or the error of `subscribe`.
    pub fn start<T>(
        &self,
        again: bool,
        stopped: impl FnOnce() -> E,
        subscribe: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut state = self.lock();
        state.is_stopped &= !again;
        if state.is_stopped {
            return Err(stopped());
        }
        let subscribed = subscribe();
        state.error = subscribed.as_ref().err().cloned();
        subscribed
    }

    /// Stops interception until it is started again. If allocations are being intercepted, `report_loss` records that events will
    /// be lost, and then `unsubscribe` is called. In this order, a trace that is read in between and has missed events reports
    /// the loss.
    pub fn stop(&self, is_live: impl FnOnce() -> bool, report_loss: impl FnOnce(), unsubscribe: impl FnOnce()) {
        let mut state = self.lock();
        state.is_stopped = true;
        if is_live() {
            self.interruptions.add(1);
            report_loss();
            unsubscribe();
        }
    }

    /// Returns the number of times that interception was stopped. A scope compares this number before interception starts and
    /// after the scope is open. If it has changed, the scope may have opened after `report_loss`, so the loss must be recorded
    /// again.
    pub fn interruptions(&self) -> u64 {
        self.interruptions.get()
    }

    /// Returns the reason why allocations are not intercepted. `None` if they are, or if interception was neither tried
    /// nor stopped.
    pub fn why_not(&self, stopped: impl FnOnce() -> E) -> Option<E> {
        let state = self.lock();
        if state.is_stopped { Some(stopped()) } else { state.error.clone() }
    }

    fn lock(&self) -> <P::Lock<SubscriptionState<E>> as Lock<SubscriptionState<E>>>::Guard<'_> {
        self.state.lock()
    }
}
