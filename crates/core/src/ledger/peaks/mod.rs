//! Finds the allocations that made a peak. To make this possible, groups keep their bytes at earlier moments.
//!
//! A moment gets a number if its values may be read later. This holds for the peak of a device and for the start and the peak of
//! a watched scope. A new peak costs one number. When a group changes for the first time after a moment, it first saves its
//! bytes, once for all moments since it was saved last (copy-on-write). Therefore the cost of an event does not depend on the
//! number of groups and moments. A moment between two saved ones has the bytes of the later one, because the group did not change
//! between them.
//!
//! Several scopes may be watched at once. Their peaks are kept as in `watermark.rs`: scopes with the same peak share its moment,
//! and only the latest moment can move to a higher level. Saved bytes that no moment needs are removed when the group is saved
//! again.

mod history;
mod saving;

use std::{cmp::Ordering, collections::VecDeque};

use self::history::Moment;
pub(super) use self::history::{GroupBytes, GroupHistory};
use super::{
    account_id::AccountId,
    delta::Delta,
    watermark::{Mark, Watermark},
};

/// A level of bytes in use, and the moment at which it was reached. Peaks are compared by their bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peak {
    pub(super) bytes: i64,
    moment: Moment,
}

/// The needed moments of one level of bytes in use.
#[derive(Debug)]
#[repr(C)]
pub(super) struct PeakHistory {
    /// The latest needed moment.
    latest: Moment,
    /// A level above this is a new peak.
    highest: i64,
    /// The oldest needed moment.
    oldest: Moment,
    /// No moment between this one and `latest` is needed.
    second: Moment,
    /// The last number given to a moment.
    last: Moment,
    /// The highest sum of the live blocks, without the blocks that are older than the session. Not used for accounts.
    record: Peak,
    /// The highest record that a reset ended, until a later record reaches it. The moment of this record is kept.
    earlier_record: Option<Peak>,
    /// The frees of blocks that are older than the session, as a group whose bytes are below 0.
    pub(super) older: GroupBytes,
    watched: Watermark<Peak>,
    /// The number of watched scopes.
    scopes: usize,
    /// The sorted starts of watched scopes and moments of kept peaks. A moment may occur twice. The list is a deque because
    /// usually the oldest or the latest moment is removed.
    kept: VecDeque<Moment>,
}

/// An open scope whose peak is watched.
#[derive(Clone, Copy, Debug)]
pub(super) struct WatchedScope {
    start: Peak,
    mark: Mark,
}

/// A peak, and the start that is subtracted from it. The record of a device has no start.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeakRange {
    start: Option<Peak>,
    peak: Peak,
}

/// A kept peak. Its scope may already be closed.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeptRange {
    pub(super) meter: u16,
    /// The account. `None` for the peak of a device or of a scope that counts all threads.
    pub(super) account: Option<AccountId>,
    pub(super) range: PeakRange,
}

impl PartialEq for Peak {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Peak {}

impl PartialOrd for Peak {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Peak {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes.cmp(&other.bytes)
    }
}

impl PeakRange {
    /// Returns the increase of a group, which has `bytes` now, from the start to the peak.
    pub(super) fn change_of(&self, history: &GroupHistory, bytes: i64) -> i64 {
        let start = self.start.map_or(0, |start| history.at(start.moment, bytes));
        history.at(self.peak.moment, bytes) - start
    }

    pub(super) fn is_record(&self) -> bool {
        self.start.is_none()
    }

    /// Returns the increase of all groups from the start to the peak.
    pub(super) fn bytes(&self) -> i64 {
        self.peak.bytes - self.start.map_or(0, |start| start.bytes)
    }

    fn moments(&self) -> impl Iterator<Item = Moment> {
        self.start.into_iter().chain([self.peak]).map(|peak| peak.moment)
    }
}

impl PeakHistory {
    /// Creates the peaks of a device. The record of a device is always kept.
    pub(super) fn of_device() -> Self {
        Self { highest: 0, record: Peak::default(), ..Self::of_account() }
    }

