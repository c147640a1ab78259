//! Tests with random histories of events.

use std::{collections::BTreeMap, time::Duration};

use super::{
    super::super::{
        AllocGroup, GroupAtPeak, Ledger, NodeId, ScopeNode,
        tests::{
            numbers,
            rule::{PlainAccount, PlainAccounts, PlainPlace},
        },
    },
    simple::{GroupTable, Now, SimpleScope, WatchedBlock},
};
use crate::model::{
    Block, Bytes, CallsiteId, Counted, Device, Event, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, Space,
    StackId, ThreadId, Trace,
};

const THREADS: usize = 3;

struct SimpleEntered {
    scope: u64,
    by_opening: bool,
}

/// The expected peak: its bytes, and the possible tables.
type Expected = (i64, Vec<GroupTable>);

/// A kept peak that is read in parts, between other events.
struct ReadPeak {
    expected: Expected,
    groups: Vec<GroupAtPeak>,
    next_part: usize,
}

impl From<Expected> for ReadPeak {
    fn from(expected: Expected) -> Self {
        Self { expected, groups: Vec::new(), next_part: 0 }
    }
}

#[derive(Default)]
struct History {
    ledger: Ledger,
    number: u64,
    live: BTreeMap<u64, WatchedBlock>,
    freed: [Option<(u64, Option<WatchedBlock>)>; THREADS],
    /// The last free of each thread, if it was of an older block: the device and the bytes.
    older_freed: [Option<(usize, i64)>; THREADS],
    now: BTreeMap<(usize, Option<PlainAccount>), Now>,
    accounts: PlainAccounts,
    /// The highest sum of the live blocks of each device, and the groups when it was first reached.
    records: [(i64, GroupTable); 2],
    /// The same, regardless of resets, with the groups of each moment at which it was reached.
    highest: [Expected; 2],
    scopes: BTreeMap<u64, SimpleScope>,
    entered: [Vec<SimpleEntered>; THREADS],
    kept: BTreeMap<u64, ReadPeak>,
    ids: u64,
    compared: usize,
    /// The thread, stack, kind, context and device of the last allocation.
    last: Option<(usize, (StackId, MemKind, u8, usize))>,
}

fn device(ordinal: usize) -> Device {
    Device { family: Family::Cuda, ordinal: u32::try_from(ordinal).unwrap() }
}

fn thread_id(thread: usize) -> ThreadId {
    ThreadId(u32::try_from(thread).unwrap() + 1)
}

impl History {
    fn post(&mut self, kind: &EventKind, thread: usize) -> Option<Trace> {
        self.number += 1;
        let time = Duration::from_millis(self.number);
        self.ledger.apply(&Event { number: self.number, time, thread: thread_id(thread), kind });
        self.ledger.last_trace()
    }

    fn now(&mut self, device: usize, account: Option<PlainAccount>) -> &mut Now {
        self.now.entry((device, account)).or_default()
    }

    /// Returns the place at which a thread allocates and frees. Other tests check the threads that it works for.
    fn place(&mut self, thread: usize) -> PlainPlace {
        let (node, owner) = self.ledger.place_of(thread_id(thread));
        let works_for = self.ledger.guests.threads(owner).map(|thread| thread.0).collect();
        PlainPlace { works_for, is_in_scope: self.ledger.tree.is_in_scope(node) }
    }

    fn change_in(&mut self, plain: &WatchedBlock, sign: i64, accounts: &[PlainAccount]) {
        if plain.on_device {
            for account in accounts.iter().copied().map(Some).chain([None]) {
                self.now(plain.device, account).change(Some(&plain.name), sign * plain.bytes);
            }
        }
    }

    fn add(&mut self, plain: &WatchedBlock) {
        let accounts = self.accounts.of_alloc(&plain.place, plain.device);
        self.change_in(plain, 1, &accounts);
    }

    /// Applies the free of a block by a thread at this place, or undoes it after it failed.
    fn change(&mut self, plain: &WatchedBlock, sign: i64, by: &PlainPlace) {
        let free = self.accounts.of_free((&plain.place, plain.number), by, plain.device);
        self.change_in(plain, sign, &free.accounts);
    }

    fn change_older(&mut self, device: usize, by: i64, thread: usize) {
        let place = self.place(thread);
        for account in self.accounts.of_alloc(&place, device).into_iter().map(Some).chain([None]) {
            self.now(device, account).change(None, by);
        }
    }

