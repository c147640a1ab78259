//! Compares random histories with a simple implementation that keeps everything.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    at_peak::{GroupTable, Name, PlainPeaks, ReadPeak},
    rule::{PlainAccount, PlainAccounts, PlainPlace},
    *,
};
use crate::ledger::thread::MOST_ENTERED;

const THREADS: usize = 4;
/// Ids of tasks start here; ids of threads are below.
const TASKS: u32 = 10;
/// Ids of kept peaks start here; ids of scopes are below.
const KEPT: u64 = 1 << 40;

/// A live block.
#[derive(Clone, Debug, PartialEq)]
struct PlainBlock {
    place: PlainPlace,
    number: u64,
    bytes: u64,
    block: Block,
    /// The group; known only if peaks are compared.
    name: Name,
}

/// The last free of a thread.
enum PlainFreed {
    Block(PlainBlock),
    /// The number of the event that counted it as untracked.
    Untracked(u64),
    /// A block that is older than the session: its device and its bytes.
    Older(usize, u64),
}

/// A scope: its account, and its values since it was opened or reset.
struct PlainScope {
    device: usize,
    account: PlainAccount,
    /// True if it counts all threads, and therefore has no account.
    is_whole: bool,
    is_task: bool,
    opener: usize,
    /// The threads and tasks for which a thread that enters it works.
    host: Vec<u32>,
    /// The number of the event that started it.
    number: u64,
    in_use: i64,
    peak: i64,
    shared: u64,
}

/// A scope that a thread is in.
struct PlainEntered {
    scope: u64,
    /// The threads and tasks of the scope; `None` if the thread opened it.
    host: Option<Vec<u32>>,
    /// The threads and tasks for which the thread worked when it opened the scope.
    around: Vec<u32>,
}

#[derive(Default)]
struct History {
    runner: Runner,
    live: BTreeMap<u64, PlainBlock>,
    freed: [Option<(u64, PlainFreed)>; THREADS],
    /// The numbers of the events that counted untracked frees.
    untracked: Vec<u64>,
    /// The bytes in use of each device, and the highest value. Then the same for its blocks.
    devices: [[(i64, i64); 2]; 2],
    scopes: BTreeMap<u64, PlainScope>,
    accounts: PlainAccounts,
    entered: [Vec<PlainEntered>; THREADS],
    /// The scopes that adopt threads: all threads without a scope, or those of one half.
    adopters: BTreeMap<u64, Option<usize>>,
    events: u64,
    allocated: u64,
    /// The thread and the block of the last allocation.
    last: Option<(usize, Block)>,
    /// The groups at each peak, in some histories.
    peaks: Option<PlainPeaks>,
}

fn id(thread: usize) -> ThreadId {
    ThreadId(u32::try_from(thread).unwrap() + 1)
}

fn device(ordinal: usize) -> Device {
    Device { family: Family::Cuda, ordinal: u32::try_from(ordinal).unwrap() }
}

fn key(name: u64) -> Key {
    Key::new(Space::Address, name)
}

/// Returns the threads and tasks for which a thread works in a scope of `host`, if it worked for `around` before.
fn guest(around: &[u32], host: &[u32]) -> Vec<u32> {
    around.iter().filter(|of| !host.contains(of)).chain(host).copied().collect()
}

impl History {
    fn post(&mut self, kind: &EventKind, thread: usize) -> Option<Trace> {
        self.runner.post(kind, id(thread))
    }

    /// Returns the scopes that adopt a thread, the latest first.
    fn adopters_of(&self, thread: usize) -> Vec<u64> {
        let adopts = |half: &Option<usize>| half.is_none_or(|half| half == thread % 2);
        let open = self.adopters.iter().rev().filter(|(scope, half)| self.scopes.contains_key(scope) && adopts(half));
        if self.entered[thread].is_empty() { open.map(|(scope, _)| *scope).collect() } else { Vec::new() }
    }

    /// Returns the threads and tasks for which a thread works, ignoring adoption.
    fn works_for(&self, thread: usize) -> Vec<u32> {
        let (first, others) = self.entered[thread].split_at(self.entered[thread].len().min(MOST_ENTERED));
        first.iter().chain(others.last()).fold(vec![id(thread).0], |around, entered| match &entered.host {
            Some(host) => guest(&around, host),
            None => entered.around.clone(),
        })
    }

