//! The one door through which facts enter, in order. Left of it there is concurrency, right of it there is none.

use std::{
    cell::Cell,
    collections::HashMap,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use super::sync::{Backoff, Instant, Mutex, MutexGuard, lend_number, return_number, sleep, thread_local};
use crate::{
    ledger::{
        AtPeak, Counts, DeviceStats, GroupUsage, KnownBlock, Ledger, NodeId, PARTS, PeakOf, SLICE, ScopeNode, Within,
    },
    model::{Answer, Bytes, CallsiteId, Device, Event, EventKind, Key, ScopeId, Tag, ThreadId, Time, Trace},
    sys::process,
};

/// Numbers facts, stamps them and folds them, all under one short lock: no call of a driver, no I/O, no
/// formatting inside.
///
/// The lock, the number of events and the run lie in one line of the cache: it is all that an event writes besides its block and
/// its thread's own record, and when threads allocate by turns, it travels between their processors.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Inbox {
    door: Mutex<Door>,
    began: Instant,
}

#[derive(Debug, Default)]
#[repr(C)]
struct Door {
    number: u64,
    ledger: Ledger,
    time: Time,
}

/// What a thread knows of itself.
struct Here {
    /// It is inside. A global allocator or a signal handler that allocates GPU memory would come back here while the fold
    /// is at work, and wait for itself for ever.
    inside: Cell<bool>,
    /// How many facts came from this thread while it was inside, or made the fold panic. It posts this count as lost facts when it
    /// leaves.
    lost: Cell<u32>,
    /// Its number; 0 until it has one.
    number: Cell<u32>,
}

/// Leaves when the fold panics: what it was about to take may be counted wrong.
struct Out;

impl Drop for Out {
    #[inline]
    fn drop(&mut self) {
        HERE.with(|here| {
            here.lose(1);
            here.leave();
        });
    }
}

impl Here {
    /// The thread's number; `None` if it is inside already.
    #[inline]
    fn enter(&self, inbox: &Inbox) -> Option<ThreadId> {
        if self.inside.replace(true) { None } else { Some(self.thread(inbox)) }
    }

    /// Whether facts were lost while it was inside.
    #[inline]
    fn leave(&self) -> bool {
        self.inside.set(false);
        self.lost.get() > 0
    }

    #[cold]
    fn lose(&self, facts: u32) {
        self.lost.set(self.lost.get().saturating_add(facts));
    }

    #[inline]
    fn thread(&self, inbox: &Inbox) -> ThreadId {
        let number = self.number.get();
        ThreadId(if number == 0 { self.begin(inbox) } else { number })
    }

    /// Gives the thread a number, until it ends.
    #[cold]
    #[inline(never)]
    fn begin(&self, inbox: &Inbox) -> u32 {
        let (number, was_anothers) = lend_number();
        self.number.set(number);
        let keep = |lent: &Lent| lent.0.set(number);
        // Where neither is there, the number stays lent.
        let _ = LENT.try_with(keep).or_else(|_| LENT_AT_END.try_with(keep));
        if was_anothers {
            inbox.lock().ledger.begin_thread(ThreadId(number));
        }
        number
    }
}

/// The number that a thread has, which it gives back when it ends; 0 if it has none.
struct Lent(Cell<u32>);

impl Drop for Lent {
    fn drop(&mut self) {
        let number = self.0.take();
        if number == 0 || process::is_forked() {
            return;
        }
        // A global allocator that allocates GPU memory must not come back here.
        let set = |inside| HERE.try_with(|here| (here.number.set(0), here.inside.set(inside)));
        let _ = set(true);
        return_number(number);
        let _ = set(false);
    }
}

thread_local! {
    // With nothing to drop, it is there as long as the thread.
    static HERE: Here = const { Here { inside: Cell::new(false), lost: Cell::new(0), number: Cell::new(0) } };
    static LENT: Lent = const { Lent(Cell::new(0)) };
    // Of a thread that frees what it kept in its other variables after the first is gone.
    static LENT_AT_END: Lent = const { Lent(Cell::new(0)) };
}

