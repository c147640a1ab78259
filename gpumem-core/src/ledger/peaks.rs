//! Which allocations made a peak: what each group of allocations had at earlier moments.
//!
//! A moment has a number if somebody asks what was in use then: the peak of a device, the start and the peak of a watched
//! scope. A new peak costs one number. A group that changes first saves what it had, once for all moments since it was
//! saved last (copy-on-write). So an event costs the same however many groups and moments there are. A moment between two
//! that are saved reads the later one: the group did not change between them.
//!
//! Several scopes may be watched at once. Their peaks are kept as in `watermark.rs`: scopes that have a peak in common share
//! its moment, and only the newest moment changes when more is in use. Saved amounts that no moment needs any more are dropped
//! when the group is saved again.

use std::{cmp::Ordering, collections::VecDeque};

use super::{
    pending::Delta,
    watermark::{Mark, Watermark},
};

/// The number of a moment; 0 is before all.
type Moment = u64;

/// The most that was in use, and when. Compared by the amount.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peak {
    pub(super) bytes: i64,
    moment: Moment,
}

/// What one group had at earlier moments.
#[derive(Clone, Debug, Default)]
pub(super) struct Saved {
    /// The newest moment that it was saved for. It did not change from there to the next one.
    moment: Moment,
    /// What it had then.
    bytes: i64,
    /// What it had before that, the oldest first. Few groups have this, and others have room for a word only.
    #[expect(clippy::box_collection, reason = "one word in each group")]
    earlier: Option<Box<Vec<(Moment, i64)>>>,
}

/// A group with no figure but its bytes.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) bytes: i64,
    pub(super) saved: Saved,
}

/// The moments of one level of bytes in use.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Peaks {
    /// The newest moment that somebody asks about.
    newest: Moment,
    /// More in use than that is a new peak.
    highest: i64,
    /// The oldest moment that somebody asks about.
    oldest: Moment,
    /// Nobody asks about a moment between this one and the newest.
    second: Moment,
    /// The newest that ever was.
    last: Moment,
    /// The most that the live blocks ever were, without regard to blocks that are older than the session. Of what one thread
    /// allocates none is kept.
    record: Peak,
    /// Blocks older than the session that were given back: a group like others, with less than nothing.
    pub(super) older: Group,
    watched: Watermark<Peak>,
    /// Watched scopes that are open.
    spans: usize,
    /// Starts of watched scopes, and moments that are asked about after their scopes are over. Sorted; one may be there twice. The
    /// oldest and the newest go without moving the others.
    kept: VecDeque<Moment>,
}

/// A watched scope since it began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    start: Peak,
    mark: Mark,
}

/// A peak, and what it is compared with: the start of its scope, or nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rise {
    start: Option<Peak>,
    peak: Peak,
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

impl Saved {
    /// It is to be saved when the group changes.
    #[inline]
    pub(super) fn is_due(&self, peaks: &Peaks) -> bool {
        self.moment < peaks.newest
    }

    /// The group, which has `bytes`, is about to change.
    #[inline]
    fn save(&mut self, bytes: i64, peaks: &Peaks) {
        if self.is_due(peaks) {
            self.save_for(bytes, peaks);
        }
    }

    #[inline(never)]
    fn save_for(&mut self, bytes: i64, peaks: &Peaks) {
        if (self.moment >= peaks.oldest || self.earlier.is_some()) && !self.is_kept_until(peaks.second) {
            self.keep_earlier(peaks);
        }
        (self.moment, self.bytes) = (peaks.newest, bytes);
    }

    /// What it had at that moment is among the earlier amounts, and so is what it had before.
    fn is_kept_until(&self, moment: Moment) -> bool {
        let newest = self.earlier.as_ref().and_then(|earlier| earlier.last());
        moment > 0 && newest.is_some_and(|(newest, _)| *newest >= moment)
    }

