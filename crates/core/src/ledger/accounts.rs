//! Accounts: the bytes that count for the open traces of one thread or of one task, on one device.
//!
//! A trace counts the allocations of its own thread, of threads that are in its thread's scopes, and of threads that are in no
//! scope. A trace of one thread, or of a task, leaves out the threads in no scope and the memory that they allocate while it is
//! open. A free counts in each account that holds the block, because the block was allocated in it, and for the traces inside
//! these, on any thread. In the other accounts it counts like an allocation of the thread that frees, unless the block belongs to
//! a trace that this thread is not in. Therefore traces of other threads do not affect each other as long as their threads
//! exchange no memory.
//!
//! A scope whose numbers are those of the whole device has no account: it counts all threads, or is sampled. But the memory that
//! would be in its account belongs to it.

use std::collections::{HashMap, VecDeque};

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
    /// The open scopes, the oldest first. An account without open scopes counts nothing. This is a deque because programs that do
    /// not close the last scope first usually close the first one.
    scopes: VecDeque<SharedBefore>,
    /// The number of kept peaks that need this account.
    kept: usize,
    /// The bytes that count here and in accounts of other threads, because the thread that allocated or freed them is in no scope, or
    /// because scopes of several threads adopt it.
    shared: i64,
    /// The groups. Present while a scope or a kept peak needs to know which allocations made a peak.
    pub(super) groups: Option<Box<AccountGroups>>,
}

/// A scope that is open in an account.
#[derive(Clone, Copy, Debug)]
struct SharedBefore {
    /// The number of the event with which the scope started, or was reset.
    number: u64,
    /// The shared bytes that the scope leaves out.
    shared: i64,
}

/// The scopes of a thread or a task whose numbers are those of the whole device.
#[derive(Debug)]
struct WholeDevice {
    /// The account that these scopes would have.
    id: AccountId,
    /// The number of the event that opened the first of them.
    since: u64,
    open: usize,
}

