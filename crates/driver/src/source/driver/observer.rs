//! The observer of driver calls: a fast path for stream-ordered allocations and frees, inlined into the hooks.

use std::{marker::PhantomData, sync::atomic::Ordering::Relaxed};

use super::{
    super::recorder::RecordEvents,
    blocks::record_unknown_free,
    events::{block_key, cuda_device},
    owners::LAST_STREAM,
    record::{record_call, record_pooled},
    state::GENERATION,
};
use crate::{
    model::{Answer, Bytes, MemKind, Tag},
    sys::calls::{self, Call, Caller, IdKind, Observe},
};

/// Sends the events of each call to `R`.
pub(super) struct Observer<R>(PhantomData<R>);

impl<R: RecordEvents> Observe for Observer<R> {
    #[allow(clippy::inline_always, reason = "one function per hook uses fewer lines of the instruction cache")]
    #[inline(always)]
    fn pooled(caller: &Caller, address: u64, bytes: u64, stream: u64) {
        let last = LAST_STREAM.get();
        if last.handle == stream && last.generation == GENERATION.load(Relaxed) {
            let tag = Tag::new(cuda_device(last.device), MemKind::Pool, 0, last.stacks.stack_for(bytes));
            R::alloc(block_key(IdKind::Address, address), Bytes::new(bytes), tag);
        } else {
            let caller = *caller;
            calls::as_observer_cold(move || record_pooled(&caller, address, bytes, stream, None));
        }
    }

    #[allow(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn freeing(_: &Caller, address: u64) {
        if R::free(block_key(IdKind::Address, address)) == Answer::Untracked {
            calls::as_observer_cold(move || record_unknown_free(IdKind::Address, address));
        }
    }

    fn other(caller: &Caller, call: &Call) {
        record_call(caller, call);
    }
}
