//! Whether allocations are intercepted. Threads begin it and give it up while others open scopes.

use super::{Counter, Lock, Primitives, Std};

/// `E` is why allocations are not intercepted.
pub struct Subscription<E, P: Primitives = Std> {
    /// Held while somebody begins or gives up: what was wanted last is then what is.
    state: P::Lock<State<E>>,
    /// How often it was given up.
    interruptions: P::Counter,
}

#[derive(Debug)]
struct State<E> {
    is_given_up: bool,
    /// Why the newest attempt failed.
    refused: Option<E>,
}

impl<E: Clone, P: Primitives> Default for Subscription<E, P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E: Clone, P: Primitives> Subscription<E, P> {
    pub fn new() -> Self {
        let state = State { is_given_up: false, refused: None };
        Self { state: P::Lock::new(state), interruptions: P::Counter::new(0) }
    }

    /// Begins, unless it was given up; `anew` also then. `given_up` is the error in the first case.
    pub fn begin<T>(
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
    pub fn give_up(&self, is_live: impl FnOnce() -> bool, tell: impl FnOnce(), unsubscribe: impl FnOnce()) {
        let mut state = self.lock();
        state.is_given_up = true;
        if is_live() {
            self.interruptions.add(1);
            tell();
            unsubscribe();
        }
    }

    /// How often it was given up so far. Who reads this before it begins, and another number after it is open, was perhaps opened
    /// after `tell`.
    pub fn interruptions(&self) -> u64 {
        self.interruptions.get()
    }

    /// Why nothing is intercepted, if it was tried or given up.
    pub fn why_not(&self, given_up: impl FnOnce() -> E) -> Option<E> {
        let state = self.lock();
        if state.is_given_up { Some(given_up()) } else { state.refused.clone() }
    }

    fn lock(&self) -> <P::Lock<State<E>> as Lock<State<E>>>::Guard<'_> {
        self.state.lock()
    }
}