    /// Updates the expected peaks after an event.
    fn update_peaks(&mut self) {
        for scope in self.scopes.values_mut().filter(|scope| scope.is_watched) {
            scope.reach(self.now.entry((scope.device, scope.account)).or_default());
        }
        for (device, ((most, at_most), highest)) in self.records.iter_mut().zip(&mut self.highest).enumerate() {
            let now = self.now.entry((device, None)).or_default();
            let live: i64 = now.table.iter().filter(|(name, _)| name.is_some()).map(|(_, bytes)| bytes).sum();
            if live > *most {
                *most = live;
                at_most.clone_from(&now.table);
                at_most.remove(&None);
            }
            if live >= highest.0 {
                if live > highest.0 {
                    *highest = (live, Vec::new());
                }
                let mut table = now.table.clone();
                table.remove(&None);
                highest.1.push(table);
            }
        }
    }

    fn expected(&self, scope: u64) -> Expected {
        let scope = &self.scopes[&scope];
        (scope.most - scope.start.in_use, scope.at_most.clone())
    }

    fn new_id(&mut self) -> ScopeId {
        self.ids += 1;
        ScopeId(self.ids)
    }

    /// Reads one part of a kept peak. Compares the peak after the last part and then returns `true`.
    fn read(&mut self, id: u64, seed: u64) -> bool {
        let kept = self.kept.get_mut(&id).unwrap();
        let Some(part) = self.ledger.peak_part(ScopeId(id), kept.next_part) else {
            self.compare(id, seed);
            return true;
        };
        kept.next_part += 1;
        kept.groups.extend(part);
        false
    }

    fn compare(&mut self, id: u64, seed: u64) {
        let Some(ReadPeak { expected: (most, tables), groups, .. }) = self.kept.remove(&id) else { return };
        let id = ScopeId(id);
        let peak = self.ledger.kept_peak(id).expect("it is kept");
        assert_eq!(peak.bytes.get(), most, "seed {seed}");
        self.ledger.release_peak(id);
        let name = |group: &AllocGroup| Some((self.path(group.node), group.stack, group.kind as usize, group.context));
        let mut table = GroupTable::new();
        for GroupAtPeak { group, bytes } in groups {
            assert_eq!(table.insert(name(&group), bytes.get()), None, "seed {seed}: each group once");
        }
        if peak.older != 0 {
            table.insert(None, peak.older.get());
        }
        assert_eq!(table.values().sum::<i64>(), most, "seed {seed}: it adds up");
        assert!(tables.contains(&table), "seed {seed}: {table:#?}\nis none of {tables:#?}");
        self.compared += 1;
    }

    /// Returns the scopes of a path. Other tests check the paths and the owner threads.
    fn path(&self, mut node: NodeId) -> Vec<CallsiteId> {
        let mut path = Vec::new();
        while node != NodeId::NONE {
            let ScopeNode { parent, callsite, .. } = *self.ledger.tree.node(node);
            path.extend((parent != NodeId::NONE).then_some(callsite));
            node = parent;
        }
        path.reverse();
        path
    }

    fn open(&mut self, thread: usize, on: usize, counts: Counted, is_watched: bool, callsite: CallsiteId) {
        let id = self.new_id();
        let spec = ScopeSpec { counts, callsite, at_peak: is_watched, ..ScopeSpec::exact(device(on)) };
        self.post(&EventKind::Open { scope: id, spec }, thread);
        let own = self.ledger.thread(thread_id(thread)).own.0;
        let is_whole = counts == Counted::AllThreads;
        let of = (own, on, is_whole || counts == Counted::OwnAndUnscoped);
        self.accounts.open(of, is_whole, self.number);
        let account = (!is_whole).then_some(of);
        let start = self.now(on, account).clone();
        let scope = SimpleScope {
            device: on,
            of,
            account,
            is_watched,
            opener: thread,
            most: start.in_use,
            at_most: vec![GroupTable::new()],
            start,
        };
        self.scopes.insert(id.0, scope);
        self.entered[thread].push(SimpleEntered { scope: id.0, by_opening: true });
    }