    /// Creates the peaks of an account.
    pub(super) fn of_account() -> Self {
        Self {
            latest: 0,
            highest: i64::MAX,
            oldest: Moment::MAX,
            second: 0,
            last: 0,
            record: Peak { bytes: i64::MAX, moment: 0 },
            earlier_record: None,
            older: GroupBytes::default(),
            watched: Watermark::default(),
            scopes: 0,
            kept: VecDeque::new(),
        }
    }

    /// Returns whether this level is a new peak.
    #[inline]
    pub(super) fn is_new_peak(&self, in_use: i64) -> bool {
        self.highest < in_use
    }

    /// Applies a pending delta. Its group now has `bytes`, and the level was at most `level_high` during the delta. `#[cold]`
    /// keeps this code out of the instruction cache of deltas that change no peak.
    #[inline]
    pub(super) fn apply(&mut self, history: &mut GroupHistory, bytes: i64, delta: Delta, level_high: i64) {
        self.apply_in_registers(history, bytes, delta.net, delta.high, level_high);
    }

    #[cold]
    fn apply_in_registers(&mut self, history: &mut GroupHistory, bytes: i64, net: i64, high: i64, level_high: i64) {
        let before = bytes - net;
        // If only the record is needed and this delta raises it, no earlier moment is needed any longer.
        if !self.is_new_peak(level_high) || !self.needs_record_only() {
            history.save(before, self);
        }
        // At a peak within the delta, its group had `before + high`. The other groups have not changed since.
        if self.raise(level_high) && net < high {
            history.save(before + high, self);
        }
    }

    /// Returns whether only the moment of the record is needed.
    fn needs_record_only(&self) -> bool {
        self.scopes == 0 && self.kept.is_empty()
    }

    /// Notes the level `in_use` after or during the change of a group. Returns whether this is a new peak, whose moment then has
    /// just received its number.
    #[inline]
    pub(super) fn raise(&mut self, in_use: i64) -> bool {
        let is_new = self.is_new_peak(in_use);
        if is_new {
            self.add_peak(in_use);
        }
        is_new
    }

    #[inline(never)]
    fn add_peak(&mut self, in_use: i64) {
        self.last += 1;
        let moment = self.last;
        let live = in_use.saturating_sub(self.older.bytes);
        if self.record.bytes < live {
            self.record = Peak { bytes: live, moment };
            if let Some(earlier) = self.earlier_record.take_if(|earlier| earlier.bytes <= live) {
                self.release_moment(earlier.moment);
            }
        }
        if self.needs_record_only() {
            (self.latest, self.oldest, self.second, self.highest) = (moment, moment, moment, in_use);
        } else {
            self.add_watched_peak(Peak { bytes: in_use, moment });
        }
    }

    fn add_watched_peak(&mut self, peak: Peak) {
        if self.scopes > 0 {
            self.watched.raise(peak);
        }
        self.update_bounds();
    }

    /// Counts the free of a block that is older than the session (`by` is below 0), or its failed free (`by` is above
    /// 0).
    pub(super) fn change_older(&mut self, by: i64) {
        let mut older = std::mem::take(&mut self.older);
        older.change(by, self);
        self.older = older;
        self.update_bounds();
    }

    /// Restarts the record of a device at the level `in_use`.
    pub(super) fn reset_record(&mut self, in_use: i64) {
        let live = in_use.saturating_sub(self.older.bytes);
        if self.earlier_record.is_none() && self.record.bytes > live {
            self.keep_moment(self.record.moment);
            self.earlier_record = Some(self.record);
        }
        self.record = Peak::default();
        if live > 0 {
            self.last += 1;
            self.record = Peak { bytes: live, moment: self.last };
        }
        self.update_bounds();
    }

    /// Returns the highest sum of the live blocks of a device since the record was last reset.
    pub(super) fn record(&self) -> i64 {
        self.record.bytes
    }

    /// Returns the highest sum of the live blocks of a device, regardless of resets.
    pub(super) fn highest_record(&self) -> i64 {
        self.earlier_record.unwrap_or(self.record).bytes
    }