    fn place(&self, thread: usize) -> PlainPlace {
        let works_for = self.works_for(thread);
        let Some(adopter) = self.adopters_of(thread).first().map(|adopter| &self.scopes[adopter]) else {
            return PlainPlace { works_for, is_in_scope: !self.entered[thread].is_empty() };
        };
        let is_in = !adopter.is_task && !self.entered[adopter.opener].is_empty();
        let host = if is_in { self.works_for(adopter.opener) } else { adopter.host.clone() };
        PlainPlace { works_for: guest(&works_for, &host), is_in_scope: true }
    }

    fn change(&mut self, plain: &PlainBlock, sign: i64, accounts: &[PlainAccount]) {
        let (on, by) = (plain.block.device.ordinal as usize, sign * plain.bytes.cast_signed());
        for ((in_use, most), by) in self.devices[on].iter_mut().zip([by, sign]) {
            *in_use += by;
            *most = (*most).max(*in_use);
        }
        self.change_scopes(on, Some(&plain.name), by, accounts);
    }

    /// Changes the values of the scopes of these accounts, and of those that count all threads.
    fn change_scopes(&mut self, on: usize, name: Option<&Name>, by: i64, accounts: &[PlainAccount]) {
        for scope in self.scopes.values_mut().filter(|scope| scope.device == on) {
            if scope.is_whole || accounts.contains(&scope.account) {
                scope.in_use += by;
                scope.peak = scope.peak.max(scope.in_use);
            }
        }
        if let Some(peaks) = &mut self.peaks {
            peaks.change(on, name, by, accounts);
        }
    }

    /// Applies the free of a block that is older than the session, or undoes it after it failed.
    fn change_older(&mut self, on: usize, by: i64, thread: usize) {
        let place = self.place(thread);
        let accounts = self.accounts.of_alloc(&place, on);
        self.change_scopes(on, None, by, &accounts);
        if !place.is_in_scope && self.accounts.are_shared(on) {
            self.share(by.unsigned_abs(), 0, &accounts);
        }
    }

    /// Adds the bytes to the shared memory of the scopes of these accounts that started after this event.
    fn share(&mut self, bytes: u64, after: u64, accounts: &[PlainAccount]) {
        for scope in self.scopes.values_mut().filter(|scope| scope.number > after && !scope.is_whole) {
            scope.shared += if accounts.contains(&scope.account) { bytes } else { 0 };
        }
    }

    fn add(&mut self, plain: &PlainBlock, thread: usize) {
        if !plain.block.kind.is_on_device() {
            return;
        }
        let on = plain.block.device.ordinal as usize;
        let accounts = self.accounts.of_alloc(&plain.place, on);
        self.change(plain, 1, &accounts);
        if !plain.place.is_in_scope && self.accounts.are_shared(on) {
            self.share(plain.bytes, 0, &accounts);
        }
        let adopters: Vec<_> = self.adopters_of(thread).iter().map(|adopter| &self.scopes[adopter]).collect();
        if adopters.windows(2).any(|two| two[0].opener != two[1].opener) {
            let works_for = adopters.iter().flat_map(|adopter| adopter.host.iter().copied()).collect();
            let all = self.accounts.of_alloc(&PlainPlace { works_for, is_in_scope: true }, on);
            self.share(plain.bytes, 0, &all);
        }
    }

    /// Applies the free of a block by a thread at this place, or undoes it after it failed.
    fn remove(&mut self, plain: &PlainBlock, sign: i64, by: &PlainPlace) {
        if !plain.block.kind.is_on_device() {
            return;
        }
        let on = plain.block.device.ordinal as usize;
        let free = self.accounts.of_free((&plain.place, plain.number), by, on);
        self.change(plain, sign, &free.accounts);
        if free.is_shared {
            self.share(plain.bytes, plain.number, &free.accounts);
        }
    }

