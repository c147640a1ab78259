//! The groups at each peak, computed naively: all groups are copied at each new maximum.

use std::collections::BTreeMap;

use super::{super::GroupAtPeak, rule::PlainAccount};
use crate::model::{CallsiteId, StackId};

/// The key of a group: scopes, stack, kind, context.
pub(super) type Name = (Vec<CallsiteId>, StackId, usize, u8);
/// The bytes of each group that has some. `None` stands for blocks that are older than the session.
pub(super) type GroupTable = BTreeMap<Option<Name>, i64>;
/// The expected peak: its bytes, and the possible tables.
pub(super) type Expected = (i64, Vec<GroupTable>);

/// Bytes in use on one device, of all threads or of one account.
#[derive(Clone, Default)]
struct Now {
    in_use: i64,
    table: GroupTable,
}

impl Now {
    fn change(&mut self, name: Option<&Name>, by: i64) {
        self.in_use += by;
        let bytes = self.table.entry(name.cloned()).or_default();
        *bytes += by;
        if *bytes == 0 {
            self.table.remove(&name.cloned());
        }
    }

    fn minus(&self, start: &Self) -> GroupTable {
        let mut table = self.table.clone();
        for (name, bytes) in &start.table {
            *table.entry(name.clone()).or_default() -= bytes;
        }
        table.retain(|_, bytes| *bytes != 0);
        table
    }
}

/// A scope that keeps the groups of its peak.
struct Watched {
    of: (usize, Option<PlainAccount>),
    start: Now,
    most: i64,
    /// The groups at each moment at which the level was `most`.
    at_most: Vec<GroupTable>,
}

/// A kept peak that is read in parts, between other events.
pub(super) struct ReadPeak {
    pub(super) expected: Expected,
    pub(super) groups: Vec<GroupAtPeak>,
    pub(super) next_part: usize,
}

#[derive(Default)]
pub(super) struct PlainPeaks {
    now: BTreeMap<(usize, Option<PlainAccount>), Now>,
    watched: BTreeMap<u64, Watched>,
    /// The highest sum of the live blocks of each device, and the groups when it was first reached.
    records: [(i64, GroupTable); 2],
    /// The same, regardless of resets, with the groups of each moment at which it was reached.
    highest: [Expected; 2],
    pub(super) kept: BTreeMap<u64, ReadPeak>,
    pub(super) compared: usize,
}

impl PlainPeaks {
    pub(super) fn change(&mut self, device: usize, name: Option<&Name>, by: i64, accounts: &[PlainAccount]) {
        for account in accounts.iter().copied().map(Some).chain([None]) {
            self.now.entry((device, account)).or_default().change(name, by);
        }
    }

    /// Starts to watch a scope, or starts again. The account is `None` if the scope counts all threads.
    pub(super) fn watch(&mut self, scope: u64, device: usize, account: Option<PlainAccount>) {
        let of = (device, account);
        let start = self.now.get(&of).cloned().unwrap_or_default();
        self.watched.insert(scope, Watched { of, most: start.in_use, at_most: vec![GroupTable::new()], start });
    }

    /// Starts again to watch a scope, if it is watched.
    pub(super) fn reset(&mut self, scope: u64) {
        if let Some((device, account)) = self.watched.get(&scope).map(|watched| watched.of) {
            self.watch(scope, device, account);
        }
    }

    pub(super) fn close(&mut self, scope: u64) {
        self.keep(scope, scope);
        self.watched.remove(&scope);
    }

    /// Keeps the peak of a scope, if it is watched.
    pub(super) fn keep(&mut self, scope: u64, under: u64) -> bool {
        let watched = self.watched.get(&scope);
        let expected = watched.map(|scope| (scope.most - scope.start.in_use, scope.at_most.clone()));
        expected.is_some_and(|expected| self.keep_expected(under, expected))
    }

    /// Keeps the peak of a device, if there is one.
    pub(super) fn keep_of_device(&mut self, on: usize, under: u64, since_reset: bool) -> bool {
        let (most, table) = self.records[on].clone();
        let expected = if since_reset { (most, vec![table]) } else { self.highest[on].clone() };
        expected.0 > 0 && self.keep_expected(under, expected)
    }

    fn keep_expected(&mut self, under: u64, expected: Expected) -> bool {
        self.kept.insert(under, ReadPeak { expected, groups: Vec::new(), next_part: 0 });
        true
    }

    pub(super) fn reset_records(&mut self) {
        self.records = Default::default();
    }

    /// Updates the peaks after an event.
    pub(super) fn update(&mut self) {
        for Watched { of, start, most, at_most } in self.watched.values_mut() {
            let now = self.now.entry(*of).or_default();
            if now.in_use > *most {
                at_most.clear();
            }
            if now.in_use >= *most {
                *most = now.in_use;
                let table = now.minus(start);
                if !at_most.contains(&table) {
                    at_most.push(table);
                }
            }
        }
        for (device, (record, highest)) in self.records.iter_mut().zip(&mut self.highest).enumerate() {
            let now = self.now.entry((device, None)).or_default();
            let live = now.in_use - now.table.get(&None).unwrap_or(&0);
            if live <= record.0 && live < highest.0 {
                continue;
            }
            let mut table = now.table.clone();
            table.remove(&None);
            if live > highest.0 {
                *highest = (live, Vec::new());
            }
            if live == highest.0 {
                highest.1.push(table.clone());
            }
            if live > record.0 {
                *record = (live, table);
            }
        }
    }
}
