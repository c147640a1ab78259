//! Connects the sources of the process with its session.

use std::sync::Arc;

use crate::{
    model::{Answer, Bytes, Device, EventKind, Key, MemKind, StackId, Tag},
    session::{SESSION, events::labels::label_block, of_process, output::oom},
    settings::Settings,
    source::{self, LiveMemory, RecordEvents},
};

/// Makes the sources record into the session of the process, with the stacks that these settings request.
pub(in crate::session) fn record(settings: &Settings) {
    source::record_to::<ToSession>(settings);
    source::handle_rejections(source::RejectionHandler { rejected, obtained });
    source::label_with(label_block);
}

fn rejected(device: Option<Device>, bytes: Bytes, kind: MemKind) {
    oom::rejected(of_process(), device, bytes, kind);
}

fn obtained(device: Device, bytes: Bytes) {
    oom::obtained(of_process(), device, bytes);
}

/// Records the events of the sources into the session.
struct ToSession;

impl RecordEvents for ToSession {
    #[allow(clippy::inline_always, reason = "a hook is one function, which takes fewer lines of the instruction cache")]
    #[inline(always)]
    fn alloc(key: Key, bytes: Bytes, tag: Tag) {
        if let Some(session) = SESSION.get() {
            session.inbox.alloc(key, bytes, tag);
        }
    }

    #[allow(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn free(key: Key) -> Answer {
        let Some(session) = SESSION.get() else { return Answer::Applied };
        session.inbox.free(key)
    }

    fn record(event: &EventKind) -> Answer {
        of_process().inbox.post(event)
    }

    fn number_stack(addresses: &[usize]) -> StackId {
        of_process().number_stack(addresses)
    }

    #[cfg(feature = "capture")]
    fn number_file(address: usize) -> StackId {
        of_process().number_file(address)
    }

    fn addresses(stack: StackId) -> Arc<[usize]> {
        of_process().stacks.get(stack)
    }

    fn live(device: Device) -> LiveMemory {
        let (kinds, events) = of_process().inbox.live_kinds(device);
        LiveMemory { kinds, events }
    }

    fn rounding(device: Device) -> Option<u64> {
        of_process().inbox.rounding(device)
    }
}