    fn alloc(&mut self, thread: usize, name: u64, block: Block, is_displaced: bool) {
        if let Some(missed) = self.live.remove(&name) {
            // After a loss, or while functions are displaced, an allocation at an address that is in use first removes the
            // block whose free was missed.
            if !is_displaced {
                self.post(&EventKind::Lost { count: 1 }, thread);
            }
            self.remove(&missed, -1, &PlainPlace::default());
        }
        // Other tests check the paths of scopes.
        let path = if self.peaks.is_some() { self.runner.ledger.path_of(id(thread)) } else { Vec::new() };
        self.post(&EventKind::Alloc { key: key(name), block }, thread);
        let plain = PlainBlock {
            place: self.place(thread),
            number: self.runner.number,
            bytes: block.bytes.get(),
            block,
            name: (path, block.stack, block.kind as usize, block.context),
        };
        self.add(&plain, thread);
        self.live.insert(name, plain);
        self.events += 1;
        self.allocated += u64::from(block.kind.is_on_device());
    }

    fn free(&mut self, thread: usize, name: u64) {
        self.post(&EventKind::Free { key: key(name), block: None }, thread);
        let freed = if let Some(removed) = self.live.remove(&name) {
            self.remove(&removed, -1, &self.place(thread));
            PlainFreed::Block(removed)
        } else {
            self.post(&EventKind::Untracked, thread);
            self.untracked.push(self.runner.number);
            PlainFreed::Untracked(self.runner.number)
        };
        self.freed[thread] = Some((name, freed));
        self.events += 1;
    }

    /// Frees a block that is older than the session. Its size is known at once or later.
    fn free_older(&mut self, thread: usize, on: usize, bytes: u64, is_late: bool) {
        let block = Block::new(device(on), Bytes::new(bytes), MemKind::Device);
        self.post(&EventKind::Free { key: key(1 << 40), block: (!is_late).then_some(block) }, thread);
        if is_late {
            self.post(&EventKind::LateLookup { block }, thread);
        }
        self.change_older(on, -bytes.cast_signed(), thread);
        self.freed[thread] = Some((1 << 40, PlainFreed::Older(on, bytes)));
        self.events += 1;
    }

    fn shrink(&mut self, thread: usize, name: u64, bytes: Bytes) {
        self.post(&EventKind::Shrink { key: key(name), bytes }, thread);
        let Some(mut plain) = self.live.remove(&name) else { return };
        let by = self.place(thread);
        self.remove(&plain, -1, &by);
        (plain.bytes, plain.block.bytes) = (bytes.get(), bytes);
        self.remove(&plain, 1, &by);
        self.live.insert(name, plain);
    }

    fn fail_free(&mut self, thread: usize) {
        // The driver has not reused the address, because the block was not freed.
        let Some((name, block)) = self.freed[thread].take_if(|(name, _)| !self.live.contains_key(name)) else { return };
        self.post(&EventKind::FreeFailed, thread);
        match block {
            PlainFreed::Block(block) => {
                self.remove(&block, 1, &self.place(thread));
                self.live.insert(name, block);
            }
            PlainFreed::Untracked(number) => self.untracked.retain(|untracked| *untracked != number),
            PlainFreed::Older(on, bytes) => self.change_older(on, bytes.cast_signed(), thread),
        }
        self.events -= 1;
    }

    fn open(&mut self, thread: usize, scope: u64, on: usize, counts: Counted, callsite: u32) {
        let at_peak = self.peaks.is_some() && !scope.is_multiple_of(4);
        let spec = ScopeSpec { counts, callsite: CallsiteId(callsite), at_peak, ..ScopeSpec::exact(device(on)) };
        self.post(&EventKind::Open { scope: ScopeId(scope), spec }, thread);
        let own = id(thread).0;
        let around = self.works_for(thread);
        let task = TASKS + u32::try_from(scope).unwrap();
        let is_task = counts == Counted::Task;
        let account = match counts {
            Counted::AllThreads | Counted::OwnAndUnscoped => (own, on, true),
            Counted::Own => (own, on, false),
            Counted::Task => (task, on, false),
        };
        let (number, is_whole) = (self.runner.number, counts == Counted::AllThreads);
        self.accounts.open(account, is_whole, number);
        if let Some(peaks) = self.peaks.as_mut().filter(|_| at_peak) {
            peaks.watch(scope, on, (!is_whole).then_some(account));
        }
        let host = if is_task { guest(&[task], &around) } else { around.clone() };
        let plain = PlainScope {
            device: on,
            account,
            is_whole,
            is_task,
            opener: thread,
            host,
            number,
            in_use: 0,
            peak: 0,
            shared: 0,
        };
        self.scopes.insert(scope, plain);
        if !is_task {
            self.entered[thread].push(PlainEntered { scope, host: None, around });
        }
    }

