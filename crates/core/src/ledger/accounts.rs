//! Accounts: the bytes that count for the open traces of one thread or of one task, on one device.
//!
//! A trace counts the allocations of its own thread, of threads that are in its thread's scopes, and of threads that are in no
//! scope. A trace of one thread, or of a task, leaves out the threads in no scope and the memory that they allocate while it is
//! open. A free counts in each account that holds the block, because the block was allocated in it. In the other accounts it
//! counts like an allocation of the thread that frees, unless the block belongs to a trace that this thread is not in. Therefore
//! traces of other threads do not affect each other as long as their threads exchange no memory.

use std::collections::HashMap;

use super::{
    account_id::AccountId,
    delta::Delta,
    groups::GroupId,
    guests::Guests,
    meters::UsageLevel,
    peaks::{GroupBytes, PeakHistory},
};
use crate::model::{NumberHashBuilder, OwnerThread};

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) level: UsageLevel,
    /// The number of the event that opened the account. The account holds the blocks that were allocated in it since then.
    since: u64,
    /// The number of open scopes. An account without open scopes counts nothing.
    open: usize,
    /// The number of kept peaks that need this account.
    kept: usize,
    /// The bytes that count here and in accounts of other threads, because the thread that allocated or freed them is in no scope, or
    /// because scopes of several threads adopt it.
    pub(super) shared: u64,
    /// The groups. Present while a scope or a kept peak needs to know which allocations made a peak.
    pub(super) groups: Option<Box<AccountGroups>>,
}

/// The bytes of an account in each group. The counts start when this is created.
#[derive(Debug)]
pub(super) struct AccountGroups {
    pub(super) peaks: PeakHistory,
    pub(super) all: Vec<(GroupId, GroupBytes)>,
    known: HashMap<GroupId, usize, NumberHashBuilder>,
    /// The index of the group that changed last.
    latest: usize,
}

/// All accounts.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    all: HashMap<AccountId, Account, NumberHashBuilder>,
    /// The open accounts that count threads in no scope.
    unscoped: Vec<AccountId>,
    /// The number of open accounts.
    open: usize,
    /// All open ones were open when the event with this number was applied.
    complete_since: u64,
    /// An empty level. It holds on to the memory of a level that is no longer needed, so that the next one can reuse it.
    spare: UsageLevel,
    /// The result of the last search, kept so that its memory can be reused.
    found: Vec<AccountId>,
}

/// The place of a thread that allocates or frees. All threads in no scope are at the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    owner: OwnerThread,
    is_in_scope: bool,
}

impl Place {
    /// The place of threads in no scope. Blocks that no thread frees are freed there: those of a destroyed context, and those whose free
    /// was missed.
    pub(super) const OUTSIDE: Self = Self { owner: OwnerThread::LAST, is_in_scope: false };

    pub(super) fn new(owner: OwnerThread, is_in_scope: bool) -> Self {
        if is_in_scope { Self { owner, is_in_scope } } else { Self::OUTSIDE }
    }

    pub(super) fn is_in_scope(self) -> bool {
        self.is_in_scope
    }
}

impl Account {
    fn is_open(&self) -> bool {
        self.open > 0
    }

    pub(super) fn apply(&mut self, group: GroupId, delta: Delta) {
        let high = self.level.in_use.saturating_add(delta.high);
        if let Some(groups) = &mut self.groups {
            groups.apply(group, delta, high);
        }
        self.level.apply(high, delta.net);
    }

    /// Counts the free of a block that is older than the session (`by` is below 0), or its failed free.
    pub(super) fn change_older(&mut self, by: i64) {
        self.level.change(by);
        if let Some(groups) = &mut self.groups {
            groups.peaks.change_older(by);
            groups.peaks.raise(self.level.in_use);
        }
    }
}

impl Default for AccountGroups {
    fn default() -> Self {
        Self { peaks: PeakHistory::of_account(), all: Vec::new(), known: HashMap::default(), latest: 0 }
    }
}

impl AccountGroups {
    /// Applies the delta of a group. `high` is the highest sum of all groups during it.
    fn apply(&mut self, group: GroupId, delta: Delta, high: i64) {
        let Self { peaks, all, known, latest } = self;
        if all.get(*latest).is_none_or(|(number, _)| *number != group) {
            *latest = *known.entry(group).or_insert_with(|| {
                all.push((group, GroupBytes::default()));
                all.len() - 1
            });
        }
        all[*latest].1.apply(delta, high, peaks);
    }

    /// Returns the groups that are still needed. The others are removed.
    fn needed(&mut self) -> impl Iterator<Item = GroupId> {
        let Self { peaks, all, known, latest } = self;
        // While a kept peak is read in parts, the indices must not change.
        if !peaks.has_kept() {
            all.retain(|(_, group)| group.bytes != 0 || group.history.is_needed(peaks));
            known.clear();
            known.extend(all.iter().enumerate().map(|(at, (number, _))| (*number, at)));
            *latest = 0;
        }
        all.iter().map(|(number, _)| *number)
    }
}

