//! Tests the content of a recording. `tests/tests/standin/capture.rs` compares a program's reports with its recording's.

use std::{io::Cursor, time::Duration};

use crate::{ClockPair, End, Item, Reader};
use gpumem_core::model::{EventKind, ScopeId};

use super::hostile::{alloc, event, open};
use crate::testing::written;

fn read(items: &[Item]) -> Reader<Cursor<Vec<u8>>> {
    let mut reader = Reader::new(Cursor::new(written(items))).unwrap();
    while reader.step().unwrap().is_some() {}
    assert_eq!(reader.end(), Some(&End::Complete));
    reader
}

/// Missed items count as lost, as in a session. Missing names are replaced.
#[test]
fn what_a_recording_lacks() {
    let scope = ScopeId(9);
    let mut reader = read(&[open(1, scope.0), alloc(2, 512, 3), Item::Missed(7), event(3, EventKind::Close { scope })]);
    assert_eq!(reader.skipped().missed, 7);
    let summary = reader.summary().unwrap();
    assert_eq!(summary.lost, 7);
    let named = summary.scopes.iter().find(|scope| !scope.path.is_empty()).expect("a scope was open");
    assert!(named.path[0].contains("not in the recording") && named.used.get() == 3, "{named:?}");
}

/// The event has its exact time, which the ledger does not have.
#[test]
fn ticks_become_times() {
    let pair = |ticks, millis| Item::Clock(ClockPair { ticks, time: Duration::from_millis(millis) });
    let reader = read(&[pair(1_000, 10), pair(2_000, 20), pair(4_000, 30)]);
    for (ticks, micros) in [(1_000, 10_000), (1_500, 15_000), (3_000, 25_000), (6_000, 40_000), (500, 5_000), (0, 0)] {
        assert_eq!(reader.definitions().time(ticks), Some(Duration::from_micros(micros)), "{ticks}");
    }
    let reader = read(&[pair(1_000, 10)]);
    assert_eq!(reader.definitions().time(1_000), None);
}