    fn query(&mut self, thread: usize, scope: u64, how: usize) {
        let id = ScopeId(scope);
        let queries =
            [EventKind::Read { scope: id }, EventKind::Reset { scope: id }, EventKind::ResetKeepingPeak { scope: id }];
        let trace = self.post(queries.get(how).unwrap_or(&EventKind::Close { scope: id }), thread).expect("it is open");
        let number = self.runner.number;
        let open = self.scopes.get_mut(&scope).unwrap();
        let missed = self.untracked.iter().filter(|number| **number > open.number).count() as u64;
        let expected = (open.in_use, open.peak.abs_diff(open.in_use.max(0)), missed, open.shared);
        let result = (trace.used.get(), trace.peaked.get(), trace.untracked, trace.shared.get());
        assert_eq!(result, expected, "scope {scope}");
        if how == 1 || how == 2 {
            (open.number, open.in_use, open.peak, open.shared) = (number, 0, 0, 0);
        } else if how > 2 {
            let PlainScope { account, is_whole, opener, .. } = self.scopes.remove(&scope).unwrap();
            self.accounts.close(account, is_whole);
            self.entered[opener].retain(|entered| entered.scope != scope || entered.host.is_some());
        }
        match (&mut self.peaks, how) {
            (Some(peaks), 1) => peaks.reset(scope),
            (Some(peaks), 3..) => peaks.close(scope),
            _ => {}
        }
    }

    /// Keeps the peak of a device, or resets what is kept.
    fn query_device(&mut self, thread: usize, on: usize, under: u64, random: &mut impl FnMut(usize) -> usize) {
        let since_reset = random(2) == 0;
        let Some(peaks) = &mut self.peaks else { return };
        let is_kept = self.runner.ledger.sums().keep_device_peak(device(on), ScopeId(under), since_reset).is_some();
        assert_eq!(is_kept, peaks.keep_of_device(on, under, since_reset));
        if random(4) == 0 {
            peaks.reset_records();
            self.post(&EventKind::ResetSummary, thread);
        }
        if random(4) == 0 {
            self.post(&EventKind::ResetPeaks { device: device(on) }, thread);
            self.devices[on].iter_mut().for_each(|(in_use, most)| *most = *in_use);
        }
    }

    /// Reads one part of a kept peak. Compares the peak after the last part, and then returns `true`.
    fn read_peak(&mut self, under: u64) -> bool {
        let (peaks, ledger, under_id) = (self.peaks.as_mut().unwrap(), &mut self.runner.ledger, ScopeId(under));
        let kept = peaks.kept.get_mut(&under).unwrap();
        if let Some(part) = ledger.sums().peak_part(under_id, kept.next_part) {
            kept.next_part += 1;
            kept.groups.extend(part);
            return false;
        }
        let ReadPeak { expected: (most, tables), groups, .. } = peaks.kept.remove(&under).unwrap();
        let peak = ledger.sums().kept_peak(under_id).expect("it is kept");
        assert_eq!(peak.bytes.get(), most);
        ledger.sums().release_peak(under_id);
        let mut table = GroupTable::new();
        for GroupAtPeak { group: AllocGroup { node, stack, kind, context, .. }, bytes } in groups {
            let name = (ledger.sums.tree.path(node), stack, kind as usize, context);
            assert_eq!(table.insert(Some(name), bytes.get()), None, "each group once");
        }
        if peak.older != 0 {
            table.insert(None, peak.older.get());
        }
        assert_eq!(table.values().sum::<i64>(), most, "it adds up");
        assert!(tables.contains(&table), "{table:#?}\nis none of {tables:#?}");
        peaks.compared += 1;
        true
    }

    /// Closes all scopes and reads all peaks. Then the ledger has no records of them.
    fn end(&mut self) {
        for scope in self.scopes.keys().copied().collect::<Vec<_>>() {
            self.query(0, scope, 3);
        }
        while let Some(under) = self.peaks.as_ref().and_then(|peaks| Some(*peaks.kept.first_key_value()?.0)) {
            while !self.read_peak(under) {}
        }
        let ledger = &self.runner.ledger;
        assert!(ledger.sums.kept_peaks.is_empty() && ledger.sums.accounts.is_empty());
        assert!(ledger.sums.meters.0.iter().all(|meter| !meter.peaks.has_kept()));
    }

