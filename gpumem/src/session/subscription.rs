//! Whether allocations are intercepted. Threads begin it and give it up while others open scopes.

use super::sync::{AtomicU64, Patient, PatientGuard, PoisonError, SeqCst};

/// `E` is why allocations are not intercepted.
#[derive(Debug)]
pub(super) struct Subscription<E> {
    /// Held while somebody begins or gives up: what was wanted last is then what is.
    state: Patient<State<E>>,
    /// How often it was given up.
    interruptions: AtomicU64,
}

#[derive(Debug)]
struct State<E> {
    is_given_up: bool,
    /// Why the newest attempt failed.
    refused: Option<E>,
}

impl<E: Clone> Subscription<E> {
    pub(super) fn new() -> Self {
        let state = State { is_given_up: false, refused: None };
        Self { state: Patient::new(state), interruptions: AtomicU64::new(0) }
    }

    /// Begins, unless it was given up; `anew` also then. `given_up` is the error in the first case.
    pub(super) fn begin<T>(
        &self,
        anew: bool,
        given_up: impl FnOnce() -> E,
        subscribe: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut state = self.lock();
        state.is_given_up &= !anew;
        if state.is_given_up {
            return Err(given_up());
        }
        let subscribed = subscribe();
        state.refused = subscribed.as_ref().err().cloned();
        subscribed
    }

    /// Gives up, until it is begun anew. If something is intercepted, `tell` says that events will be lost, before `unsubscribe`: so
    /// no trace is read in between that missed something and was not told.
    pub(super) fn give_up(&self, is_live: impl FnOnce() -> bool, tell: impl FnOnce(), unsubscribe: impl FnOnce()) {
        let mut state = self.lock();
        state.is_given_up = true;
        if is_live() {
            self.interruptions.fetch_add(1, SeqCst);
            tell();
            unsubscribe();
        }
    }

    /// How often it was given up so far. Who reads this before it begins, and another number after it is open, was perhaps opened
    /// after `tell`.
    pub(super) fn interruptions(&self) -> u64 {
        self.interruptions.load(SeqCst)
    }

    /// Why nothing is intercepted, if it was tried or given up.
    pub(super) fn why_not(&self, given_up: impl FnOnce() -> E) -> Option<E> {
        let state = self.lock();
        if state.is_given_up { Some(given_up()) } else { state.refused.clone() }
    }

    fn lock(&self) -> PatientGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