    /// Queries a scope: keeps its peak, resets it or closes it.
    fn query(&mut self, scope: u64, thread: usize, how: usize) {
        let id = ScopeId(scope);
        let is_watched = self.scopes[&scope].is_watched;
        match how {
            0 => {
                let under = self.new_id();
                assert_eq!(self.ledger.keep_peak(id, under).is_some(), is_watched);
                if is_watched {
                    let expected = self.expected(scope);
                    self.kept.insert(under.0, expected.into());
                }
            }
            1 => {
                self.post(&EventKind::Reset { scope: id }, thread);
                let of = &self.scopes[&scope];
                let start = self.now.get(&(of.device, of.account)).cloned().unwrap_or_default();
                let of = self.scopes.get_mut(&scope).unwrap();
                (of.most, of.at_most, of.start) = (start.in_use, vec![GroupTable::new()], start);
            }
            _ => {
                let expected = self.expected(scope);
                let trace = self.post(&EventKind::Close { scope: id }, thread).expect("it is open");
                if is_watched {
                    assert_eq!(trace.peak_over_start().get().cast_signed(), expected.0);
                    self.kept.insert(scope, expected.into());
                }
                let closed = self.scopes.remove(&scope).unwrap();
                self.accounts.close(closed.of, closed.account.is_none());
                self.entered[closed.opener].retain(|entered| (entered.scope, entered.by_opening) != (scope, true));
            }
        }
    }