    fn destroy_context(&mut self, thread: usize, context: u8) {
        self.post(&EventKind::ContextDestroyed { context }, thread);
        // These are one event: no scope is read in between.
        for plain in self.live.extract_if(.., |_, plain| plain.block.context == context).collect::<Vec<_>>() {
            self.remove(&plain.1, -1, &PlainPlace::default());
        }
    }

    /// Compares the counts, the blocks, the groups and the statistics.
    fn compare(&mut self) {
        let counts = self.runner.ledger.sums().counts();
        assert_eq!((counts.events, counts.untracked), (self.events, self.untracked.len() as u64));
        let mut blocks: Vec<_> = (0..BLOCK_PARTS).flat_map(|part| self.runner.ledger.blocks(part, None)).collect();
        blocks.sort_by_key(|block| block.number);
        let blocks = blocks.iter().map(|known| {
            let KnownBlock { group: AllocGroup { stack, kind, context, .. }, device, bytes, .. } = *known;
            let block = Block { device, bytes, kind, context, stack };
            (known.key.get(), known.thread.0, known.number, bytes.get(), block)
        });
        // A block is listed with the thread that opened the outermost scope.
        let plain = |(name, plain): (&u64, &PlainBlock)| {
            (*name, *plain.place.works_for.last().unwrap(), plain.number, plain.bytes, plain.block)
        };
        let mut expected: Vec<_> = self.live.iter().map(plain).collect();
        expected.sort_by_key(|(_, _, number, ..)| *number);
        assert_eq!(blocks.collect::<Vec<_>>(), expected);
        let of_all: (u64, u64) = self
            .runner
            .ledger
            .groups()
            .iter()
            .fold((0, 0), |(blocks, bytes), live| (blocks + live.blocks, bytes + live.bytes.get()));
        let expected = self.live.values().fold((0, 0), |(blocks, bytes), plain| (blocks + 1, bytes + plain.bytes));
        assert_eq!(of_all, expected);
        let stats = self.runner.ledger.sums().stats();
        assert_eq!(stats.iter().map(|stat| stat.on_device.blocks.allocated).sum::<u64>(), self.allocated);
        for DeviceStats { device, on_device, .. } in stats {
            let [bytes, blocks] = self.devices[device.ordinal as usize].map(|(_, most)| most.unsigned_abs());
            assert_eq!((on_device.bytes.peak, on_device.blocks.peak), (bytes, blocks));
        }
    }

