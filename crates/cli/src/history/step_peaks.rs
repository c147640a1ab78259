//! The highest live memory in each of many equal parts of the time.

/// The highest live memory of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepPeak {
    pub(crate) bytes: u64,
    /// The number of changes up to that moment.
    pub(crate) changes: usize,
}

/// Returns the step that contains a time, if the time until `end` is divided into equal steps.
pub(crate) fn step_of(time: u64, end: u64, steps: usize) -> usize {
    let step = u128::from(time) * steps as u128 / u128::from(end.max(1));
    usize::try_from(step).unwrap_or(usize::MAX).min(steps - 1)
}

/// Divides the time until `end` into equal steps, and returns the highest live memory in each. `changes` are the times
/// of all changes, in order, with the bytes that they add.
pub(crate) fn step_peaks(changes: impl Iterator<Item = (u64, i64)>, end: u64, steps: usize) -> Vec<StepPeak> {
    let mut peaks = vec![StepPeak::default(); steps];
    let (mut now, mut step) = (StepPeak::default(), 0);
    for (time, delta) in changes {
        // A step starts with the memory that is live at the end of the one before it.
        let next = step_of(time, end, steps).max(step);
        peaks[step + 1..=next].fill(now);
        step = next;
        now = StepPeak { bytes: now.bytes.saturating_add_signed(delta), changes: now.changes + 1 };
        if now.bytes > peaks[step].bytes {
            peaks[step] = now;
        }
    }
    peaks[step + 1..].fill(now);
    peaks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_its_highest_moment() {
        let changes = [(5, 4), (11, 3), (12, -6), (13, 2), (40, 8), (41, -9), (99, 1), (100, 2)];
        let peak = |bytes, changes| StepPeak { bytes, changes };
        let peaks = step_peaks(changes.into_iter(), 100, 10);
        let expected = [(4, 1), (7, 2), (3, 4), (3, 4), (11, 5), (2, 6), (2, 6), (2, 6), (2, 6), (5, 8)];
        assert_eq!(peaks, expected.map(|(bytes, changes)| peak(bytes, changes)));
        // All is at the start of a recording without a length.
        assert_eq!(step_peaks([(0, 4), (0, -1)].into_iter(), 0, 2), [peak(4, 1), peak(3, 2)]);
        assert_eq!(step_peaks([].into_iter(), 100, 1), [peak(0, 0)]);
        assert_eq!([0, 99, u64::MAX].map(|time| step_of(time, u64::MAX, 3)), [0, 0, 2]);
    }
}