impl Accounts {
    /// Returns whether some account is open.
    #[inline]
    pub(super) fn are_open(&self) -> bool {
        self.open > 0
    }

    /// Returns whether all open accounts that count the place of this block hold it.
    #[inline]
    pub(super) fn hold(&self, number: u64) -> bool {
        self.complete_since < number
    }

    /// Opens the account for one more scope. `number` is the number of the event that opens the scope.
    pub(super) fn open(&mut self, id: AccountId, number: u64) {
        let spare = &mut self.spare;
        let account =
            self.all.entry(id).or_insert_with(|| Account { level: std::mem::take(spare), ..Account::default() });
        account.open += 1;
        if account.open == 1 {
            account.since = number;
            self.complete_since = number;
            self.open += 1;
            if id.counts_unscoped {
                self.unscoped.push(id);
            }
        }
    }

    /// Closes the account for one scope.
    pub(super) fn close(&mut self, id: AccountId) {
        let Some(account) = self.all.get_mut(&id) else { return };
        account.open -= 1;
        if account.open == 0 {
            self.open -= 1;
            if id.counts_unscoped {
                self.unscoped.retain(|other| *other != id);
            }
        }
        self.drop_unneeded(id);
    }

    /// Keeps the account for one more kept peak.
    pub(super) fn keep(&mut self, id: AccountId) {
        self.all.entry(id).or_default().kept += 1;
    }

    /// Releases the account for one kept peak.
    pub(super) fn release(&mut self, id: AccountId) {
        if let Some(account) = self.all.get_mut(&id) {
            account.kept -= 1;
            self.drop_unneeded(id);
        }
    }

    fn drop_unneeded(&mut self, id: AccountId) {
        let Some(account) = self.all.get_mut(&id) else { return };
        if account.open + account.kept == 0 {
            if let Some(Account { level, .. }) = self.all.remove(&id) {
                self.spare.peaks = level.peaks;
            }
        } else if account.groups.as_ref().is_some_and(|groups| groups.peaks.is_idle()) {
            account.groups = None;
        }
    }

    pub(super) fn get(&self, id: AccountId) -> Option<&Account> {
        self.all.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: AccountId) -> Option<&mut Account> {
        self.all.get_mut(&id)
    }

    /// Returns whether threads in no scope count for traces of several threads on the device of this meter.
    pub(super) fn are_shared(&self, meter: u16) -> bool {
        self.unscoped.iter().filter(|id| id.meter == meter).nth(1).is_some()
    }

    /// Calls `found` with each open account that counts the allocations of a place on the device of a meter.
    pub(super) fn each_of(
        &mut self,
        place: Place,
        meter: u16,
        guests: &Guests,
        mut found: impl FnMut(AccountId, &mut Account),
    ) {
        let Self { all, unscoped, .. } = self;
        let mut visit = |id: AccountId| {
            if let Some(account) = all.get_mut(&id).filter(|account| account.is_open()) {
                found(id, account);
            }
        };
        if place.is_in_scope {
            guests.for_each_thread(place.owner, |of| {
                for counts_unscoped in [true, false] {
                    visit(AccountId { of, meter, counts_unscoped });
                }
            });
        } else {
            unscoped.iter().filter(|id| id.meter == meter).for_each(|id| visit(*id));
        }
    }

    /// Finds the open accounts in which the free of a block counts. `block` is the place and the number of its allocation; `None`
    /// if the block is older than the session. Returns the accounts, first those that hold the block, and how many of them hold
    /// it. Return the list to [`end_search`](Self::end_search) afterwards.
    pub(super) fn of_free(
        &mut self,
        block: Option<(Place, u64)>,
        by: Place,
        meter: u16,
        guests: &Guests,
    ) -> (Vec<AccountId>, usize) {
        let mut found = std::mem::take(&mut self.found);
        found.clear();
        let mut belongs_to_others = false;
        let is_left_out = |id: AccountId, since: u64| {
            !id.counts_unscoped && block.is_some_and(|(place, number)| !place.is_in_scope && since < number)
        };
        if let Some((place, number)) = block {
            self.each_of(place, meter, guests, |id, account| {
                if account.since < number {
                    found.push(id);
                }
            });
            let is_in = |id: &AccountId| by.is_in_scope && guests.threads(by.owner).any(|thread| thread == id.of);
            belongs_to_others = place.is_in_scope && !found.iter().all(is_in);
        }
        let held = found.len();
        if !belongs_to_others {
            self.each_of(by, meter, guests, |id, account| {
                if !found[..held].contains(&id) && !is_left_out(id, account.since) {
                    found.push(id);
                }
            });
        }
        (found, held)
    }

    /// Keeps the list of a finished search, so that its memory can be reused.
    pub(super) fn end_search(&mut self, found: Vec<AccountId>) {
        self.found = found;
    }

    /// Returns the groups that peaks of accounts need.
    pub(super) fn needed_groups(&mut self) -> impl Iterator<Item = GroupId> {
        self.all.values_mut().filter_map(|account| account.groups.as_mut()).flat_map(|groups| groups.needed())
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.unscoped.is_empty() && self.open == 0
    }
}
