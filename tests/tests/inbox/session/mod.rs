//! The library's inbox, with `sync.rs` as it is here.

#[path = "../../../../gpumem/src/session/inbox.rs"]
mod inbox;
mod sync;

pub(crate) use self::{
    inbox::Inbox,
    sync::{interrupt_with, set_lends_again, set_patient},
};
use crate::{
    ledger::{Counts, DeviceStats},
    model::ThreadId,
};

pub(crate) fn this_thread(inbox: &Inbox) -> ThreadId {
    inbox.this_thread()
}

pub(crate) fn counts(inbox: &Inbox) -> Counts {
    inbox.counts()
}

pub(crate) fn stats(inbox: &Inbox) -> Vec<DeviceStats> {
    inbox.stats()
}