/// The accounts in which the free of a block counts.
#[derive(Debug, Default)]
pub(super) struct FreeSearch {
    pub(super) found: Vec<AccountId>,
    /// True if these are accounts of several threads, because the block was allocated or freed by a thread in no scope.
    pub(super) is_shared: bool,
    /// The threads and tasks to whose open scopes the block belongs.
    holders: Vec<OwnerThread>,
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

/// All accounts. The first two fields come first because each free uses them.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Accounts {
    /// The number of open accounts.
    open: usize,
    /// For threads in no scope, and for those in scopes: the number of an event. If a block was allocated after it and is freed
    /// at the same place, the free counts exactly where the allocation does.
    alike_since: [u64; 2],
    all: HashMap<AccountId, Account, NumberHashBuilder>,
    /// The open accounts that count threads in no scope.
    unscoped: Vec<AccountId>,
    whole: Vec<WholeDevice>,
    /// An empty account. It holds on to the memory of one that is no longer needed, so that the next one can reuse it.
    spare: Account,
    /// The result of the last search, kept so that its memory can be reused.
    search: FreeSearch,
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
        !self.scopes.is_empty()
    }

    /// Counts bytes that count in accounts of other threads as well. Below 0 if an allocation is taken back.
    pub(super) fn share(&mut self, bytes: i64) {
        self.shared = self.shared.saturating_add(bytes);
    }

    /// Like [`share`](Self::share), for the scopes that started after the event with this number.
    pub(super) fn share_after(&mut self, number: u64, bytes: i64) {
        let first = self.scopes.partition_point(|scope| scope.number <= number);
        if first == 0 {
            return self.share(bytes);
        }
        self.scopes.range_mut(first..).for_each(|scope| scope.shared = scope.shared.saturating_sub(bytes));
    }

    /// Returns the bytes that were shared since the start of the scope that started with this event.
    pub(super) fn shared_since(&self, number: u64) -> u64 {
        let scope = self.scope(number).and_then(|at| self.scopes.get(at));
        scope.map_or(0, |scope| self.shared.saturating_sub(scope.shared).max(0).unsigned_abs())
    }

    fn scope(&self, number: u64) -> Option<usize> {
        self.scopes.binary_search_by_key(&number, |scope| scope.number).ok()
    }

    fn start(&mut self, number: u64) {
        self.scopes.push_back(SharedBefore { number, shared: self.shared });
    }

    fn end(&mut self, number: u64) {
        if let Some(at) = self.scope(number) {
            self.scopes.remove(at);
        }
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

    /// Returns whether the free of the block with this number, at the place where it was allocated, counts exactly where the
    /// allocation does.
    #[inline]
    pub(super) fn are_alike_since(&self, number: u64, is_in_scope: bool) -> bool {
        self.alike_since[usize::from(is_in_scope)] < number
    }

    /// Opens the account for one more scope. `number` is the number of the event that opens the scope.
    pub(super) fn open(&mut self, id: AccountId, number: u64) {
        let Self { all, spare, .. } = self;
        let account = all.entry(id).or_insert_with(|| std::mem::take(spare));
        if !account.is_open() {
            account.since = number;
            self.alike_since = [number; 2];
            self.open += 1;
            if id.counts_unscoped {
                self.unscoped.push(id);
            }
        }
        self.start(id, number);
    }

    /// Starts a scope of the account, or starts it again.
    fn start(&mut self, id: AccountId, number: u64) {
        if let Some(account) = self.all.get_mut(&id) {
            account.start(number);
        }
        // Only the scopes that were open before share the blocks that threads in no scope have allocated.
        if id.counts_unscoped && self.unscoped.len() > 1 {
            self.alike_since[0] = number;
        }
    }

    /// Resets a scope of the account that started with the event `before`.
    pub(super) fn reset(&mut self, id: AccountId, before: u64, number: u64) {
        if let Some(account) = self.all.get_mut(&id) {
            account.end(before);
        }
        self.start(id, number);
    }

    /// Closes the account for the scope that started with this event.
    pub(super) fn close(&mut self, id: AccountId, number: u64) {
        let Some(account) = self.all.get_mut(&id) else { return };
        account.end(number);
        if !account.is_open() {
            self.open -= 1;
            if id.counts_unscoped {
                self.unscoped.retain(|other| *other != id);
            }
        }
        self.drop_unneeded(id);
    }

    /// Opens a scope whose numbers are those of the whole device. `id` is the account that it would have.
    pub(super) fn open_whole(&mut self, id: AccountId, number: u64) {
        match self.whole.iter_mut().find(|whole| whole.id == id) {
            Some(whole) => whole.open += 1,
            None => self.whole.push(WholeDevice { id, since: number, open: 1 }),
        }
    }

    /// Closes a scope that was opened by [`open_whole`](Self::open_whole).
    pub(super) fn close_whole(&mut self, id: AccountId) {
        if let Some(at) = self.whole.iter().position(|whole| whole.id == id) {
            self.whole[at].open -= 1;
            if self.whole[at].open == 0 {
                self.whole.swap_remove(at);
            }
        }
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
        if !account.is_open() && account.kept == 0 {
            if let Some(Account { level, scopes, .. }) = self.all.remove(&id) {
                let level = UsageLevel { peaks: level.peaks, ..UsageLevel::default() };
                self.spare = Account { level, scopes, ..Account::default() };
            }
        } else if account.groups.as_ref().is_some_and(|groups| groups.peaks.is_idle()) {
            account.groups = None;
        }
    }

    /// Returns the level of this account; `None` if there is no account.
    pub(super) fn level(&mut self, id: Option<AccountId>) -> Option<&mut UsageLevel> {
        Some(&mut self.get_mut(id?)?.level)
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

    /// Finds the open accounts in which the free of a block counts. `place` and `number` are those of its allocation, `by` is the
    /// place of its free. Return the result to [`end_search`](Self::end_search) afterwards.
    pub(super) fn of_free(
        &mut self,
        (place, number): (Place, u64),
        by: Place,
        meter: u16,
        guests: &Guests,
    ) -> FreeSearch {
        let FreeSearch { mut found, mut holders, .. } = std::mem::take(&mut self.search);
        found.clear();
        holders.clear();
        let is_of = |place: Place, of| place.is_in_scope && guests.threads(place.owner).any(|thread| thread == of);
        let counts_place = |id: AccountId| is_of(place, id.of) || !place.is_in_scope && id.counts_unscoped;
        let whole = self.whole.iter().filter(|whole| whole.id.meter == meter && whole.since < number);
        holders.extend(whole.map(|whole| whole.id).filter(|id| counts_place(*id)).map(|id| id.of));
        self.each_of(place, meter, guests, |id, account| {
            if account.since < number {
                holders.push(id.of);
            }
        });
        // The accounts that hold the block, and those of the traces inside these.
        let counts_as_allocated =
            |id: AccountId, since: u64| counts_place(id) && (since < number || holders.contains(&id.of));
        self.each_of(place, meter, guests, |id, account| {
            if counts_as_allocated(id, account.since) {
                found.push(id);
            }
        });
        let belongs_to_others = !holders.iter().all(|of| is_of(by, *of));
        let are_several = found.len() > 1;
        self.each_of(by, meter, guests, |id, account| {
            let is_left_out = !id.counts_unscoped && !place.is_in_scope && account.since < number;
            let counts_as_freed = !is_left_out && (!belongs_to_others || holders.contains(&id.of));
            if counts_as_freed && !counts_as_allocated(id, account.since) {
                found.push(id);
            }
        });
        let is_shared =
            if holders.is_empty() { !by.is_in_scope && found.len() > 1 } else { !place.is_in_scope && are_several };
        FreeSearch { found, is_shared, holders }
    }

    /// Keeps the result of a finished search, so that its memory can be reused.
    pub(super) fn end_search(&mut self, search: FreeSearch) {
        self.search = search;
    }

    /// Returns the groups that peaks of accounts need.
    pub(super) fn needed_groups(&mut self) -> impl Iterator<Item = GroupId> {
        self.all.values_mut().filter_map(|account| account.groups.as_mut()).flat_map(|groups| groups.needed())
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.unscoped.is_empty() && self.whole.is_empty() && self.open == 0
    }
}
