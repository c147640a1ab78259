//! Scopes that adopt threads: the allocations of such a thread in no scope count for the innermost scope of the thread that opened
//! the adopting one.

use std::collections::HashSet;

use super::{
    account_id::AccountId, accounts::Place, counts::signed, places::Places, scope::Scope, sums::Sums, thread::Thread,
    tree::NodeId,
};
use crate::model::{Bytes, OwnerThread, ScopeId, ThreadId, ThreadName, Threads};

/// A thread without a scope is compared only with the latest adopting scopes, at most this many. While there are more, the older
/// ones adopt nothing.
const MOST: usize = 64;

impl Places {
    pub(super) fn adopt(&mut self, scope: ScopeId, threads: Threads) {
        if !self.scopes.contains_key(&scope) {
            return;
        }
        if self.adopters.is_empty() {
            self.threads.iter_mut().filter(|thread| thread.entered.is_empty()).for_each(Thread::forget_latest);
        }
        self.adopters.add(scope, threads);
        self.look_up_again();
    }

    /// Returns whether the thread's name is needed to find who adopts its allocations and is not known yet.
    pub(super) fn needs_name(&mut self, thread: ThreadId) -> bool {
        if !self.adopters.is_by_name() {
            return false;
        }
        let Thread { name, entered, .. } = self.threads.get(thread);
        name.is_none() && entered.is_empty()
    }

    pub(super) fn name_thread(&mut self, thread: ThreadId, name: ThreadName) {
        let record = self.threads.get(thread);
        record.name = Some(name);
        record.forget_latest();
    }

    /// Makes threads in no scope look up again who adopts their next allocations: the adopting scopes have changed, or a thread
    /// has entered or left a scope, or a scope was reset.
    pub(super) fn look_up_again(&mut self) {
        for thread in self.adopters.looked_up.drain(..) {
            let thread = self.threads.get(thread);
            thread.is_looked_up = false;
            thread.forget_latest();
        }
    }

    /// Returns the latest scope that adopts the thread.
    pub(super) fn adopter_of(&mut self, thread: ThreadId) -> Option<ScopeId> {
        if self.adopters.is_empty() || !self.threads.get(thread).entered.is_empty() {
            return None;
        }
        self.adopters_of(thread).next()
    }

    /// Returns the scopes that adopt this thread, the latest first. The thread is in no scope.
    fn adopters_of(&self, thread: ThreadId) -> impl Iterator<Item = ScopeId> {
        let name = self.threads.known(thread).and_then(|thread| thread.name);
        let adopters = self.adopters.latest_first().take(MOST);
        adopters.filter(move |(_, threads)| threads.include(name.as_ref())).map(|(scope, _)| scope)
    }

    /// Returns the path and the owner thread of the innermost scope of the thread that opened this one. While that thread is not
    /// in this scope, such as between the polls of a task, the result is this scope itself.
    pub(super) fn innermost(&self, scope: &Scope) -> (NodeId, OwnerThread) {
        match self.opener_of(scope) {
            Some(opener) if opener.is_in_opened(scope.number) => (opener.node, opener.owner),
            _ => (scope.node, scope.owner),
        }
    }

    /// Returns the thread that opened a scope. `None` if it has ended and another thread reuses its number.
    pub(super) fn opener_of(&self, scope: &Scope) -> Option<&Thread> {
        self.threads.known(scope.opener).filter(|opener| opener.own == scope.own)
    }

    /// Notes the device of an allocation for the thread for which it counts. If scopes of several threads adopt the thread, the
    /// results of all of them depend on which scope was opened last. In that case this adds the size to what their accounts
    /// share, and returns `true`.
    pub(super) fn note_adoption(
        &mut self,
        thread: ThreadId,
        meter: u16,
        bytes: Bytes,
        is_on_device: bool,
        number: u64,
        sums: &mut Sums,
    ) -> bool {
        if self.adopters.is_empty() {
            return false;
        }
        let record = self.threads.get(thread);
        if record.entered.is_empty() && !std::mem::replace(&mut record.is_looked_up, true) {
            self.adopters.looked_up.push(thread);
        }
        let Some(adopter) = self.adopter_of(thread) else { return false };
        let Scope { own, opener, .. } = *self.scopes[&adopter];
        if is_on_device && self.opener_of(&self.scopes[&adopter]).is_some() {
            self.threads.get(opener).allocated_on.note(meter, number);
        }
        if self.adopters_of(thread).all(|other| self.scopes[&other].own == own) {
            return false;
        }
        if is_on_device {
            let adopters = self.adopters_of(thread).filter_map(|adopter| self.scopes.get(&adopter));
            let owners: HashSet<OwnerThread> = adopters.map(|scope| scope.owner).collect();
            let Sums { accounts, guests, .. } = sums;
            let mut shared: HashSet<AccountId> = HashSet::new();
            for owner in owners {
                accounts.each_of(Place::new(owner, true), meter, guests, |id, _| _ = shared.insert(id));
            }
            for id in shared {
                if let Some(account) = accounts.get_mut(id) {
                    account.share(signed(bytes));
                }
            }
        }
        true
    }
}
