//! Tests of the saved bytes. `ledger/tests/histories.rs` compares the groups of peaks with a simple implementation.

use super::{super::tests::numbers, GroupBytes, PeakHistory};

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