    /// Updates the fields before `last`, after the needed moments have changed.
    fn update_bounds(&mut self) {
        self.watched.store_top();
        self.highest = self.record.bytes.saturating_add(self.older.bytes);
        (self.oldest, self.latest) = (Moment::MAX, 0);
        if self.record.moment > 0 {
            (self.oldest, self.latest) = (self.record.moment, self.record.moment);
        }
        if let Some((oldest, latest)) = self.watched.ends().filter(|_| self.scopes > 0) {
            self.highest = self.highest.min(latest.bytes);
            self.oldest = self.oldest.min(oldest.moment);
            self.latest = self.latest.max(latest.moment);
        }
        if let (Some(oldest), Some(latest)) = (self.kept.front(), self.kept.back()) {
            self.oldest = self.oldest.min(*oldest);
            self.latest = self.latest.max(*latest);
        }
        // Usually one scope is watched, and `second` is found immediately. With several scopes, a search would cost more than it
        // saves.
        self.second = match self.kept.back() {
            Some(kept)
                if self.watched.len() == 1
                    && self.watched.ends().is_some_and(|(peak, _)| peak.moment == self.latest) =>
            {
                if self.record.moment == self.latest { *kept } else { self.record.moment.max(*kept) }
            }
            _ => self.latest,
        };
    }

    /// Returns an upper bound on the number of needed moments.
    fn moments(&self) -> usize {
        1 + self.watched.len() + self.kept.len()
    }

    /// Returns whether a moment after `after`, up to `until`, is needed.
    fn has_moment(&self, after: Moment, until: Moment) -> bool {
        let lies_between = |moment: Moment| (after + 1..=until).contains(&moment);
        let kept = self.kept.partition_point(|moment| *moment <= after);
        lies_between(self.record.moment)
            || self.kept.get(kept).is_some_and(|moment| lies_between(*moment))
            || self.watched.first(|peak| peak.moment <= after).is_some_and(|peak| lies_between(peak.moment))
    }

    /// Starts to watch the peak of a scope.
    pub(super) fn watch(&mut self, in_use: i64) -> WatchedScope {
        self.last += 1;
        let start = Peak { bytes: in_use, moment: self.last };
        let mark = self.watched.open(start);
        self.scopes += 1;
        self.keep_moment(start.moment);
        WatchedScope { start, mark }
    }

    /// Returns the peak of a watched scope so far, and its start.
    pub(super) fn range_of(&self, scope: &WatchedScope) -> PeakRange {
        PeakRange { start: Some(scope.start), peak: self.watched.max_since(scope.mark) }
    }

    /// Stops watching a scope.
    pub(super) fn unwatch(&mut self, scope: &WatchedScope) {
        self.watched.close(scope.mark);
        self.scopes -= 1;
        self.release_moment(scope.start.moment);
    }

    /// Returns the record since the last reset, or the highest record of all. `None` if nothing was allocated.
    pub(super) fn range_of_record(&self, since_reset: bool) -> Option<PeakRange> {
        let peak = self.earlier_record.filter(|_| !since_reset).unwrap_or(self.record);
        (peak.moment > 0).then_some(PeakRange { start: None, peak })
    }

    /// Keeps the moments of a peak until it is [released](Self::release), although its scope may be closed.
    pub(super) fn keep(&mut self, range: &PeakRange) {
        range.moments().for_each(|moment| self.keep_moment(moment));
    }

    /// Returns whether a kept peak is not released yet.
    pub(super) fn has_kept(&self) -> bool {
        self.kept.len() > self.scopes + usize::from(self.earlier_record.is_some())
    }

    pub(super) fn release(&mut self, range: &PeakRange) {
        range.moments().for_each(|moment| self.release_moment(moment));
    }

    fn keep_moment(&mut self, moment: Moment) {
        let at = self.kept.partition_point(|kept| *kept <= moment);
        self.kept.insert(at, moment);
        self.update_bounds();
    }

    fn release_moment(&mut self, moment: Moment) {
        if let Ok(at) = self.kept.binary_search(&moment) {
            self.kept.remove(at);
        }
        self.update_bounds();
    }

    /// Returns whether no moment is needed.
    pub(super) fn is_idle(&self) -> bool {
        self.latest == 0
    }
}

#[cfg(test)]
mod tests;
