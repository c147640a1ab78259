//! The sums: what the events add up to for each group, kind of memory, device, scope path, account and pool. Each block that comes or
//! goes is counted here.

use std::collections::{HashMap, HashSet};

use super::{
    accounts::{Accounts, Place},
    counts::{Counts, signed},
    delta::GroupDelta,
    groups::{AllocGroup, AllocGroups, GroupId, GroupState},
    guests::Guests,
    live::{Attribution, Entry},
    meters::{Meter, Meters},
    peaks::KeptRange,
    pending::PendingDelta,
    pool_sums::PoolSums,
    stats::add_signed,
    threads::Threads,
    tree::{NodeId, ScopeTree},
};
use crate::model::{Device, Gauge, NumberHashBuilder, OwnerThread, ScopeId};

/// The sums of all events. `pending` and the first fields of `accounts` come first because each event uses them.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Sums {
    /// The changes of the latest events, not yet applied to the other fields.
    pub(super) pending: PendingDelta,
    pub(super) accounts: Accounts,
    pub(super) guests: Guests,
    pub(super) groups: AllocGroups,
    pub(super) meters: Meters,
    pub(super) tree: ScopeTree,
    pub(super) pools: PoolSums,
    pub(super) counts: Counts,
    /// The number of the driver's functions that other tools have replaced at the moment. They are part of `counts.lost`. A scope
    /// that opens while they are replaced reports them as well, because it misses their calls.
    pub(super) displaced: u64,
    /// The number of the event that reset the summary last.
    summary_since: u64,
    /// The peaks that are read while their scopes stay open, or after they are closed.
    pub(super) kept_peaks: HashMap<ScopeId, KeptRange, NumberHashBuilder>,
}

impl Sums {
    /// Counts a block where its thread allocated it.
    pub(super) fn count(&mut self, entry: &Entry) {
        self.pending_of(entry.attribution()).add(signed(entry.bytes));
    }

    /// Subtracts a block whose free was not observed.
    #[cold]
    pub(super) fn remove_without_free(&mut self, entry: &Entry) {
        self.remove_block(entry, Place::OUTSIDE);
        self.counts.events = self.counts.events.wrapping_sub(1);
    }

    /// Subtracts a block that a thread at this place freed.
    pub(super) fn remove_block(&mut self, entry: &Entry, by: Place) {
        if self.counts_where_allocated(entry, by) {
            self.pending_of(entry.attribution()).subtract(signed(entry.bytes));
        } else {
            self.change_apart(entry, by, GroupDelta::of_block(-1, -signed(entry.bytes)));
        }
    }

    /// Undoes [`remove_block`](Self::remove_block).
    pub(super) fn add_block_again(&mut self, entry: &Entry, by: Place) {
        if self.counts_where_allocated(entry, by) {
            self.count(entry);
        } else {
            self.change_apart(entry, by, GroupDelta::of_block(1, signed(entry.bytes)));
        }
    }

    /// Moves a block to another group. `is_new` is true if its allocation was not counted in the first one.
    pub(super) fn move_block(&mut self, before: &Entry, now: &Entry, is_new: bool) {
        self.remove_block(before, Place::OUTSIDE);
        // If the summary was reset after the allocation, the sums of allocations no longer contain it.
        let is_counted = !is_new && before.number() > self.summary_since;
        if is_counted {
            self.pending_of(before.attribution()).take_back(before.bytes.get());
        }
        self.count(now);
        if is_new || is_counted {
            self.pending.allocated(now.bytes.get());
        }
    }

    /// Returns whether the free of a block counts in the accounts in which an allocation with its attribution counts now.
    fn counts_where_allocated(&self, entry: &Entry, by: Place) -> bool {
        !self.accounts.are_open()
            || self.accounts.are_alike_since(entry.number(), by.is_in_scope()) && self.place_of_block(entry) == by
    }

    fn place_of_block(&self, entry: &Entry) -> Place {
        let is_in_scope = self.tree.is_in_scope(self.groups.get(entry.group()).node);
        Place::new(entry.attribution().owner(), is_in_scope)
    }

    /// Counts the free of a block, or undoes it, in the accounts that [`Accounts::of_free`] finds.
    #[cold]
    fn change_apart(&mut self, entry: &Entry, by: Place, delta: GroupDelta) {
        self.flush();
        let (place, number) = (self.place_of_block(entry), entry.group());
        let meter = self.groups.get(number).meter;
        if !self.apply_delta(number, &delta) {
            return;
        }
        let Self { accounts, guests, .. } = self;
        let search = accounts.of_free((place, entry.number()), by, meter, guests);
        for id in &search.found {
            let Some(account) = accounts.get_mut(*id) else { continue };
            account.apply(number, delta.bytes);
            if search.is_shared {
                // The scopes that were open at the allocation share the block already.
                account.share_after(entry.number(), signed(entry.bytes));
            }
        }
        accounts.end_search(search);
    }

    #[inline]
    fn pending_of(&mut self, attribution: Attribution) -> &mut PendingDelta {
        if !self.pending.is_of(attribution) {
            self.start_pending(attribution);
        }
        &mut self.pending
    }

