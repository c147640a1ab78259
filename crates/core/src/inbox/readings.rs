//! Records readings of a device in the order in which they are made. Otherwise an old reading could replace a newer one.

use std::collections::HashMap;

use super::{Inbox, Lock, Primitives, Std, Tap};
use crate::model::{Device, EventKind, Trace};

/// The readings of all devices. No lock is held during a reading: the library may be slow, and the function of a gauge of the
/// program may wait for a thread that waits for a trace. A reading is left out if a reading that started later is already
/// recorded.
pub struct Readings<P: Primitives = Std>(P::Lock<Numbered>);

/// The readings, numbered when they start.
#[derive(Debug, Default)]
struct Numbered {
    started: u64,
    /// The number of the latest recorded reading of each device.
    recorded: HashMap<Device, u64>,
}

impl<P: Primitives> Default for Readings<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Primitives> Readings<P> {
    /// Creates the state without readings in progress.
    pub fn new() -> Self {
        Self(P::Lock::new(Numbered::default()))
    }

    /// Reads a device and records the reading.
    pub fn post(&self, inbox: &Inbox<impl Tap, P>, device: Device, read: impl FnOnce() -> EventKind) {
        self.read_in_order(device, read, |reading| {
            reading.map(|reading| inbox.post(&reading));
        });
    }

    /// Reads a device and records the reading, then a query of a scope or its opening.
    ///
    /// # Errors
    /// Returns the error of the read.
    pub fn ask<E>(
        &self,
        inbox: &Inbox<impl Tap, P>,
        device: Device,
        read: impl FnOnce() -> Result<EventKind, E>,
        query: &EventKind,
    ) -> Result<Option<Trace>, E> {
        self.read_in_order(device, read, |reading| Ok(inbox.ask(reading.transpose()?.as_ref(), query)))
    }

    /// Reads without a lock, then calls `record` with the reading, or without it if a later reading is already recorded.
    fn read_in_order<R, T>(&self, device: Device, read: impl FnOnce() -> R, record: impl FnOnce(Option<R>) -> T) -> T {
        let number = {
            let mut readings = self.0.lock();
            readings.started += 1;
            readings.started
        };
        let reading = read();
        let mut readings = self.0.lock();
        let recorded = readings.recorded.entry(device).or_default();
        if *recorded > number {
            return record(None);
        }
        *recorded = number;
        record(Some(reading))
    }
}
