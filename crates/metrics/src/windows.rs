//! Keeps the highest value between two collections, separately for each collector, so that a collection by one does not reset the value of
//! another.

use std::collections::HashMap;

/// A peak that several collectors ask for.
#[derive(Debug, Default)]
pub struct Windows {
    /// The highest value noted so far.
    highest: u64,
    collectors: HashMap<u32, Window>,
}

#[derive(Debug, Default)]
struct Window {
    /// The highest value since the last collection of this collector.
    since: u64,
    /// The highest value that was handed to the collector, and that may not have arrived yet.
    unconfirmed: u64,
}

impl Windows {
    /// Notes the highest value since the last call.
    pub fn note(&mut self, recent: u64) {
        self.highest = self.highest.max(recent);
        for window in self.collectors.values_mut() {
            window.since = window.since.max(recent);
        }
    }

    /// Returns the highest value noted so far.
    pub fn highest(&self) -> u64 {
        self.highest
    }

    /// Returns the highest value since this collector collected last, or since the start. `level` is the memory in use now.
    pub fn collect(&mut self, collector: u32, level: u64) -> u64 {
        let highest = self.highest;
        let window = self.collectors.entry(collector).or_insert(Window { since: highest, unconfirmed: 0 });
        window.unconfirmed = window.unconfirmed.max(window.since);
        window.since = level;
        window.unconfirmed
    }

    /// Notes that the last collection of this collector has arrived.
    pub fn confirm(&mut self, collector: u32) {
        if let Some(window) = self.collectors.get_mut(&collector) {
            window.unconfirmed = 0;
        }
    }

    /// Removes a collector that will not collect again.
    pub fn forget(&mut self, collector: u32) {
        self.collectors.remove(&collector);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_collector_gets_each_peak_once() {
        let mut windows = Windows::default();
        windows.note(70);
        // A collector that joins late gets the earlier values, too.
        assert_eq!(windows.collect(1, 10), 70);
        windows.confirm(1);
        windows.note(50);
        assert_eq!((windows.collect(1, 10), windows.collect(2, 10)), (50, 70));
        windows.confirm(1);
        windows.confirm(2);
        windows.note(30);
        assert_eq!(windows.collect(1, 20), 30);
        windows.confirm(1);
        // Nothing has happened, so the level is the highest value.
        assert_eq!(windows.collect(1, 20), 20);
        assert_eq!(windows.collect(2, 20), 30);
    }

    #[test]
    fn what_has_not_arrived_is_handed_over_again() {
        let mut windows = Windows::default();
        windows.note(70);
        assert_eq!(windows.collect(1, 10), 70);
        windows.note(20);
        assert_eq!(windows.collect(1, 10), 70);
        windows.confirm(1);
        assert_eq!(windows.collect(1, 10), 10);
        windows.forget(1);
        assert_eq!(windows.collect(1, 10), 70);
    }
}
