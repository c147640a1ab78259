//! Maxima since any number of moments, each of which can be forgotten at any time.
//!
//! A new value is compared with one number, whether one span is open or ten thousand: opening a span starts a new
//! segment of time, a value raises only the newest segment, and the maximum since a moment is the maximum over its own
//! segment and all newer ones. An older segment whose maximum is no higher than the next one's can never be the answer
//! to anything, so the two are merged. What is left has falling maxima, and "over its own and all newer ones" is just
//! "its own", found by binary search.

/// Maxima of a value since several moments.
#[derive(Debug, Default)]
pub(super) struct Watermark<T> {
    /// The newest segment's maximum, here for the sake of [`raise`](Self::raise).
    top: T,
    /// Oldest first; `last` rises, `max` falls, and the newest is never empty. The newest one's `max` is `top`.
    segments: Vec<Segment<T>>,
    /// Segments with no open span, left until they are half of all.
    empty: usize,
    marks: u64,
}

#[derive(Debug)]
struct Segment<T> {
    /// The newest mark that lies in this segment.
    last: u64,
    max: T,
    /// Spans that began here and are still open.
    open: usize,
}

/// The moment at which a span was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark(u64);

impl<T: Copy + Ord> Watermark<T> {
    /// Opens a span; its maximum begins with `now`.
    pub(super) fn open(&mut self, now: T) -> Mark {
        self.marks += 1;
        self.settle();
        self.segments.push(Segment { last: self.marks, max: now, open: 1 });
        self.top = now;
        self.merge();
        Mark(self.marks)
    }

    /// The value is now `value`.
    #[inline]
    pub(super) fn raise(&mut self, value: T) {
        if self.top < value {
            self.rise(value);
        }
    }

    /// Not on the way of values that are no maxima, which are most.
    #[inline(never)]
    fn rise(&mut self, value: T) {
        self.top = value;
        self.merge();
    }

    /// The highest value since `mark`, which is open.
    pub(super) fn max_since(&self, mark: Mark) -> T {
        let segment = self.segment_of(mark);
        if segment + 1 == self.segments.len() { self.top } else { self.segments[segment].max }
    }

    /// Closes the span that began at `mark`.
    pub(super) fn close(&mut self, mark: Mark) {
        let segment = self.segment_of(mark);
        self.settle();
        self.segments[segment].open -= 1;
        if self.segments[segment].open > 0 {
            return;
        }
        self.empty += 1;
        while self.segments.pop_if(|newest| newest.open == 0).is_some() {
            self.empty -= 1;
        }
        if self.empty * 2 > self.segments.len() {
            self.segments.retain(|segment| segment.open > 0);
            self.empty = 0;
        }
        if let Some(newest) = self.segments.last() {
            self.top = newest.max;
        }
    }

    /// The maxima of the oldest segment and of the newest one.
    pub(super) fn ends(&self) -> Option<(T, T)> {
        let [oldest, ..] = self.segments.as_slice() else { return None };
        let oldest = if self.segments.len() == 1 { self.top } else { oldest.max };
        Some((oldest, self.top))
    }

    /// The first maximum of which something is not true that is true of all before it, once it is [settled](Self::settle).
    pub(super) fn first(&self, is_before: impl Fn(&T) -> bool) -> Option<T> {
        let at = self.segments.partition_point(|segment| is_before(&segment.max));
        self.segments.get(at).map(|segment| segment.max)
    }

    /// How many maxima there are.
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    /// Writes the newest segment's maximum to where the others have theirs.
    pub(super) fn settle(&mut self) {
        if let Some(newest) = self.segments.last_mut() {
            newest.max = self.top;
        }
    }

    fn segment_of(&self, mark: Mark) -> usize {
        self.segments.partition_point(|segment| segment.last < mark.0)
    }

    /// Restores falling maxima after the newest segment rose or was added.
    fn merge(&mut self) {
        while let [.., older, newest] = self.segments.as_mut_slice()
            && older.max <= self.top
        {
            newest.open += older.open;
            self.empty -= usize::from(older.open == 0);
            let older = self.segments.len() - 2;
            self.segments.swap_remove(older);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::numbers, *};

    /// The obvious way: every open span keeps its own maximum.
    #[derive(Default)]
    struct Obvious {
        open: Vec<(Mark, i64)>,
    }

    impl Obvious {
        fn raise(&mut self, value: i64) {
            for (_, max) in &mut self.open {
                *max = value.max(*max);
            }
        }
    }

    #[test]
    fn agrees_with_the_obvious_way() {
        for seed in 1..if cfg!(miri) { 5 } else { 400 } {
            let mut random = numbers(seed);
            let (mut watermark, mut obvious) = (Watermark::default(), Obvious::default());
            let (mut now, mut most_open) = (0_i64, 0);
            for _ in 0..300 {
                match random(5) {
                    0 => obvious.open.push((watermark.open(now), now)),
                    1 if !obvious.open.is_empty() => {
                        let at = usize::try_from(random(obvious.open.len() as u64)).unwrap();
                        watermark.close(obvious.open.swap_remove(at).0);
                    }
                    _ => {
                        now += random(21).cast_signed() - 10;
                        watermark.raise(now);
                        obvious.raise(now);
                    }
                }
                for (mark, max) in &obvious.open {
                    assert_eq!(watermark.max_since(*mark), *max, "seed {seed}");
                }
                let open: usize = watermark.segments.iter().map(|segment| segment.open).sum();
                assert_eq!(open, obvious.open.len());
                let empty = watermark.segments.iter().filter(|segment| segment.open == 0).count();
                assert_eq!(empty, watermark.empty);
                most_open = most_open.max(open);
                assert!(watermark.segments.len() <= 2 * most_open);
            }
        }
    }

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
}
