//! The receiver of decoded calls.

use std::marker::PhantomData;

use super::{
    call::{Call, Caller, IdKind},
    thread_state::as_observer_cold,
};

/// Receives each call on the thread that makes it, unless that thread is already in an observer ([`as_observer`]).
///
/// An observer is a type instead of a value, so that the compiler can inline these functions into each hook. A hook is then one function
/// without calls. This matters because a hook is rarely in the instruction cache when the program calls it.
///
/// [`as_observer`]: super::as_observer
pub(crate) trait Observe: 'static {
    /// Receives [`Call::Pooled`] without a pool. An observer that needs [`as_observer`](super::as_observer) must call it itself. It must
    /// not panic, because the panic would not be caught.
    fn pooled(caller: &Caller, address: u64, bytes: u64, stream: u64) {
        Self::other(caller, &Call::Pooled { address, bytes, stream, pool: None });
    }

    /// Receives [`Call::Freeing`] of an address, under the same rules as [`pooled`](Self::pooled).
    fn freeing(caller: &Caller, address: u64) {
        Self::other(caller, &Call::Freeing { id_kind: IdKind::Address, id: address });
    }

    /// Receives every other call, inside [`as_observer`](super::as_observer).
    fn other(caller: &Caller, call: &Call);
}

/// Passes the calls of one caller to an observer, and catches the observer's panics.
pub(in crate::sys) struct CallRecorder<O> {
    caller: Caller,
    observer: PhantomData<O>,
}

impl<O: Observe> CallRecorder<O> {
    pub(in crate::sys) const fn new(caller: Caller) -> Self {
        Self { caller, observer: PhantomData }
    }

    #[inline(never)]
    pub(in crate::sys) fn record(&self, call: &Call) {
        as_observer_cold(|| O::other(&self.caller, call));
    }

    #[allow(clippy::inline_always, reason = "one function per hook uses fewer lines of the instruction cache")]
    #[inline(always)]
    pub(in crate::sys) fn pooled(&self, address: u64, bytes: u64, stream: u64) {
        O::pooled(&self.caller, address, bytes, stream);
    }

    #[allow(clippy::inline_always, reason = "one function per hook uses fewer lines of the instruction cache")]
    #[inline(always)]
    pub(in crate::sys) fn freeing(&self, address: u64) {
        O::freeing(&self.caller, address);
    }
}

/// Passes each call to an observer as [`Call::Uncounted`], because the observer made the call itself.
pub(in crate::sys) struct Uncounted<O>(PhantomData<O>);

impl<O: Observe> Observe for Uncounted<O> {
    fn pooled(caller: &Caller, _: u64, _: u64, _: u64) {
        as_observer_cold(|| O::other(caller, &Call::Uncounted));
    }

    fn freeing(caller: &Caller, _: u64) {
        as_observer_cold(|| O::other(caller, &Call::Uncounted));
    }

    fn other(caller: &Caller, _: &Call) {
        O::other(caller, &Call::Uncounted);
    }
}