    #[allow(clippy::too_many_lines, reason = "it is a list of possible events")]
    fn step(&mut self, seed: u64, stacks: usize, random: &mut impl FnMut(usize) -> usize) {
        // Half of the events are like the last ones, so that many take the fast path.
        let last = self.last.filter(|_| random(2) == 0);
        let thread = last.map_or_else(|| random(THREADS), |(thread, _)| thread);
        match random(21) {
            0..6 => {
                let name = random(40) as u64 * 512;
                let kind = MemKind::ALL[[0, 0, 1, 1, 2, 3, 4, 5][random(8)]];
                let stack = StackId(u32::try_from(random(stacks)).unwrap());
                let context = u8::try_from(random(2)).unwrap();
                let tag = (stack, kind, context, random(8) / 7);
                let tag = last.map_or(tag, |(_, tag)| tag);
                self.last = Some((thread, tag));
                let (stack, kind, context, on) = tag;
                // There are few different sizes, so that the same level is reached again.
                let bytes = [0, 1, 1, 2, 3, 5, 8][random(7)];
                let block = Block { context, stack, ..Block::new(device(on), Bytes::new(bytes), kind) };
                let node = self.ledger.node_of(thread_id(thread));
                let place = self.place(thread);
                let plain = WatchedBlock {
                    name: (self.path(node), stack, kind as usize, context),
                    device: on,
                    place,
                    number: self.number + 1,
                    bytes: bytes.cast_signed(),
                    on_device: kind.is_on_device(),
                    context,
                };
                self.post(&EventKind::Alloc { key: Key::new(Space::Address, name), block }, thread);
                if let Some(missed) = self.live.remove(&name) {
                    self.change(&missed, -1, &PlainPlace::default());
                }
                self.add(&plain);
                self.live.insert(name, plain);
            }
            6..10 => {
                let names: Vec<u64> = self.live.keys().copied().collect();
                let is_known = !names.is_empty() && random(8) > 0;
                let name = if is_known { names[random(names.len())] } else { 1 << 40 };
                let older = (!is_known && random(2) == 0).then(|| (random(2), random(4).cast_signed() as i64));
                let block =
                    older.map(|(on, bytes)| Block::new(device(on), Bytes::new(bytes.unsigned_abs()), MemKind::Device));
                self.post(&EventKind::Free { key: Key::new(Space::Address, name), block }, thread);
                let removed = self.live.remove(&name);
                let by = self.place(thread);
                if let Some(removed) = &removed {
                    self.change(removed, -1, &by);
                }
                self.older_freed[thread] = None;
                if let (Some((on, bytes)), None) = (older, &removed) {
                    self.change_older(on, -bytes, thread);
                    self.older_freed[thread] = Some((on, bytes));
                }
                self.freed[thread] = Some((name, removed));
            }
            10 => {
                let Some((name, removed)) = self.freed[thread].take() else { return };
                if self.live.contains_key(&name) {
                    return;
                }
                if random(3) == 0 && removed.is_none() && self.older_freed[thread].is_none() {
                    let (on, bytes) = (random(2), 2);
                    self.post(
                        &EventKind::LateLookup { block: Block::new(device(on), Bytes::new(2), MemKind::Device) },
                        thread,
                    );
                    self.change_older(on, -bytes, thread);
                    self.older_freed[thread] = Some((on, bytes));
                } else {
                    self.post(&EventKind::FreeFailed, thread);
                    if let Some((on, bytes)) = self.older_freed[thread].take() {
                        self.change_older(on, bytes, thread);
                    }
                    let by = self.place(thread);
                    if let Some(plain) = removed {
                        self.change(&plain, 1, &by);
                        self.live.insert(name, plain);
                    }
                }
            }
            11 if random(2) == 0 => {
                let Some(name) = self.live.keys().nth(random(self.live.len().max(1))).copied() else { return };
                let mut plain = self.live.remove(&name).unwrap();
                let bytes = plain.bytes / 2;
                let shrink =
                    EventKind::Shrink { key: Key::new(Space::Address, name), bytes: Bytes::new(bytes.unsigned_abs()) };
                self.post(&shrink, thread);
                let by = self.place(thread);
                self.change(&plain, -1, &by);
                plain.bytes = bytes;
                self.change(&plain, 1, &by);
                self.live.insert(name, plain);
            }
            11 if random(3) == 0 => {
                self.post(&EventKind::ContextDestroyed { context: 1 }, thread);
                let destroyed: Vec<_> = self.live.extract_if(.., |_, plain| plain.context == 1).collect();
                for (_, plain) in &destroyed {
                    self.change(plain, -1, &PlainPlace::default());
                }
            }
            12 | 13 if self.entered[thread].len() < 8 => {
                let callsite = CallsiteId(2 + u32::try_from(random(3)).unwrap());
                let counts =
                    [Counted::AllThreads, Counted::OwnAndUnscoped, Counted::OwnAndUnscoped, Counted::Own][random(4)];
                self.open(thread, random(8) / 7, counts, random(4) > 0, callsite);
            }
            14 if self.entered[thread].len() < 8 => {
                let Some((scope, _)) = self.scopes.iter().nth(random(self.scopes.len().max(1))) else { return };
                let entered = SimpleEntered { scope: *scope, by_opening: false };
                self.entered[thread].push(entered);
                let scope = ScopeId(*scope);
                self.post(&EventKind::Enter { scope }, thread);
            }
            15 => {
                let Some(at) = self.entered[thread].iter().rposition(|entered| !entered.by_opening) else { return };
                let SimpleEntered { scope, .. } = self.entered[thread].remove(at);
                self.post(&EventKind::Leave { scope: ScopeId(scope) }, thread);
            }
            16 => {
                let (on, under) = (random(2), self.new_id());
                let since_reset = random(2) == 0;
                let (most, table) = self.records[on].clone();
                let expected = if since_reset { (most, vec![table]) } else { self.highest[on].clone() };
                let is_kept = self.ledger.keep_device_peak(device(on), under, since_reset).is_some();
                assert_eq!(is_kept, expected.0 > 0, "seed {seed}");
                if is_kept {
                    self.kept.insert(under.0, expected.into());
                }
                if random(4) == 0 {
                    self.post(&EventKind::ResetPeaks { device: device(on) }, thread);
                }
                if random(4) == 0 {
                    self.post(&EventKind::ResetSummary, thread);
                    self.records = Default::default();
                }
            }
            17 | 18 => {
                let Some(kept) = self.kept.keys().nth(random(self.kept.len().max(1))).copied() else { return };
                let parts = if random(2) == 0 { 1 } else { 2000 };
                let _ = (0..parts).find(|_| self.read(kept, seed));
            }
            _ => {
                let Some(scope) = self.scopes.keys().nth(random(self.scopes.len().max(1))).copied() else { return };
                self.query(scope, thread, random(4));
            }
        }
    }
}

/// Runs a random history of several threads, scopes, devices, kinds, contexts and failed frees. Returns the number of
/// compared peaks.
pub(super) fn history(seed: u64, stacks: usize, steps: usize) -> usize {
    let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
    let mut history = History::default();
    // While functions are displaced, an allocation at an address that is in use first removes the block whose free was
    // missed.
    history.post(&EventKind::Displaced { now: 1, more: 1 }, 0);
    for _ in 0..steps {
        history.step(seed, stacks, &mut random);
        history.update_peaks();
    }
    for scope in history.scopes.keys().copied().collect::<Vec<_>>() {
        history.query(scope, 0, 2);
    }
    for kept in history.kept.keys().copied().collect::<Vec<_>>() {
        while !history.read(kept, seed) {}
    }
    let ledger = &history.ledger;
    assert!(ledger.kept_peaks.is_empty() && ledger.accounts.is_empty(), "seed {seed}");
    assert!(ledger.meters.0.iter().all(|meter| !meter.peaks.has_kept()), "seed {seed}");
    history.compared
}