/// Does what is rare, away from what is frequent. `None` if it panicked, which counts as lost: hooks and callbacks must not
/// unwind.
#[cold]
#[inline(never)]
fn unlikely<T>(code: impl FnOnce() -> T) -> Option<T> {
    let lose = |panic| {
        mem::forget(panic);
        HERE.with(|here| here.lose(1));
    };
    catch_unwind(AssertUnwindSafe(code)).map_err(lose).ok()
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self { door: Mutex::new(Door::default()), began: Instant::now() }
    }

    /// Takes an allocation of a kind that needs no time in. Not to be called in the child of a fork. It does not panic.
    #[inline]
    pub(crate) fn alloc(&self, key: Key, bytes: Bytes, tag: Tag) {
        self.enter_alive(1, |door, thread| {
            self.prepare(door, false);
            let (number, ledger) = (door.number, &mut door.ledger);
            if !ledger.alloc_like_newest(key, bytes, tag, number, thread) {
                unlikely(move || ledger.alloc(key, bytes, tag, number, thread));
            }
        });
    }

    /// Takes a free in. Not to be called in the child of a fork. It does not panic.
    #[inline]
    pub(crate) fn free(&self, key: Key) -> Answer {
        let free = |door: &mut Door, thread| {
            self.prepare(door, false);
            if door.ledger.free_like_newest(key, thread) {
                return Answer::Applied;
            }
            unlikely(move || door.ledger.free(key, None, thread)).unwrap_or(Answer::Applied)
        };
        self.enter_alive(1, free).unwrap_or(Answer::Applied)
    }

    /// Takes a fact in.
    pub(crate) fn post(&self, fact: &EventKind) -> Answer {
        if let EventKind::ContextDestroyed { context } = *fact {
            self.post_context_destroyed(context);
            return Answer::Applied;
        }
        self.enter(1, |door, thread| self.take(door, thread, fact)).unwrap_or(Answer::Applied)
    }

    /// Takes a reading and a question to a scope in, with nothing between; gives what the scope has come to.
    pub(crate) fn ask(&self, reading: Option<&EventKind>, question: &EventKind) -> Option<Trace> {
        let ask = |door: &mut Door, thread| {
            if let Some(reading) = reading {
                self.take(door, thread, reading);
            }
            self.take(door, thread, question);
            door.ledger.last_trace()
        };
        self.enter(1 + u32::from(reading.is_some()), ask).flatten()
    }

    #[inline]
    fn take(&self, door: &mut Door, thread: ThreadId, fact: &EventKind) -> Answer {
        self.prepare(door, fact.needs_time());
        door.apply(thread, fact)
    }

    /// Numbers the next fact.
    #[inline]
    fn prepare(&self, door: &mut Door, needs_time: bool) {
        // A clock costs more than all the rest of an allocation's way through here; where nothing hangs on the time, the
        // one that was read last will do.
        if needs_time {
            door.time = self.began.elapsed();
            door.ledger.set_time(door.time);
        }
        door.number += 1;
    }

    /// The blocks of a context go one after the other, as if each was freed, and the door is open to others in between. They cannot
    /// come back: the context's end is posted before the driver gives their addresses, or its number, to anybody.
    #[cold]
    fn post_context_destroyed(&self, context: u8) {
        for part in 0..PARTS {
            let is_first = part == 0;
            let gone = |door: &mut Door, _| {
                if is_first {
                    self.prepare(door, false);
                }
                door.ledger.gone(context, part);
            };
            if self.enter(u32::from(is_first), gone).is_none() {
                return;
            }
        }
    }

    #[cold]
    fn post_lost(&self) {
        let count = HERE.with(|here| here.lost.take()).into();
        unlikely(|| self.post(&EventKind::Lost { count }));
    }

    /// Does something at the door; `None`, and `facts` are counted as lost, if this thread is inside already.
    fn enter<T>(&self, facts: u32, inside: impl FnOnce(&mut Door, ThreadId) -> T) -> Option<T> {
        // The lock may be held for ever by a thread that is not in this copy of the process.
        if process::is_forked() { None } else { self.enter_alive(facts, inside) }
    }

    #[allow(
        clippy::inline_always,
        reason = "an event is one function, which takes fewer lines of the instruction cache"
    )]
    #[inline(always)]
    fn enter_alive<T>(&self, facts: u32, inside: impl FnOnce(&mut Door, ThreadId) -> T) -> Option<T> {
        // A short look at what the thread knows of itself, and no more: a long closure is not inlined into `with`.
        let Some(thread) = HERE.with(|here| here.enter(self)) else {
            HERE.with(|here| here.lose(facts));
            return None;
        };
        let out = Out;
        let done = inside(&mut self.lock(), thread);
        mem::forget(out);
        if HERE.with(Here::leave) {
            self.post_lost();
        }
        Some(done)
    }

    /// The lock is held for some ten nanoseconds, and giving it back is one store: a lock that wakes its waiters would cost
    /// more than what is done under it. Who has to wait spins, then yields, then sleeps, should the holder have lost its
    /// processor meanwhile.
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Door> {
        self.door.try_lock().unwrap_or_else(|| self.wait())
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, Door> {
        let backoff = Backoff::new();
        loop {
            // A look first: an attempt takes the lock's line of the cache away from its holder.
            if !self.door.is_locked()
                && let Some(door) = self.door.try_lock()
            {
                return door;
            }
            if backoff.is_completed() {
                sleep(Duration::from_micros(20));
            } else {
                backoff.snooze();
            }
        }
    }

    /// As if there had been so many events.
    #[cfg(test)]
    pub(super) fn pretend_events(&self, number: u64) {
        self.lock().number = number;
    }

    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// What was heard so far.
    pub(super) fn counts(&self) -> Counts {
        self.enter(0, |door, _| door.ledger.counts()).unwrap_or_default()
    }

    /// What the allocators of each device have done.
    pub(super) fn stats(&self) -> Vec<DeviceStats> {
        self.enter(0, |door, _| door.ledger.stats()).unwrap_or_default()
    }

    /// The tree of scopes. The door is open to others in between: each path is as it was at some moment of the call, and where
    /// that makes a difference, raised to what the paths inside it come to.
    pub(super) fn nodes(&self) -> Vec<(Option<Device>, ScopeNode)> {
        let mut last = None;
        while let Some(next) = self.enter(0, |door, _| door.ledger.note_device_peaks(last)).flatten() {
            last = Some(next);
        }
        let mut nodes = Vec::new();
        loop {
            let part = self.enter(0, |door, _| door.ledger.nodes_from(nodes.len())).unwrap_or_default();
            let is_last = part.len() < SLICE;
            nodes.extend(part);
            if is_last {
                break;
            }
        }
        if nodes.len() > SLICE {
            raise_to_what_is_inside(&mut nodes);
        }
        nodes
    }

    /// The calling thread's number; 0 if it is inside already.
    pub(crate) fn this_thread(&self) -> ThreadId {
        self.enter(0, |_, thread| thread).unwrap_or_default()
    }

    /// The scopes that the calling thread is in, the outermost first.
    pub(super) fn path_of_this_thread(&self) -> Vec<CallsiteId> {
        self.enter(0, |door, thread| door.ledger.path_of(thread)).unwrap_or_default()
    }

    /// What is live, by where it comes from. As in [`blocks`](Self::blocks), each is as it was at some moment of the call.
    pub(super) fn groups(&self) -> Vec<GroupUsage> {
        let part = |first| self.enter(0, |door, _| door.ledger.groups_from(first)).flatten();
        (0..).step_by(SLICE).map_while(part).flatten().collect()
    }

    /// What tells the blocks that were allocated in an open scope until now.
    pub(super) fn within(&self, scope: ScopeId) -> Option<Within> {
        self.enter(0, |door, _| door.ledger.within(scope, door.number)).flatten()
    }

    /// Keeps what the peak of an open scope is made of, under a number of its own: false if that is not known.
    pub(super) fn keep_peak(&self, scope: ScopeId, under: ScopeId) -> bool {
        self.enter(0, |door, _| door.ledger.keep_peak(scope, under)).flatten().is_some()
    }

    /// As [`keep_peak`](Self::keep_peak), of the most that was live on a device.
    pub(super) fn keep_device_peak(&self, device: Device, under: ScopeId) -> bool {
        self.enter(0, |door, _| door.ledger.keep_device_peak(device, under)).flatten().is_some()
    }

    pub(super) fn release_peak(&self, under: ScopeId) {
        self.enter(0, |door, _| door.ledger.release_peak(under));
    }

    /// A kept peak and the groups that it is made of. The door is open to others in between: it does not change.
    pub(super) fn kept_peak(&self, under: ScopeId) -> Option<(PeakOf, Vec<AtPeak>)> {
        let peak = self.enter(0, |door, _| door.ledger.kept_peak(under)).flatten()?;
        let parts = (0..).map_while(|part| self.enter(0, |door, _| door.ledger.peak_part(under, part)).flatten());
        Some((peak, parts.flatten().collect()))
    }

    /// The live block of that key.
    pub(super) fn block(&self, key: Key) -> Option<KnownBlock> {
        self.enter(0, |door, _| door.ledger.block(key)).flatten()
    }

    /// The live blocks: all, or what was allocated within a scope. The door is open to others in between, so that nobody
    /// waits for a million of them: each block was live at some moment of the call.
    pub(super) fn blocks(&self, within: Option<&Within>) -> Vec<KnownBlock> {
        let part = |part| self.enter(0, |door, _| door.ledger.blocks(part, within)).unwrap_or_default();
        // Who moved meanwhile was met twice.
        let met: HashMap<Key, KnownBlock> = (0..PARTS).flat_map(part).map(|held| (held.key, held)).collect();
        met.into_values().collect()
    }
}

