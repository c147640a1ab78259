//! The simple implementation: blocks, levels, and scopes that copy all groups at each new maximum.

use std::collections::BTreeMap;

use super::super::super::tests::rule::{PlainAccount, PlainPlace};
use crate::model::{CallsiteId, StackId};

/// The key of a group: scopes, stack, kind, context.
pub(super) type Name = (Vec<CallsiteId>, StackId, usize, u8);
/// The bytes of each group that has some. `None` stands for blocks that are older than the session.
pub(super) type GroupTable = BTreeMap<Option<Name>, i64>;

#[derive(Clone)]
pub(super) struct WatchedBlock {
    pub(super) name: Name,
    pub(super) device: usize,
    pub(super) place: PlainPlace,
    pub(super) number: u64,
    pub(super) bytes: i64,
    pub(super) on_device: bool,
    pub(super) context: u8,
}

/// Bytes in use on one device, of all threads or of one account.
#[derive(Clone, Default)]
pub(super) struct Now {
    pub(super) in_use: i64,
    pub(super) table: GroupTable,
}

impl Now {
    pub(super) fn change(&mut self, name: Option<&Name>, by: i64) {
        self.in_use += by;
        let bytes = self.table.entry(name.cloned()).or_default();
        *bytes += by;
        if *bytes == 0 {
            self.table.remove(&name.cloned());
        }
    }

    pub(super) fn minus(&self, start: &Self) -> GroupTable {
        let mut table = self.table.clone();
        for (name, bytes) in &start.table {
            *table.entry(name.clone()).or_default() -= bytes;
        }
        table.retain(|_, bytes| *bytes != 0);
        table
    }
}

pub(super) struct SimpleScope {
    pub(super) device: usize,
    pub(super) account: Option<PlainAccount>,
    /// The account that the scope has, or would have.
    pub(super) of: PlainAccount,
    pub(super) is_watched: bool,
    pub(super) opener: usize,
    pub(super) start: Now,
    pub(super) most: i64,
    /// The groups at each moment at which the level was `most`.
    pub(super) at_most: Vec<GroupTable>,
}

impl SimpleScope {
    pub(super) fn reach(&mut self, now: &Now) {
        if now.in_use > self.most {
            self.at_most.clear();
        }
        if now.in_use >= self.most {
            self.most = now.in_use;
            let table = now.minus(&self.start);
            if !self.at_most.contains(&table) {
                self.at_most.push(table);
            }
        }
    }
}