    /// Keeps what it was saved for last, if that is still needed, and drops what is not.
    #[cold]
    fn keep_earlier(&mut self, peaks: &Peaks) {
        let earlier = self.earlier.get_or_insert_default();
        let before = |earlier: &[(Moment, i64)]| earlier.last().map_or(0, |(moment, _)| *moment);
        if peaks.has_moment(before(earlier), self.moment) {
            // Scopes that overlap and close in the order of their start leave some in the middle.
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

    /// What the group, which has `bytes` now, had at a moment that somebody asks about.
    fn at(&self, moment: Moment, bytes: i64) -> i64 {
        if self.moment < moment {
            return bytes;
        }
        let earlier = self.earlier.iter().flat_map(|earlier| earlier.iter()).find(|(saved, _)| *saved >= moment);
        earlier.map_or(self.bytes, |(_, bytes)| *bytes)
    }

    /// The group had something at a moment that somebody asks about, and has nothing now.
    pub(super) fn is_needed(&self, peaks: &Peaks) -> bool {
        let mut before = 0;
        let earlier = self.earlier.iter().flat_map(|earlier| earlier.iter().copied());
        earlier.chain([(self.moment, self.bytes)]).any(|(moment, bytes)| {
            let after = std::mem::replace(&mut before, moment);
            bytes != 0 && peaks.has_moment(after, moment)
        })
    }
}

impl Group {
    /// As `change` of a level, of which this is a part.
    pub(super) fn change(&mut self, by: i64, peaks: &Peaks) {
        self.saved.save(self.bytes, peaks);
        self.bytes = self.bytes.saturating_add(by);
    }

    /// What it had more at the peak than at the start.
    pub(super) fn at(&self, rise: &Rise) -> i64 {
        rise.of(&self.saved, self.bytes)
    }
}

impl Rise {
    /// What a group, which has `bytes` now, had more at the peak than at the start.
    pub(super) fn of(&self, saved: &Saved, bytes: i64) -> i64 {
        let start = self.start.map_or(0, |start| saved.at(start.moment, bytes));
        saved.at(self.peak.moment, bytes) - start
    }

    pub(super) fn is_record(&self) -> bool {
        self.start.is_none()
    }

    /// What all groups had more.
    pub(super) fn bytes(&self) -> i64 {
        self.peak.bytes - self.start.map_or(0, |start| start.bytes)
    }
}

impl Peaks {
    /// Of a device: its record is always kept.
    pub(super) fn of_device() -> Self {
        Self { highest: 0, record: Peak::default(), ..Self::of_thread() }
    }

    /// Of what one thread allocates.
    pub(super) fn of_thread() -> Self {
        Self {
            newest: 0,
            highest: i64::MAX,
            oldest: Moment::MAX,
            second: 0,
            last: 0,
            record: Peak { bytes: i64::MAX, moment: 0 },
            older: Group::default(),
            watched: Watermark::default(),
            spans: 0,
            kept: VecDeque::new(),
        }
    }

    /// So much in use is a peak.
    #[inline]
    pub(super) fn is_below(&self, in_use: i64) -> bool {
        self.highest < in_use
    }

    /// The pending delta was `delta`, so that its group has `bytes`, and the level rose to `level_high`. Out of the way of runs that change no peak.
    #[inline]
    pub(super) fn apply(&mut self, saved: &mut Saved, bytes: i64, delta: Delta, level_high: i64) {
        self.apply_in_registers(saved, bytes, delta.net, delta.high, level_high);
    }

    #[cold]
    fn apply_in_registers(&mut self, saved: &mut Saved, bytes: i64, net: i64, high: i64, level_high: i64) {
        let before = bytes - net;
        // What it had at a peak that is none any more is not needed.
        if !self.is_below(level_high) || !self.is_record_alone() {
            saved.save(before, self);
        }
        // At a peak within the pending delta, its own group has what it had then, and the others what they have.
        if self.reach(level_high) && net < high {
            saved.save(before + high, self);
        }
    }

    /// Nobody asks about anything but the record.
    fn is_record_alone(&self) -> bool {
        self.spans == 0 && self.kept.is_empty()
    }

    /// So much was in use after a group had changed, or while it changed. True if that is a peak, of a moment that has just got
    /// its number.
    #[inline]
    pub(super) fn reach(&mut self, in_use: i64) -> bool {
        let is_new = self.is_below(in_use);
        if is_new {
            self.rise(in_use);
        }
        is_new
    }

    #[inline(never)]
    fn rise(&mut self, in_use: i64) {
        self.last += 1;
        let moment = self.last;
        let live = in_use.saturating_sub(self.older.bytes);
        if self.record.bytes < live {
            self.record = Peak { bytes: live, moment };
        }
        if self.is_record_alone() {
            (self.newest, self.oldest, self.second, self.highest) = (moment, moment, moment, in_use);
        } else {
            self.rise_watched(Peak { bytes: in_use, moment });
        }
    }

    fn rise_watched(&mut self, peak: Peak) {
        if self.spans > 0 {
            self.watched.raise(peak);
        }
        self.settle();
    }

    /// A block that is older than the session is given back, or is not after all: then `by` is above 0.
    pub(super) fn change_older(&mut self, by: i64) {
        let mut older = std::mem::take(&mut self.older);
        older.change(by, self);
        self.older = older;
        self.settle();
    }

    /// The most that the live blocks of a device ever were.
    pub(super) fn record(&self) -> i64 {
        self.record.bytes
    }

    /// What somebody asks about has changed.
    fn settle(&mut self) {
        self.watched.settle();
        self.highest = self.record.bytes.saturating_add(self.older.bytes);
        (self.oldest, self.newest) = (Moment::MAX, 0);
        if self.record.moment > 0 {
            (self.oldest, self.newest) = (self.record.moment, self.record.moment);
        }
        if let Some((oldest, newest)) = self.watched.ends().filter(|_| self.spans > 0) {
            self.highest = self.highest.min(newest.bytes);
            self.oldest = self.oldest.min(oldest.moment);
            self.newest = self.newest.max(newest.moment);
        }
        if let (Some(oldest), Some(newest)) = (self.kept.front(), self.kept.back()) {
            self.oldest = self.oldest.min(*oldest);
            self.newest = self.newest.max(*newest);
        }
        // As long as one scope is watched, as most often. Else it is not worth a search.
        self.second = match self.kept.back() {
            Some(kept)
                if self.watched.len() == 1
                    && self.watched.ends().is_some_and(|(peak, _)| peak.moment == self.newest) =>
            {
                if self.record.moment == self.newest { *kept } else { self.record.moment.max(*kept) }
            }
            _ => self.newest,
        };
    }

    /// How many moments somebody may ask about, at most.
    fn moments(&self) -> usize {
        1 + self.watched.len() + self.kept.len()
    }

    /// Whether somebody asks about a moment after one and not after the other.
    fn has_moment(&self, after: Moment, until: Moment) -> bool {
        let lies_between = |moment: Moment| (after + 1..=until).contains(&moment);
        let kept = self.kept.partition_point(|moment| *moment <= after);
        lies_between(self.record.moment)
            || self.kept.get(kept).is_some_and(|moment| lies_between(*moment))
            || self.watched.first(|peak| peak.moment <= after).is_some_and(|peak| lies_between(peak.moment))
    }

    /// A watched scope begins.
    pub(super) fn open(&mut self, in_use: i64) -> Span {
        self.last += 1;
        let start = Peak { bytes: in_use, moment: self.last };
        let mark = self.watched.open(start);
        self.spans += 1;
        self.keep(start.moment);
        Span { start, mark }
    }

    /// What a watched scope has come to.
    pub(super) fn of(&self, span: &Span) -> Rise {
        Rise { start: Some(span.start), peak: self.watched.max_since(span.mark) }
    }

    /// A watched scope is over.
    pub(super) fn close(&mut self, span: &Span) {
        self.watched.close(span.mark);
        self.spans -= 1;
        self.forget(span.start.moment);
    }

    /// The record, if there was anything.
    pub(super) fn of_record(&self) -> Option<Rise> {
        (self.record.moment > 0).then_some(Rise { start: None, peak: self.record })
    }

    /// Somebody will ask about it, though its scope is over then, until it is [released](Self::release).
    pub(super) fn hold(&mut self, rise: &Rise) {
        rise.moments().for_each(|moment| self.keep(moment));
    }

    /// Somebody asks about a peak apart from the scopes that are open.
    pub(super) fn is_held(&self) -> bool {
        self.kept.len() > self.spans
    }

    pub(super) fn release(&mut self, rise: &Rise) {
        rise.moments().for_each(|moment| self.forget(moment));
    }

    fn keep(&mut self, moment: Moment) {
        let at = self.kept.partition_point(|kept| *kept <= moment);
        self.kept.insert(at, moment);
        self.settle();
    }

    fn forget(&mut self, moment: Moment) {
        if let Ok(at) = self.kept.binary_search(&moment) {
            self.kept.remove(at);
        }
        self.settle();
    }

    /// Nobody asks about anything.
    pub(super) fn is_idle(&self) -> bool {
        self.newest == 0
    }
}

impl Rise {
    fn moments(&self) -> impl Iterator<Item = Moment> {
        self.start.into_iter().chain([self.peak]).map(|peak| peak.moment)
    }
}

#[cfg(test)]
mod tests;