/// What each path has in use, and had, is no less than what those inside it have. Paths stand after their parents.
fn raise_to_what_is_inside(nodes: &mut [(Option<Device>, ScopeNode)]) {
    let mut inside = vec![0; nodes.len()];
    for at in (0..nodes.len()).rev() {
        let (_, node) = &mut nodes[at];
        node.in_use = node.in_use.max(inside[at]);
        node.peak = node.peak.max(node.in_use);
        let ScopeNode { parent, in_use, peak, .. } = *node;
        if parent != NodeId::NONE {
            let parent = parent.0 as usize;
            inside[parent] += in_use;
            nodes[parent].1.peak = nodes[parent].1.peak.max(peak);
        }
    }
}

impl Door {
    #[inline]
    fn apply(&mut self, thread: ThreadId, kind: &EventKind) -> Answer {
        self.ledger.apply(&Event { number: self.number, time: self.time, thread, kind })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::model::{Block, CallsiteId, Family, Gauge, MemKind, ScopeSpec, Source, Space};

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn open(scope: u64) -> EventKind {
        let spec = ScopeSpec {
            device: DEVICE,
            gauge: Gauge::Exact,
            every: Duration::ZERO,
            thread: None,
            callsite: CallsiteId::NONE,
            source: Source::Dispatch,
            at_peak: false,
        };
        EventKind::Open { scope: ScopeId(scope), spec }
    }

    fn close(scope: u64) -> EventKind {
        EventKind::Close { scope: ScopeId(scope) }
    }

    fn alloc(address: u64, bytes: u64) -> EventKind {
        let block = Block::new(DEVICE, Bytes::new(bytes), MemKind::Device);
        EventKind::Alloc { key: Key::new(Space::Address, address), block }
    }

    fn free(address: u64) -> EventKind {
        EventKind::Free { key: Key::new(Space::Address, address), block: None }
    }

    #[test]
    fn totals_are_conserved_under_contention() {
        const THREADS: u64 = 8;
        const ROUNDS: u64 = 2_000;
        let inbox = Inbox::new();
        inbox.post(&open(1));
        thread::scope(|threads| {
            for thread in 0..THREADS {
                let inbox = &inbox;
                threads.spawn(move || {
                    let scope = 100 + thread;
                    for round in 0..ROUNDS {
                        let address = (thread << 32) + round;
                        inbox.post(&open(scope));
                        inbox.post(&alloc(address, 10));
                        if round % 2 == 0 {
                            inbox.post(&free(address));
                        }
                        assert!(inbox.ask(None, &close(scope)).is_some());
                    }
                });
            }
        });
        let trace = inbox.ask(None, &close(1)).expect("the scope is open");
        assert_eq!(trace.used.get().unsigned_abs(), THREADS * ROUNDS / 2 * 10);
        assert!(trace.peaked.get() <= THREADS * 10);
        assert_eq!(trace.lost, 0);
        let posted = 2 + THREADS * (3 * ROUNDS + ROUNDS / 2);
        assert_eq!(inbox.lock().number, posted, "numbers have no gaps");
    }

    #[test]
    fn a_reading_and_its_question_are_neighbours() {
        let inbox = Inbox::new();
        inbox.post(&open(1));
        assert!(inbox.ask(Some(&alloc(1, 10)), &close(1)).is_some_and(|trace| trace.used == 10));
    }

    fn open_at(scope: u64, callsite: u32) -> EventKind {
        let EventKind::Open { scope, spec } = open(scope) else { unreachable!() };
        EventKind::Open { scope, spec: ScopeSpec { callsite: CallsiteId(callsite), ..spec } }
    }

    /// More than are looked at while others wait.
    const MANY: u64 = 3 * SLICE as u64 + 7;

    #[test]
    fn many_paths_and_origins_are_told_whole() {
        let inbox = Inbox::new();
        for scope in 1..=MANY {
            inbox.post(&open_at(scope, 1 + u32::try_from(scope).unwrap()));
            inbox.post(&alloc(scope * 512, scope));
            if scope % 2 == 0 {
                inbox.ask(None, &close(scope));
            }
            // All lie beside each other.
            inbox.post(&EventKind::Leave { scope: ScopeId(scope) });
        }
        let (nodes, total) = (inbox.nodes(), MANY * (MANY + 1) / 2);
        let [nowhere, root, scopes @ ..] = nodes.as_slice() else { panic!("there is a root") };
        assert_eq!((nowhere.0, root.1.in_use.unsigned_abs(), scopes.len() as u64), (None, total, MANY));
        for (at, (_, node)) in scopes.iter().enumerate() {
            let number = at as u64 + 1;
            assert_eq!((node.parent, node.in_use.unsigned_abs(), node.calls), (NodeId(1), number, 1));
            let until = if number.is_multiple_of(2) { number } else { MANY };
            assert_eq!(node.device_peak.unsigned_abs(), until * (until + 1) / 2, "an open scope sees what came since");
        }
        let groups = inbox.groups();
        assert_eq!(groups.len() as u64, MANY);
        assert_eq!(groups.iter().map(|live| live.bytes.get()).sum::<u64>(), total);
        // And all blocks of a context go.
        let of_context = |address, context| {
            let EventKind::Alloc { key, block } = alloc(address, 1) else { unreachable!() };
            EventKind::Alloc { key, block: Block { context, ..block } }
        };
        (1..=MANY).for_each(|block| _ = inbox.post(&of_context(block << 32, 7)));
        let before = inbox.lock().number;
        inbox.post(&EventKind::ContextDestroyed { context: 7 });
        assert_eq!((inbox.counts().gone, inbox.lock().number), (MANY, before + 1));
        assert_eq!(inbox.groups().iter().map(|live| live.bytes.get()).sum::<u64>(), total);
    }

    /// While others allocate in between, what is told of a path contradicts nothing that is told of those inside it.
    #[test]
    fn paths_agree_with_those_inside_them() {
        let inbox = Inbox::new();
        inbox.post(&open_at(0, 2));
        for scope in 1..=MANY {
            inbox.post(&open_at(scope, 2 + u32::try_from(scope).unwrap()));
            inbox.post(&EventKind::Leave { scope: ScopeId(scope) });
        }
        let is_over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|threads| {
            threads.spawn(|| {
                for block in (1..).take_while(|_| !is_over.load(std::sync::atomic::Ordering::Relaxed)) {
                    // Each stays for a while, in the last scope or another.
                    inbox.post(&EventKind::Enter { scope: ScopeId(if block % 3 == 0 { 1 } else { MANY }) });
                    inbox.post(&alloc(block << 20, block % 1000));
                    inbox.post(&EventKind::Leave { scope: ScopeId(if block % 3 == 0 { 1 } else { MANY }) });
                    if block > 20 {
                        inbox.post(&free((block - 20) << 20));
                    }
                }
            });
            let told: Vec<_> = (0..50).map(|_| inbox.nodes()).collect();
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            for nodes in told {
                let mut inside = vec![(0, 0); nodes.len()];
                for (_, node) in nodes.iter().skip(2) {
                    let parent = &mut inside[node.parent.0 as usize];
                    *parent = (parent.0 + node.in_use, node.peak.max(parent.1));
                }
                for ((_, node), (in_use, peak)) in nodes.iter().zip(inside) {
                    assert!(node.in_use >= in_use && node.peak >= peak && node.peak >= node.in_use, "{node:?}");
                }
            }
        });
    }

