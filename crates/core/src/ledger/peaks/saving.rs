//! Decides when a group saves its bytes, and which saved bytes it keeps.

use super::{
    super::delta::Delta,
    PeakHistory, PeakRange,
    history::{GroupBytes, GroupHistory, Moment},
};

impl GroupHistory {
    /// Returns whether the group must be saved before it changes.
    #[inline]
    pub(in super::super) fn must_save(&self, peaks: &PeakHistory) -> bool {
        self.moment < peaks.latest
    }

    /// Saves the group, which has `bytes` and is about to change.
    #[inline]
    pub(super) fn save(&mut self, bytes: i64, peaks: &PeakHistory) {
        if self.must_save(peaks) {
            self.save_for(bytes, peaks);
        }
    }

    #[inline(never)]
    fn save_for(&mut self, bytes: i64, peaks: &PeakHistory) {
        if (self.moment >= peaks.oldest || self.earlier.is_some()) && !self.has_earlier_until(peaks.second) {
            self.keep_earlier(peaks);
        }
        (self.moment, self.bytes) = (peaks.latest, bytes);
    }

    /// Returns whether `earlier` contains the bytes of the group at this moment, and therefore those of all earlier moments.
    fn has_earlier_until(&self, moment: Moment) -> bool {
        let latest = self.earlier.as_ref().and_then(|earlier| earlier.last());
        moment > 0 && latest.is_some_and(|(latest, _)| *latest >= moment)
    }

    /// Moves the last saved bytes to `earlier`, if they are still needed. Removes bytes from `earlier` that are no longer needed.
    #[cold]
    fn keep_earlier(&mut self, peaks: &PeakHistory) {
        let earlier = self.earlier.get_or_insert_default();
        let before = |earlier: &[(Moment, i64)]| earlier.last().map_or(0, |(moment, _)| *moment);
        if peaks.has_moment(before(earlier), self.moment) {
            // Scopes that overlap and close in the order in which they opened leave unneeded items in the middle.
            if earlier.len() > 2 * peaks.moments() {
                let mut before = 0;
                earlier.retain(|(moment, _)| {
                    let after = std::mem::replace(&mut before, *moment);
                    peaks.has_moment(after, *moment)
                });
            }
            earlier.push((self.moment, self.bytes));
        } else {
            while let [older @ .., (moment, _)] = earlier.as_slice()
                && !peaks.has_moment(before(older), *moment)
            {
                earlier.pop();
            }
        }
        if earlier.is_empty() {
            self.earlier = None;
        }
    }

    /// Returns whether the group, which has nothing in use now, had memory in use at a needed moment.
    pub(in super::super) fn is_needed(&self, peaks: &PeakHistory) -> bool {
        let mut before = 0;
        let earlier = self.earlier.iter().flat_map(|earlier| earlier.iter().copied());
        earlier.chain([(self.moment, self.bytes)]).any(|(moment, bytes)| {
            let after = std::mem::replace(&mut before, moment);
            bytes != 0 && peaks.has_moment(after, moment)
        })
    }
}

impl GroupBytes {
    /// Applies a delta. The level was at most `level_high` during it.
    pub(in super::super) fn apply(&mut self, delta: Delta, level_high: i64, peaks: &mut PeakHistory) {
        let bytes = self.bytes.saturating_add(delta.net);
        if self.history.must_save(peaks) || peaks.is_new_peak(level_high) {
            peaks.apply(&mut self.history, bytes, delta, level_high);
        }
        self.bytes = bytes;
    }

    /// Saves the bytes if necessary, and changes them.
    pub(super) fn change(&mut self, by: i64, peaks: &PeakHistory) {
        self.history.save(self.bytes, peaks);
        self.bytes = self.bytes.saturating_add(by);
    }

    /// Returns the increase of the group from the start to the peak.
    pub(in super::super) fn change_over(&self, range: &PeakRange) -> i64 {
        range.change_of(&self.history, self.bytes)
    }
}
