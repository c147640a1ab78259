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
    /// Receives [`Call::Pooled`] without a pool. The observer itself must call [`as_observer`](super::as_observer). It must not panic,
    /// because the panic would not be caught.
    fn pooled(caller: &Caller, address: u64, bytes: u64, stream: u64);

    /// Receives [`Call::Freeing`] of an address, under the same rules as [`pooled`](Self::pooled).
    fn freeing(caller: &Caller, address: u64);

    /// Receives every other call, inside [`as_observer`](super::as_observer).
    fn other(caller: &Caller, call: &Call);
}

/// Receives decoded calls.
pub(in crate::sys) trait RecordCall {
    fn record(&self, call: &Call);

    /// Records [`Call::Pooled`] without a pool.
    #[inline]
    fn pooled(&self, address: u64, bytes: u64, stream: u64) {
        self.record(&Call::Pooled { address, bytes, stream, pool: None });
    }

    /// Records [`Call::Freeing`] of an address.
    #[inline]
    fn freeing(&self, address: u64) {
        self.record(&Call::Freeing { id_kind: IdKind::Address, id: address });
    }
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

    /// Returns a recorder that records each call as [`Call::Uncounted`]: the observer made it itself.
    pub(in crate::sys) const fn as_uncounted(&self) -> impl RecordCall {
        AsUncounted(self)
    }
}

struct AsUncounted<'a, O>(&'a CallRecorder<O>);

impl<O: Observe> RecordCall for AsUncounted<'_, O> {
    fn record(&self, _: &Call) {
        self.0.record(&Call::Uncounted);
    }
}

impl<O: Observe> RecordCall for CallRecorder<O> {
    #[inline(never)]
    fn record(&self, call: &Call) {
        as_observer_cold(|| O::other(&self.caller, call));
    }

    #[allow(clippy::inline_always, reason = "one function per hook uses fewer lines of the instruction cache")]
    #[inline(always)]
    fn pooled(&self, address: u64, bytes: u64, stream: u64) {
        O::pooled(&self.caller, address, bytes, stream);
    }

    #[allow(clippy::inline_always, reason = "one function per hook uses fewer lines of the instruction cache")]
    #[inline(always)]
    fn freeing(&self, address: u64) {
        O::freeing(&self.caller, address);
    }
}
