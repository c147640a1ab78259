//! The library's inbox, with `sync.rs` as it is here.

#[path = "../../../../gpumem/src/session/inbox.rs"]
mod inbox;
#[path = "../../../../gpumem/src/session/readings.rs"]
mod readings;
#[path = "../../../../gpumem/src/session/subscription.rs"]
mod subscription;
mod sync;

pub(crate) use self::{
    inbox::Inbox,
    sync::{interrupt_with, set_lends_again, set_patient},
};
use crate::{
    ledger::{Counts, DeviceStats},
    model::{Device, EventKind, ThreadId, Trace},
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

/// As the session has it, around a driver that does as it is told.
pub(crate) struct Subscription(subscription::Subscription<&'static str>);

impl Subscription {
    pub(crate) fn new() -> Self {
        Self(subscription::Subscription::new())
    }

    pub(crate) fn begin(&self, anew: bool, subscribe: impl FnOnce()) -> bool {
        let subscribe = || {
            subscribe();
            Ok(())
        };
        self.0.begin(anew, || "given up", subscribe).is_ok()
    }

    pub(crate) fn give_up(&self, is_live: impl FnOnce() -> bool, tell: impl FnOnce(), unsubscribe: impl FnOnce()) {
        self.0.give_up(is_live, tell, unsubscribe);
    }

    pub(crate) fn interruptions(&self) -> u64 {
        self.0.interruptions()
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.0.why_not(|| "given up").is_some()
    }
}

pub(crate) struct Readings(readings::Readings);

impl Readings {
    pub(crate) fn new() -> Self {
        Self(readings::Readings::new())
    }

    pub(crate) fn post(&self, inbox: &Inbox, device: Device, read: impl FnOnce() -> EventKind) {
        self.0.post(inbox, device, read);
    }

    pub(crate) fn ask(
        &self,
        inbox: &Inbox,
        device: Device,
        read: impl FnOnce() -> EventKind,
        question: &EventKind,
    ) -> Option<Trace> {
        let Ok(trace) = self.0.ask::<std::convert::Infallible>(inbox, device, || Ok(read()), question);
        trace
    }
}
