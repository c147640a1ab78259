//! Readings of devices are folded in the order in which they are made: an older one after a newer one would bring back what was in
//! use before.

use super::{
    Inbox,
    sync::{Patient, PatientGuard, PoisonError},
};
use crate::model::{Device, EventKind, Trace};

/// Locked from the reading to the fold. A device that does not answer keeps only those waiting that would ask it too.
#[derive(Debug)]
pub(super) struct Readings([Patient<()>; 16]);

impl Readings {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| Patient::new(())))
    }

    /// Reads a device, for whatever is open on it.
    pub(super) fn post(&self, inbox: &Inbox, device: Device, read: impl FnOnce() -> EventKind) {
        let _reading = self.lock(device);
        inbox.post(&read());
    }

    /// Reads a device and asks a scope a question, or opens it.
    pub(super) fn ask<E>(
        &self,
        inbox: &Inbox,
        device: Device,
        read: impl FnOnce() -> Result<EventKind, E>,
        question: &EventKind,
    ) -> Result<Option<Trace>, E> {
        let _reading = self.lock(device);
        Ok(inbox.ask(Some(&read()?), question))
    }

    fn lock(&self, device: Device) -> PatientGuard<'_, ()> {
        self.0[device.ordinal as usize % self.0.len()].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
