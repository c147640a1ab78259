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

/// The open accounts, each with the number of the event that opened it and the number of its scopes.
#[derive(Debug, Default)]
pub(in super::super) struct PlainAccounts(BTreeMap<PlainAccount, (u64, usize)>);

impl PlainPlace {
    /// Returns whether an allocation of a thread at this place counts in the account.
    fn counts_in(&self, (of, _, counts_unscoped): PlainAccount) -> bool {
        if self.is_in_scope { self.works_for.contains(&of) } else { counts_unscoped }
    }
}

impl PlainAccounts {
    pub(in super::super) fn open(&mut self, account: PlainAccount, number: u64) {
        self.0.entry(account).or_insert((number, 0)).1 += 1;
    }

    pub(in super::super) fn close(&mut self, account: PlainAccount) {
        let (_, scopes) = self.0.get_mut(&account).expect("it is open");
        *scopes -= 1;
        self.0.retain(|_, (_, scopes)| *scopes > 0);
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

    /// Returns the accounts in which the free of a block counts, each with `true` if it holds the block.
    pub(in super::super) fn of_free(
        &self,
        block: Option<(&PlainPlace, u64)>,
        by: &PlainPlace,
        device: usize,
    ) -> Vec<(PlainAccount, bool)> {
        let holds = |account, since| block.is_some_and(|(place, number)| since < number && place.counts_in(account));
        let belongs_to_others = self.on(device).any(|(account, since)| {
            let is_of_scope = block.is_some_and(|(place, _)| place.is_in_scope);
            holds(account, since) && is_of_scope && !(by.is_in_scope && by.works_for.contains(&account.0))
        });
        // Accounts that leave out threads in no scope leave out their memory.
        let is_left_out = |(.., counts_unscoped): PlainAccount, since| {
            !counts_unscoped && block.is_some_and(|(place, number)| !place.is_in_scope && since < number)
        };
        let counts = |account, since| {
            holds(account, since) || !belongs_to_others && by.counts_in(account) && !is_left_out(account, since)
        };
        self.on(device)
            .filter(|(account, since)| counts(*account, *since))
            .map(|(account, since)| (account, holds(account, since)))
            .collect()
    }
}