    /// Frees a block when its thread ends, as a cache in a variable of the thread does.
    struct Cached(Cell<u64>, std::sync::Arc<Inbox>);

    impl Drop for Cached {
        fn drop(&mut self) {
            self.1.post(&free(self.0.get()));
        }
    }

    std::thread_local! {
        static CACHED: std::cell::OnceCell<Cached> = const { std::cell::OnceCell::new() };
    }

    #[test]
    fn threads_that_have_ended_leave_nothing() {
        let inbox = std::sync::Arc::new(Inbox::new());
        for address in 1..=3_000 {
            let inbox = std::sync::Arc::clone(&inbox);
            let works = move || {
                CACHED.with(|cached| {
                    if address % 2 == 0 {
                        cached.get_or_init(|| Cached(Cell::new(address), std::sync::Arc::clone(&inbox)));
                    }
                    inbox.post(&open(address));
                    inbox.post(&alloc(address, 10));
                    if address % 2 == 1 {
                        inbox.post(&free(address));
                    }
                });
            };
            thread::spawn(works).join().unwrap();
        }
        let mut door = inbox.lock();
        // Other tests have threads as well.
        let threads = door.ledger.threads();
        assert!(threads < 500, "{threads} records");
        assert_eq!(door.ledger.stats()[0].on_device.bytes.current, 0);
    }

    #[test]
    fn what_makes_the_fold_panic_is_lost_and_nobody_waits_for_it() {
        let inbox = Inbox::new();
        inbox.post(&open(1));
        assert!(inbox.enter(0, |_, _| unlikely(|| panic!("in a hook"))).is_some_and(|done: Option<()>| done.is_none()));
        let panics = AssertUnwindSafe(|| inbox.enter(0, |_, _| panic!("elsewhere")));
        assert!(catch_unwind(panics).is_err_and(|_| true));
        inbox.post(&alloc(1, 10));
        let trace = inbox.ask(None, &close(1)).expect("the scope is open");
        assert_eq!((trace.lost, trace.used.get()), (2, 10));
    }

    #[test]
    fn a_thread_that_comes_back_while_inside_loses_its_fact_and_says_so() {
        let inbox = Inbox::new();
        inbox.post(&open(1));
        inbox.enter(0, |_, _| {
            assert_eq!(inbox.post(&alloc(1, 10)), Answer::Applied);
            assert_eq!(inbox.ask(None, &close(1)), None);
        });
        let trace = inbox.ask(None, &close(1)).expect("the scope is open");
        assert_eq!((trace.lost, trace.used.get()), (2, 0));
    }
}
