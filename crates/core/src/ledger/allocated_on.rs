//! The devices on which a thread or a task allocated.

/// The devices, by meter, each with the number of the last event at which an allocation there was noted.
#[derive(Debug, Default)]
pub(super) struct AllocatedOn(Vec<(u16, u64)>);

impl AllocatedOn {
    /// Notes an allocation on the device of this meter.
    pub(super) fn note(&mut self, meter: u16, number: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == meter) {
            Some((_, latest)) => *latest = number,
            None => self.0.push((meter, number)),
        }
    }

    /// Returns the meter of the device that was last allocated on since the event with this number, if nothing was allocated on
    /// the device of `meter` since then. Only looked-up allocations are noted, so the lookup must have been forced at that event.
    pub(super) fn other_than(&self, meter: u16, since: u64) -> Option<u16> {
        let on = || self.0.iter().filter(|(_, number)| *number > since);
        if on().any(|(known, _)| *known == meter) {
            return None;
        }
        on().max_by_key(|(_, number)| *number).map(|(other, _)| *other)
    }
}
