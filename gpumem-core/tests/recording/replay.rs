//! A recording yields the reports that the program got.

use std::{collections::HashMap, io::Cursor, mem};

use gpumem_core::recording::{End, Item, Reader, ReplayedReport, Request};

use crate::{
    live::{recording, words},
    round_trip::written,
};

fn replayed(file: Vec<u8>) -> (Vec<ReplayedReport>, Reader<Cursor<Vec<u8>>>) {
    let mut reader = Reader::new(Cursor::new(file)).unwrap();
    let mut outputs = Vec::new();
    reader.replay(|output| outputs.push(output.clone())).unwrap();
    (outputs, reader)
}

#[test]
fn all_reports_are_the_same_character_by_character() {
    let mut kinds = HashMap::new();
    for seed in 1..=12 {
        let (items, live) = recording(seed, 1_500);
        let (replayed, reader) = replayed(written(&items));
        assert!(reader.skipped().is_nothing(), "seed {seed}: {:?}", reader.skipped());
        assert_eq!(reader.end(), Some(&End::Complete));
        assert_eq!(replayed.len(), live.len(), "seed {seed}");
        for (at, (replayed, live)) in replayed.iter().zip(&live).enumerate() {
            assert_eq!(words(replayed), words(live), "seed {seed}, report {at}");
            *kinds.entry(mem::discriminant(live)).or_insert(0) += 1;
        }
    }
    assert!(kinds.len() == 9 && kinds.values().all(|count| *count > 10), "reports of each kind: {kinds:?}");
}

/// A recording that missed something says so in each trace that was open, as a session does.
#[test]
fn what_the_recording_missed_is_lost() {
    let (items, _) = recording(5, 300);
    let is_open = items.iter().position(|item| matches!(item, Item::Request(Request::Report { .. }))).unwrap();
    let before = items[..is_open].iter().chain(&[Item::Missed(7)]).cloned();
    let (outputs, reader) = replayed(written(&before.chain(items[is_open..].iter().cloned()).collect::<Vec<_>>()));
    assert_eq!(reader.skipped().missed, 7);
    let lost = outputs.iter().rev().find_map(|output| match output {
        ReplayedReport::Summary(summary) => Some(summary.lost),
        _ => None,
    });
    assert!(lost.is_some_and(|lost| lost >= 7), "{lost:?}");
}

#[test]
fn names_that_are_missing_are_replaced_and_nothing_else_changes() {
    let (items, live) = recording(9, 500);
    let only_events =
        items.into_iter().filter(|item| !matches!(item, Item::Callsite(_) | Item::Stack(_) | Item::Symbols(_)));
    let (outputs, reader) = replayed(written(&only_events.collect::<Vec<_>>()));
    assert!(reader.skipped().is_nothing());
    assert_eq!(outputs.len(), live.len());
    for (output, live) in outputs.iter().zip(&live) {
        match (output, live) {
            (ReplayedReport::Report(output), ReplayedReport::Report(live)) => {
                assert_eq!(output.outer.len(), live.outer.len());
                assert_eq!(&output.clone().inside(live.outer.clone()), live);
            }
            (ReplayedReport::MemoryStats(output), ReplayedReport::MemoryStats(live)) => assert_eq!(output, live),
            (ReplayedReport::Summary(output), ReplayedReport::Summary(live)) => {
                let figures = |summary: &gpumem_core::report::Summary| {
                    let mut all: Vec<_> =
                        summary.scopes.iter().map(|scope| (scope.used, scope.peak, scope.calls)).collect();
                    all.sort();
                    all
                };
                assert_eq!(figures(output), figures(live));
                assert!(
                    output
                        .scopes
                        .iter()
                        .flat_map(|scope| &scope.path)
                        .all(|name| name.contains("not in the recording"))
                );
            }
            _ => {}
        }
    }
}

/// The true time of an event, which the ledger does not have.
#[test]
fn ticks_become_times() {
    use gpumem_core::recording::ClockPair;
    use std::time::Duration;
    let pair = |ticks, millis| Item::Clock(ClockPair { ticks, time: Duration::from_millis(millis) });
    let (_, reader) = replayed(written(&[pair(1_000, 10), pair(2_000, 20), pair(4_000, 30)]));
    for (ticks, micros) in [(1_000, 10_000), (1_500, 15_000), (3_000, 25_000), (6_000, 40_000), (500, 5_000), (0, 0)] {
        assert_eq!(reader.definitions().time(ticks), Some(Duration::from_micros(micros)), "{ticks}");
    }
    let (_, reader) = replayed(written(&[pair(1_000, 10)]));
    assert_eq!(reader.definitions().time(1_000), None);
}