    #[cold]
    fn start_pending(&mut self, attribution: Attribution) {
        self.flush();
        let is_in_scope = || self.tree.is_in_scope(self.groups.get(attribution.group()).node);
        let owner = if self.accounts.are_open() && is_in_scope() { attribution.owner() } else { OwnerThread::LAST };
        (self.pending.group, self.pending.owner) = (attribution.group(), owner);
    }

    /// Applies the pending delta to the group, the meter, the tree and the accounts. Call this before an event of another group
    /// or in other accounts, and before any of these counters is read.
    #[inline]
    pub(super) fn flush(&mut self) {
        let Some((number, delta)) = self.pending.delta() else { return };
        let owner = std::mem::take(&mut self.pending).owner;
        if self.apply_delta(number, &delta) && self.accounts.are_open() {
            self.count_for_accounts(owner, number, &delta);
        }
    }

    /// Applies allocations and their frees at one place to the accounts.
    #[inline(never)]
    fn count_for_accounts(&mut self, owner: OwnerThread, number: GroupId, delta: &GroupDelta) {
        let Self { groups, tree, guests, accounts, .. } = self;
        let AllocGroup { node, meter, .. } = *groups.get(number);
        let place = Place::new(owner, tree.is_in_scope(node));
        let is_shared = !place.is_in_scope() && accounts.are_shared(meter);
        accounts.each_of(place, meter, guests, |_, account| {
            account.apply(number, delta.bytes);
            if is_shared {
                account.share(delta.allocated);
            }
        });
    }

    /// Applies a delta to its group, the meter and the tree. Returns whether the program's view counts the group.
    fn apply_delta(&mut self, number: GroupId, delta: &GroupDelta) -> bool {
        let Self { groups, meters, tree, counts, pools, .. } = self;
        let state = groups.state(number);
        if !state.group.kind.is_taken_by_driver() {
            counts.events = counts.events.wrapping_add_signed(delta.events());
        }
        state.blocks = add_signed(state.blocks, delta.blocks.net);
        state.bytes = add_signed(state.bytes, delta.bytes.net);
        let group = &state.group;
        let Meter { level, peaks, on_device, kinds, driver, .. } = &mut meters.0[usize::from(group.meter)];
        kinds[group.kind as usize].apply(delta);
        let is_in_program = group.kind.is_on_device()
            && driver.as_mut().is_none_or(|driver| pools.count_for_views(driver, group, delta));
        if is_in_program {
            let high = level.in_use.saturating_add(delta.bytes.high);
            if state.history.must_save(peaks) || peaks.is_new_peak(high) {
                peaks.apply(&mut state.history, state.bytes.cast_signed(), delta.bytes, high);
            }
            on_device.apply(delta);
            level.apply(high, delta.bytes.net);
            tree.apply(group.node, delta);
        } else if group.is_of_pool_only() && state.history.must_save(peaks) {
            // Peaks report the memory of pools too. No peak of the program is as low as this level.
            peaks.apply(&mut state.history, state.bytes.cast_signed(), delta.bytes, i64::MIN);
        }
        is_in_program
    }

    /// Returns the number of a group.
    pub(super) fn group_number(&mut self, group: AllocGroup, threads: &Threads) -> GroupId {
        let Self { accounts, meters, groups, .. } = self;
        let in_use =
            || threads.attributions().map(Attribution::group).chain(accounts.needed_groups()).collect::<HashSet<_>>();
        let is_needed = |state: &GroupState| state.history.is_needed(&meters.0[usize::from(state.group.meter)].peaks);
        groups.number(group, in_use, is_needed)
    }

    /// Counts a free of a block that is older than the session, by a thread at this place, or the failure of that free. No thread
    /// and no scope is known to have allocated the block.
    pub(super) fn change_older(&mut self, device: Device, by: i64, place: Place) {
        self.flush();
        let Self { accounts, guests, meters, .. } = self;
        let meter = meters.index(device, Gauge::Exact);
        if accounts.are_open() {
            let is_shared = !place.is_in_scope() && accounts.are_shared(meter);
            accounts.each_of(place, meter, guests, |_, account| {
                account.change_older(by);
                if is_shared {
                    account.share(by.saturating_abs());
                }
            });
        }
        let Meter { level, peaks, driver, .. } = &mut meters.0[usize::from(meter)];
        peaks.change_older(by);
        if let Some(driver) = driver {
            driver.change(by);
        }
        level.change(by);
        peaks.raise(level.in_use);
    }

    /// Returns the device of a block.
    pub(super) fn device_of(&self, entry: &Entry) -> Device {
        self.meters.0[usize::from(self.groups.get(entry.group()).meter)].device
    }

    /// Restarts the statistics of all scope paths. The open scopes, which have these paths, count as opened now.
    pub(super) fn reset_summary(&mut self, number: u64, open: impl Iterator<Item = NodeId>) {
        self.summary_since = number;
        for Meter { level, peaks, .. } in &mut self.meters.0 {
            peaks.reset_record(level.in_use);
        }
        self.tree.reset();
        open.for_each(|node| self.tree.opened(node));
    }
}
