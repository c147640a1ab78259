//! Readings of devices are folded in the order in which they are made: an older one after a newer one would bring back what was in
//! use before.

use super::{Inbox, Lock, Primitives, Std, Tap};
use crate::model::{Device, EventKind, Trace};

/// Locked from the reading to the fold. A device that does not answer keeps only those waiting that would ask it too.
pub struct Readings<P: Primitives = Std>([P::Lock<()>; 16]);

impl<P: Primitives> Default for Readings<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Primitives> Readings<P> {
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| P::Lock::new(())))
    }

    /// Reads a device, for whatever is open on it.
    pub fn post(&self, inbox: &Inbox<impl Tap, P>, device: Device, read: impl FnOnce() -> EventKind) {
        let _reading = self.lock(device);
        inbox.post(&read());
    }

    /// Reads a device and asks a scope a query, or opens it.
    pub fn ask<E>(
        &self,
        inbox: &Inbox<impl Tap, P>,
        device: Device,
        read: impl FnOnce() -> Result<EventKind, E>,
        query: &EventKind,
    ) -> Result<Option<Trace>, E> {
        let _reading = self.lock(device);
        Ok(inbox.ask(Some(&read()?), query))
    }

    fn lock(&self, device: Device) -> <P::Lock<()> as Lock<()>>::Guard<'_> {
        self.0[device.ordinal as usize % self.0.len()].lock()
    }
}
