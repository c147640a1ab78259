//! The rule of `accounts.rs`, computed naively: each event looks at all accounts.

use std::collections::BTreeMap;

/// The place of a thread: the threads and tasks for which it works there, and whether it is in a scope.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in super::super) struct PlainPlace {
    pub(in super::super) works_for: Vec<u32>,
    pub(in super::super) is_in_scope: bool,
}

/// The thread or task, the device, and whether threads in no scope count.
pub(in super::super) type PlainAccount = (u32, usize, bool);

/// The open accounts, each with the number of the event that opened it and the number of its scopes. Then the same for the accounts
/// that whole-device scopes would have.
#[derive(Debug, Default)]
pub(in super::super) struct PlainAccounts(BTreeMap<PlainAccount, (u64, usize)>, BTreeMap<PlainAccount, (u64, usize)>);

/// The accounts in which a free counts, and whether it counts in those of several threads.
#[derive(Debug)]
pub(in super::super) struct PlainFree {
    pub(in super::super) accounts: Vec<PlainAccount>,
    pub(in super::super) is_shared: bool,
}

impl PlainPlace {
    /// Returns whether an allocation of a thread at this place counts in the account.
    fn counts_in(&self, (of, _, counts_unscoped): PlainAccount) -> bool {
        if self.is_in_scope { self.works_for.contains(&of) } else { counts_unscoped }
    }
}

impl PlainAccounts {
    fn all(&mut self, is_whole: bool) -> &mut BTreeMap<PlainAccount, (u64, usize)> {
        if is_whole { &mut self.1 } else { &mut self.0 }
    }

    pub(in super::super) fn open(&mut self, account: PlainAccount, is_whole: bool, number: u64) {
        self.all(is_whole).entry(account).or_insert((number, 0)).1 += 1;
    }

    pub(in super::super) fn close(&mut self, account: PlainAccount, is_whole: bool) {
        let all = self.all(is_whole);
        let (_, scopes) = all.get_mut(&account).expect("it is open");
        *scopes -= 1;
        all.retain(|_, (_, scopes)| *scopes > 0);
    }

    pub(in super::super) fn on(&self, device: usize) -> impl Iterator<Item = (PlainAccount, u64)> {
        self.0.iter().filter(move |((_, on, _), _)| *on == device).map(|(account, (since, _))| (*account, *since))
    }

    /// Returns whether several threads have traces in which threads in no scope count.
    pub(in super::super) fn are_shared(&self, device: usize) -> bool {
        self.on(device).filter(|((.., counts_unscoped), _)| *counts_unscoped).count() > 1
    }

    pub(in super::super) fn of_alloc(&self, place: &PlainPlace, device: usize) -> Vec<PlainAccount> {
        self.on(device).map(|(account, _)| account).filter(|account| place.counts_in(*account)).collect()
    }

    /// Returns the accounts in which the free of a block counts.
    pub(in super::super) fn of_free(
        &self,
        (place, number): (&PlainPlace, u64),
        by: &PlainPlace,
        device: usize,
    ) -> PlainFree {
        let open = self.0.iter().chain(&self.1).filter(|((_, on, _), _)| *on == device);
        let holders: Vec<u32> = open
            .filter(|(account, (since, _))| *since < number && place.counts_in(**account))
            .map(|((of, ..), _)| *of)
            .collect();
        let belongs_to_others = holders.iter().any(|of| !(by.is_in_scope && by.works_for.contains(of)));
        // A trace in a trace of the same thread to which the block belongs.
        let is_inside = |(of, ..): PlainAccount| holders.contains(&of);
        let as_allocated =
            |account: PlainAccount, since| place.counts_in(account) && (since < number || is_inside(account));
        let as_freed = |account: PlainAccount, since| {
            let (.., counts_unscoped) = account;
            // Accounts that leave out threads in no scope leave out their memory.
            let is_left_out = !counts_unscoped && !place.is_in_scope && since < number;
            !is_left_out && by.counts_in(account) && (is_inside(account) || !belongs_to_others)
        };
        let [allocated, all] = [false, true].map(|also_freed| {
            let counts = |account, since| as_allocated(account, since) || also_freed && as_freed(account, since);
            self.on(device).filter(|(account, since)| counts(*account, *since)).map(|(account, _)| account).collect()
        });
        let (shared, place): (&Vec<_>, _) = if holders.is_empty() { (&all, by) } else { (&allocated, place) };
        PlainFree { is_shared: !place.is_in_scope && shared.len() > 1, accounts: all }
    }
}
