//! Compares the groups of peaks with a simple implementation that copies all groups at each new maximum.

mod history;
mod simple;

use self::history::history;
use super::{super::tests::numbers, GroupBytes, PeakHistory};

#[test]
fn histories_agree_with_the_simple_way() {
    let histories = 4_000;
    let compared: usize = (1..=histories).map(|seed| history(seed, 1 << (seed % 3), 80)).sum();
    assert!(compared as u64 > 5 * histories, "{compared}");
}

/// There are so many groups that their ids are reused.
#[test]
fn forgotten_groups_are_not_part_of_a_peak() {
    for seed in 1..2 {
        history(seed, 20_000, 30_000);
    }
}

/// Scopes that overlap and close in the order of their start leave unneeded saved bytes between needed ones.
#[test]
fn unneeded_saved_bytes_are_removed() {
    let mut numbers = numbers(7);
    let mut peaks = PeakHistory::of_device();
    let mut groups = [GroupBytes::default(), GroupBytes::default()];
    let mut scopes = std::collections::VecDeque::new();
    let mut longest = 0;
    for round in 0..3000_usize {
        for group in &mut groups {
            for by in [3, 1 + numbers(9).cast_signed(), -3] {
                group.change(if group.bytes > 100 { -90 } else { by }, &peaks);
            }
        }
        let in_use = groups.iter().map(|group| group.bytes).sum();
        peaks.raise(in_use);
        // The peaks of the scopes decrease, so that they are at different moments.
        if round % 4 == 0 {
            scopes.push_back(peaks.watch(in_use));
        }
        if scopes.len() > 8 {
            let over = scopes.pop_front().unwrap();
            let range = peaks.range_of(&over);
            assert_eq!(groups.iter().map(|group| group.change_over(&range)).sum::<i64>(), range.bytes());
            peaks.unwatch(&over);
        }
        for GroupBytes { history, .. } in &groups {
            let earlier = history.earlier.as_ref().map_or(0, |earlier| earlier.len());
            longest = longest.max(earlier);
            assert!(earlier <= 2 * 19 + 1, "round {round}: {earlier}");
        }
    }
    assert!(longest > 19, "{longest}");
}