    fn step(&mut self, step: u64, stacks: usize, is_displaced: bool, random: &mut impl FnMut(usize) -> usize) {
        // Most events are of the last thread, and most blocks like the last one, so that many take the fast path. With very many
        // stacks, most blocks differ, so that groups are removed.
        let last = self.last.filter(|_| stacks < 1000 && random(4) > 0);
        let thread = last.map_or_else(|| random(THREADS), |(thread, _)| thread);
        let some_scope = self.scopes.keys().min_by_key(|scope| **scope ^ step).copied();
        match random(18) {
            0..4 => {
                let (name, kind) = (random(600) as u64 * 512, MemKind::ALL[random(5)]);
                let stack = StackId(u32::try_from(random(stacks)).unwrap());
                let context = u8::try_from(random(3)).unwrap();
                let block = Block { context, stack, ..Block::new(device(random(2)), Bytes::ZERO, kind) };
                let like = last.map_or(block, |(_, like)| like);
                // With few different sizes, the same level is reached again.
                let bytes = if self.peaks.is_some() { [0, 1, 1, 2, 3, 5, 8][random(7)] } else { random(1000) as u64 };
                let block = Block { bytes: Bytes::new(bytes), ..like };
                self.last = Some((thread, block));
                self.alloc(thread, name, block, is_displaced);
            }
            4..7 => {
                let known = (random(8) > 0).then(|| self.live.keys().nth(random(self.live.len().max(1)))).flatten();
                match (known.copied(), random(3)) {
                    (Some(name), _) => self.free(thread, name),
                    (None, 0) => self.free(thread, 1 << 40),
                    (None, late) => self.free_older(thread, random(2), random(4) as u64, late == 1),
                }
            }
            7 => self.fail_free(thread),
            8 if random(6) == 0 => self.destroy_context(thread, u8::try_from(1 + random(2)).unwrap()),
            9 => {
                let counts = [
                    Counted::AllThreads,
                    Counted::OwnAndUnscoped,
                    Counted::OwnAndUnscoped,
                    Counted::OwnAndUnscoped,
                    Counted::Own,
                    Counted::Task,
                ][random(6)];
                let (on, callsite) = (random(2), 2 + u32::try_from(random(3)).unwrap());
                self.open(thread, step + 1, on, counts, callsite);
            }
            10 => {
                let Some(scope) = some_scope else { return };
                let host = Some(self.scopes[&scope].host.clone());
                self.post(&EventKind::Enter { scope: ScopeId(scope) }, thread);
                self.entered[thread].push(PlainEntered { scope, host, around: Vec::new() });
            }
            11 => {
                // It may have entered other scopes later.
                let mut later_first = self.entered[thread].iter().rev();
                let left = later_first.find(|entered| entered.host.is_some() && random(4) > 0);
                let Some(scope) = left.map(|left| left.scope) else { return };
                let at = self.entered[thread].iter().rposition(|entered| entered.scope == scope);
                self.entered[thread].remove(at.unwrap());
                self.post(&EventKind::Leave { scope: ScopeId(scope) }, thread);
            }
            15 => {
                let Some(name) = self.live.keys().nth(random(self.live.len().max(1))).copied() else { return };
                self.shrink(thread, name, Bytes::new(self.live[&name].bytes / 2));
            }
            16 => self.query_device(thread, random(2), KEPT + step, random),
            17 => {
                let Some(peaks) = &mut self.peaks else { return };
                let under = KEPT + step;
                if let Some(scope) = some_scope.filter(|_| random(2) == 0) {
                    let is_kept = self.runner.ledger.keep_peak(ScopeId(scope), ScopeId(under)).is_some();
                    assert_eq!(is_kept, peaks.keep(scope, under));
                }
                let Some(kept) = peaks.kept.keys().nth(random(peaks.kept.len().max(1))).copied() else { return };
                let parts = if random(2) == 0 { 1 } else { 20_000 };
                let _ = (0..parts).find(|_| self.read_peak(kept));
            }
            14 => {
                let Some(scope) = some_scope else { return };
                let half = [None, Some(0), Some(1)][random(3)];
                let threads = half.map_or(Threads::Unscoped, |half| Threads::named(&format!("{half}-")));
                self.post(&EventKind::Adopt { scope: ScopeId(scope), threads }, thread);
                self.adopters.insert(scope, half);
            }
            _ => {
                let Some(scope) = some_scope else { return };
                self.query(thread, scope, random(6));
            }
        }
        if step.is_multiple_of(50) {
            self.compare();
        }
    }
}

/// Four threads have nested traces of all kinds.
#[test]
fn all_numbers_agree_with_the_simple_way() {
    let (mut fast, mut events, mut compared) = (0, 0, 0);
    for seed in 1..=10_000_u64 {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        // Some histories are long; in two of these, groups are removed.
        let (stacks, steps) = match seed {
            5000 | 9999 => (20_000, 40_000),
            _ if seed.is_multiple_of(200) => ([1, 3, 50][random(3)], 1000),
            _ => (1, 60),
        };
        let is_displaced = seed.is_multiple_of(2);
        let peaks = seed.is_multiple_of(3).then(PlainPeaks::default);
        let mut history = History { peaks, ..History::default() };
        if is_displaced {
            history.post(&EventKind::Displaced { now: 1, more: 1 }, 0);
        }
        for thread in 0..THREADS {
            let name = ThreadName::new(format!("{}-{thread}", thread % 2).as_bytes());
            history.post(&EventKind::Named { name }, thread);
        }
        let run = AssertUnwindSafe(|| {
            for at in 0..steps {
                history.step(at, stacks, is_displaced, &mut random);
                history.peaks.iter_mut().for_each(PlainPeaks::update);
            }
            history.end();
        });
        assert!(catch_unwind(run).is_ok(), "seed {seed}, see above");
        (fast, events) = (fast + history.runner.fast, events + history.runner.number);
        compared += history.peaks.map_or(0, |peaks| peaks.compared);
    }
    assert!(compared > 10_000, "{compared} peaks");
    assert!(fast * 10 > events, "{fast} of {events} took the fast path");
}
