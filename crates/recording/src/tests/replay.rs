//! Tests the content of a recording apart from reports. `tests/tests/standin/recording.rs` compares the reports of a program with those of
//! its recording.

use std::{io::Cursor, time::Duration};

use crate::{ClockPair, End, Item, Reader, ReplayedReport, Request};
use gpumem_core::model::{EventKind, ScopeId};

use super::hostile::{alloc, event, open};
use crate::testing::written;

fn replayed(items: &[Item]) -> (Vec<ReplayedReport>, Reader<Cursor<Vec<u8>>>) {
    let mut reader = Reader::new(Cursor::new(written(items))).unwrap();
    let mut reports = Vec::new();
    reader.replay(|report| reports.push(report.clone())).unwrap();
    assert_eq!(reader.end(), Some(&End::Complete));
    (reports, reader)
}

/// Missed items count as lost in each open trace, as in a session. Missing names are replaced.
#[test]
fn what_a_recording_lacks() {
    let scope = ScopeId(9);
    let (reports, reader) = replayed(&[
        open(1, scope.0),
        alloc(2, 512, 3),
        Item::Missed(7),
        Item::Request(Request::Summary { not_intercepted: None }),
        event(3, EventKind::Close { scope }),
        Item::Request(Request::Report { scope, ctx: None, subctx: None, lines: None }),
    ]);
    assert_eq!(reader.skipped().missed, 7);
    let [ReplayedReport::Summary(summary), ReplayedReport::Report(report)] = &*reports else { panic!("{reports:?}") };
    assert_eq!((summary.lost, report.trace.lost), (7, 7));
    let named = summary.scopes.iter().find(|scope| !scope.path.is_empty()).expect("a scope is open");
    assert!(named.path[0].contains("not in the recording") && named.used.get() == 3, "{named:?}");
}

/// The event has its exact time, which the ledger does not have.
#[test]
fn ticks_become_times() {
    let pair = |ticks, millis| Item::Clock(ClockPair { ticks, time: Duration::from_millis(millis) });
    let (_, reader) = replayed(&[pair(1_000, 10), pair(2_000, 20), pair(4_000, 30)]);
    for (ticks, micros) in [(1_000, 10_000), (1_500, 15_000), (3_000, 25_000), (6_000, 40_000), (500, 5_000), (0, 0)] {
        assert_eq!(reader.definitions().time(ticks), Some(Duration::from_micros(micros)), "{ticks}");
    }
    let (_, reader) = replayed(&[pair(1_000, 10)]);
    assert_eq!(reader.definitions().time(1_000), None);
}
