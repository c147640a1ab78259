//! The most between two collections, for each collector: what one has got is still there for the others.

use std::collections::HashMap;

/// A peak that several collectors ask for.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The most since the start, as far as it was noted here.
    highest: u64,
    collectors: HashMap<u32, Window>,
}

#[derive(Debug, Default)]
struct Window {
    /// The most since its last collection.
    since: u64,
    /// The most that was handed over, and that may not have arrived.
    unconfirmed: u64,
}

impl Windows {
    /// So much was in use at most since the last call.
    pub(super) fn note(&mut self, recent: u64) {
        self.highest = self.highest.max(recent);
        for window in self.collectors.values_mut() {
            window.since = window.since.max(recent);
        }
    }

    /// The most since this collector has collected, or since the start if it has not. `level` is what is in use now.
    pub(super) fn collect(&mut self, collector: u32, level: u64) -> u64 {
        let highest = self.highest;
        let window = self.collectors.entry(collector).or_insert(Window { since: highest, unconfirmed: 0 });
        window.unconfirmed = window.unconfirmed.max(window.since);
        window.since = level;
        window.unconfirmed
    }

    /// What this collector has collected has arrived.
    pub(super) fn confirm(&mut self, collector: u32) {
        if let Some(window) = self.collectors.get_mut(&collector) {
            window.unconfirmed = 0;
        }
    }

    /// This collector does not collect any more.
    pub(super) fn forget(&mut self, collector: u32) {
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
        // One that comes later gets what was before.
        assert_eq!(windows.collect(1, 10), 70);
        windows.confirm(1);
        windows.note(50);
        assert_eq!((windows.collect(1, 10), windows.collect(2, 10)), (50, 70));
        windows.confirm(1);
        windows.confirm(2);
        windows.note(30);
        assert_eq!(windows.collect(1, 20), 30);
        windows.confirm(1);
        // Nothing has happened, and the level is the most.
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
