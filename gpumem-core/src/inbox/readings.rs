//! Records readings of a device in the order in which they are made. Otherwise an old reading could replace a newer one.

use std::collections::HashMap;

use super::{Inbox, Lock, Primitives, Std, Tap};
use crate::model::{Device, EventKind, Family, Trace};

/// A lock for each device, locked until a reading is recorded. If a device does not answer, only threads that read the same
/// device wait. (Ordinals that differ by 16 share a lock.)
///
/// The function of a gauge of the program may wait for a thread that waits for a trace. So no lock is held while it runs, and a reading is
/// left out if one that began later is recorded already.
pub struct Readings<P: Primitives = Std> {
    devices: [P::Lock<()>; 16],
    custom: P::Lock<CustomReadings>,
}

/// The readings of all gauges of the program, numbered when they begin.
#[derive(Debug, Default)]
struct CustomReadings {
    begun: u64,
    /// The number of the newest recorded reading of each gauge.
    recorded: HashMap<Device, u64>,
}

impl<P: Primitives> Default for Readings<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Primitives> Readings<P> {
    /// Makes the locks. No reading is in progress.
    pub fn new() -> Self {
        let devices = std::array::from_fn(|_| P::Lock::new(()));
        Self { devices, custom: P::Lock::new(CustomReadings::default()) }
    }

    /// Reads a device and records the reading.
    pub fn post(&self, inbox: &Inbox<impl Tap, P>, device: Device, read: impl FnOnce() -> EventKind) {
        if device.family == Family::Custom {
            return self.newest(device, read, |reading| {
                reading.map(|reading| inbox.post(&reading));
            });
        }
        let _reading = self.lock(device);
        inbox.post(&read());
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
        if device.family == Family::Custom {
            return self.newest(device, read, |reading| Ok(inbox.ask(reading.transpose()?.as_ref(), query)));
        }
        let _reading = self.lock(device);
        Ok(inbox.ask(Some(&read()?), query))
    }

    /// Reads without a lock, then calls `record` with the reading, unless it is not the newest.
    fn newest<R, T>(&self, device: Device, read: impl FnOnce() -> R, record: impl FnOnce(Option<R>) -> T) -> T {
        let number = {
            let mut readings = self.custom.lock();
            readings.begun += 1;
            readings.begun
        };
        let reading = read();
        let mut readings = self.custom.lock();
        let recorded = readings.recorded.entry(device).or_default();
        if *recorded > number {
            return record(None);
        }
        *recorded = number;
        record(Some(reading))
    }

    fn lock(&self, device: Device) -> <P::Lock<()> as Lock<()>>::Guard<'_> {
        self.devices[device.ordinal as usize % self.devices.len()].lock()
    }
}
