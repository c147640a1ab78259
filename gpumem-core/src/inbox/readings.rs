//! Readings of a device are recorded in the order in which they are made. Otherwise an old reading could replace a newer
//! one.

use super::{Inbox, Lock, Primitives, Std, Tap};
use crate::model::{Device, EventKind, Trace};

/// A lock for each device, locked until a reading is recorded. If a device does not answer, only threads that read the same
/// device wait. (Ordinals that differ by 16 share a lock.)
pub struct Readings<P: Primitives = Std>([P::Lock<()>; 16]);

impl<P: Primitives> Default for Readings<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Primitives> Readings<P> {
    /// No reading is in progress.
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| P::Lock::new(())))
    }

    /// Reads a device and records the reading.
    pub fn post(&self, inbox: &Inbox<impl Tap, P>, device: Device, read: impl FnOnce() -> EventKind) {
        let _reading = self.lock(device);
        inbox.post(&read());
    }

    /// Reads a device and records the reading, then a query of a scope or its opening.
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
