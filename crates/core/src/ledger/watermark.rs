//! The maxima of a value during any number of open spans of time.
//!
//! A new value is compared with only one number, however many spans are open. Opening a span starts a new segment of time, and a
//! value raises only the maximum of the latest segment. The maximum of a span is the maximum over the segment in which it started
//! and all later segments. If an older segment has no higher maximum than the next one, it cannot change any result, so the two
//! are merged. The remaining maxima fall from the oldest segment to the latest. Therefore the maximum of a span is that of the
//! segment in which it started, found by binary search.

/// The maxima of a value during several open spans.
#[derive(Clone, Debug, Default)]
pub(super) struct Watermark<T> {
    /// The latest segment's maximum. It is stored here so that [`raise`](Self::raise) reads only one cache line.
    top: T,
    /// The segments, the oldest first: `last` rises, `max` falls. The latest segment always has an open span, and its maximum is
    /// `top`; its `max` may be out of date.
    segments: Vec<Segment<T>>,
    /// The number of segments that have no open span. They are removed when they are more than half of all.
    empty: usize,
    marks: u64,
}

#[derive(Clone, Debug)]
struct Segment<T> {
    /// The latest mark in this segment.
    last: u64,
    max: T,
    /// The number of open spans that started in this segment.
    open: usize,
}

/// The moment at which a span was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark(u64);

impl<T: Copy + Ord> Watermark<T> {
    /// Opens a span. Its maximum starts at `now`.
    pub(super) fn open(&mut self, now: T) -> Mark {
        self.marks += 1;
        self.store_top();
        self.segments.push(Segment { last: self.marks, max: now, open: 1 });
        self.top = now;
        self.merge();
        Mark(self.marks)
    }

    /// Sets the current value. This raises the maximum of the latest segment, if it is lower.
    #[inline]
    pub(super) fn raise(&mut self, value: T) {
        if self.top < value {
            self.raise_top(value);
        }
    }

    /// Not inlined: most values are not new maxima, and the code for them stays small in the instruction cache.
    #[inline(never)]
    fn raise_top(&mut self, value: T) {
        self.top = value;
        self.merge();
    }

    /// Returns the highest value since the span of `mark` was opened.
    pub(super) fn max_since(&self, mark: Mark) -> T {
        let segment = self.segment_of(mark);
        if segment + 1 == self.segments.len() { self.top } else { self.segments[segment].max }
    }

    /// Closes the span of `mark`.
    pub(super) fn close(&mut self, mark: Mark) {
        let segment = self.segment_of(mark);
        self.store_top();
        self.segments[segment].open -= 1;
        if self.segments[segment].open > 0 {
            return;
        }
        self.empty += 1;
        while self.segments.pop_if(|latest| latest.open == 0).is_some() {
            self.empty -= 1;
        }
        if self.empty * 2 > self.segments.len() {
            self.segments.retain(|segment| segment.open > 0);
            self.empty = 0;
        }
        if let Some(latest) = self.segments.last() {
            self.top = latest.max;
        }
    }

    /// Returns the maxima of the oldest and the latest segment.
    pub(super) fn ends(&self) -> Option<(T, T)> {
        let [oldest, ..] = self.segments.as_slice() else { return None };
        let oldest = if self.segments.len() == 1 { self.top } else { oldest.max };
        Some((oldest, self.top))
    }

    /// Returns the oldest maximum for which `is_before` is false; it must be true for all older ones. Call
    /// [`store_top`](Self::store_top) first.
    pub(super) fn first(&self, is_before: impl Fn(&T) -> bool) -> Option<T> {
        let at = self.segments.partition_point(|segment| is_before(&segment.max));
        self.segments.get(at).map(|segment| segment.max)
    }

    /// Returns the number of segments.
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    /// Stores `top` in the latest segment.
    pub(super) fn store_top(&mut self) {
        if let Some(latest) = self.segments.last_mut() {
            latest.max = self.top;
        }
    }

    fn segment_of(&self, mark: Mark) -> usize {
        self.segments.partition_point(|segment| segment.last < mark.0)
    }

    /// Merges segments until the maxima fall, after the latest segment was raised or added.
    fn merge(&mut self) {
        while let [.., older, latest] = self.segments.as_mut_slice()
            && older.max <= self.top
        {
            latest.open += older.open;
            self.empty -= usize::from(older.open == 0);
            let older = self.segments.len() - 2;
            self.segments.swap_remove(older);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_spans_at_one_level_are_one_segment() {
        let mut watermark = Watermark::default();
        let marks: Vec<_> = (0..10_000).map(|_| watermark.open(7)).collect();
        assert_eq!(watermark.segments.len(), 1);
        watermark.raise(9);
        assert!(marks.iter().all(|mark| watermark.max_since(*mark) == 9));
        for mark in marks {
            watermark.close(mark);
        }
        assert!(watermark.segments.is_empty());
    }
    #[test]
    fn closed_spans_take_no_more_segments_than_open_ones() {
        let mut watermark = Watermark::default();
        // Each span has a lower maximum, so it has a segment of its own.
        let marks: Vec<_> = (1..=10_000).map(|at| watermark.open(-at)).collect();
        for (open, mark) in (0..10_000).rev().zip(marks) {
            assert_eq!(watermark.max_since(mark), open - 10_000);
            watermark.close(mark);
            assert!(watermark.segments.len() <= 2 * usize::try_from(open).unwrap(), "{open} are open");
        }
    }
}
