//! Tests the library's inbox under a model checker. With real threads, a test can only hope that they meet at the wrong moment.
//! The checker runs the steps of the threads in every order, or in some thousand orders if there are too many.
//!
//! The inbox, the ledger and the model are the library's. `checker.rs` contains the locks, the atomics and the clock that
//! the inbox uses here, and notes which events the ledger applied. Atomics are sequentially consistent here, so these tests
//! cannot show that `Relaxed` is enough. A reader of the code has to check that.

mod checker;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    process::ExitCode,
    sync::{Arc, Mutex},
};

use gpumem_core::{
    inbox::LedgerView,
    ledger::Ledger,
    model::{
        Answer, Block, Bytes, Counted, Device, Event, EventKind, Family, Gauge, GpuMemory, Key, MemKind, PoolId,
        ScopeId, ScopeSpec, Space, ThreadId, Threads, Trace,
    },
};
use libtest_mimic::{Arguments, Trial};
use shuttle::{
    Config, MaxSteps, Runner,
    scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Scheduler},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
};

use crate::checker::{
    Applied, Inbox, Readings, Recorder, Subscription, applied, interrupt_with, set_lends_again, set_patient,
};

fn main() -> ExitCode {
    macro_rules! trials {
        ($($name:ident)*) => { vec![$(Trial::test(stringify!($name), || { $name(); Ok(()) })),*] };
    }
    let trials = trials! {
        each_event_is_applied_once_and_in_the_order_of_its_thread
        each_trace_follows_from_the_order_of_events
        a_free_that_is_recorded_before_the_call_removes_its_own_block
        a_free_that_is_recorded_after_the_call_can_remove_the_next_block_at_the_address
        a_free_that_failed_brings_back_its_own_block
        a_scope_counts_another_thread_in_each_possible_way_and_in_no_other
        a_scope_of_one_thread_does_not_count_another
        a_scope_of_one_thread_does_not_count_a_thread_that_had_its_number
        growth_of_a_pool_under_its_lock_is_no_peak_in_any_order
        growth_of_a_pool_without_a_lock_is_right_or_says_that_it_may_not_be
        a_query_while_a_pool_grows_is_right_or_says_that_it_may_not_be
        parts_of_several_threads_are_counted_once
        a_scope_adopts_what_a_thread_allocates_from_then_on_until_it_is_closed
        no_event_comes_between_a_reading_and_its_query
        lost_events_are_reported_once
        a_scope_is_closed_once
        missed_events_are_reported_as_lost_if_the_loss_is_recorded_first
        no_scope_misses_events_unreported_while_one_thread_subscribes_and_another_unsubscribes
        a_thread_that_asks_does_not_wait_for_another_reading_which_is_left_out_if_it_is_older
        missed_events_may_go_unreported_if_the_loss_is_recorded_afterwards
    };
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

const TOO_MANY_ORDERS: usize = 200_000;

/// Returns the results of `run` in every order of its threads' steps.
fn in_every_order<T: Ord + Send + 'static>(run: impl Fn() -> T + Send + Sync + 'static) -> BTreeSet<T> {
    let (outcomes, runs) = outcomes(DfsScheduler::new(Some(TOO_MANY_ORDERS), false), true, run);
    assert!(runs < TOO_MANY_ORDERS, "too much is done in this run to try every order");
    outcomes
}

/// Returns the results of `run` in many orders: random orders, and orders in which threads change rarely, at random moments.
fn in_many_orders<T: Ord + Send + 'static>(run: impl Fn() -> T + Clone + Send + Sync + 'static) -> BTreeSet<T> {
    let (mut all, _) = outcomes(RandomScheduler::new_from_seed(1, 1_000), false, run.clone());
    all.extend(outcomes(PctScheduler::new_from_seed(1, 3, 1_000), false, run).0);
    all
}

fn outcomes<T: Ord + Send + 'static>(
    scheduler: impl Scheduler + 'static,
    patient: bool,
    run: impl Fn() -> T + Send + Sync + 'static,
) -> (BTreeSet<T>, usize) {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let seeing = Arc::clone(&seen);
    let mut config = Config::new();
    config.max_steps = MaxSteps::FailAfter(10_000);
    // The warning is that atomics are sequentially consistent, which the head of this file mentions.
    config.silence_warnings = true;
    let runs = Runner::new(scheduler, config).run(move || {
        applied();
        set_patient(patient);
        let outcome = run();
        seeing.lock().unwrap().insert(outcome);
    });
    (Arc::into_inner(seen).unwrap().into_inner().unwrap(), runs)
}

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

/// Posts an event as sources do, which use separate functions for allocations and frees.
fn post(inbox: &Inbox, event: &EventKind) -> Answer {
    match event {
        EventKind::Alloc { key, block } if block.kind == MemKind::Part => {
            inbox.part(*key, block.bytes, block.tag());
            Answer::Applied
        }
        EventKind::Alloc { key, block } => {
            inbox.alloc(*key, block.bytes, block.tag());
            Answer::Applied
        }
        EventKind::Free { key, block: None } => inbox.free(*key),
        _ => inbox.post(event),
    }
}

fn open(scope: u64) -> EventKind {
    open_of(scope, Counted::OwnAndUnscoped)
}

fn open_of(scope: u64, counts: Counted) -> EventKind {
    let spec = ScopeSpec { counts, ..ScopeSpec::exact(DEVICE) };
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

const SAMPLE: EventKind =
    EventKind::Sample { device: DEVICE, memory: GpuMemory::new(Bytes::ZERO, Bytes::ZERO, Bytes::ZERO, None) };

const LOST: EventKind = EventKind::Lost { count: 1 };

/// Returns the events that the ledger applied, after checking that their numbers have no gaps and that their times do not
/// decrease.
fn checked_events() -> Vec<Applied> {
    let events = applied();
    assert!(events.iter().map(|event| event.number).eq(1..=events.len() as u64), "numbers have gaps: {events:?}");
    assert!(events.is_sorted_by_key(|event| event.time), "time goes back: {events:?}");
    events
}

/// Returns the live bytes, as the inbox reports them.
fn live(inbox: &Inbox) -> u64 {
    inbox.stats().iter().flat_map(|device| device.kinds).map(|kind| kind.bytes.current).sum()
}

fn used_and_peaked(trace: &Trace) -> (i64, u64) {
    (trace.used.get(), trace.peaked.get())
}

/// A driver that uses an address again as soon as it is freed.
#[derive(Default)]
struct Driver(AtomicBool);

impl Driver {
    const ADDRESS: u64 = 512;

    /// Returns the shared address, or `other`, which only the caller uses, if the shared address is in use.
    fn alloc(&self, other: u64) -> u64 {
        if self.0.swap(true, SeqCst) { other } else { Self::ADDRESS }
    }

    fn free(&self, address: u64) {
        if address == Self::ADDRESS {
            self.0.store(false, SeqCst);
        }
    }
}

/// The events that a thread posted, and the scopes that it closed.
#[derive(Default)]
struct Posted {
    events: Vec<EventKind>,
    closed: Vec<(u64, Trace)>,
}

impl Posted {
    fn post(&mut self, inbox: &Inbox, event: EventKind) {
        post(inbox, &event);
        self.events.push(event);
    }

    fn close(&mut self, inbox: &Inbox, scope: u64) {
        self.events.push(close(scope));
        self.closed.push((scope, inbox.ask(None, &close(scope)).expect("the scope is open")));
    }
}

/// Three threads allocate and free, each in its own scopes, and all in one scope around them. Returns the events that each thread
/// posted, and the bytes that it still has.
fn churn(inbox: &Arc<Inbox>) -> Vec<(ThreadId, Posted, u64)> {
    let driver = Arc::new(Driver::default());
    let mut around = Posted::default();
    around.post(inbox, open_of(0, Counted::AllThreads));
    let threads: Vec<_> = (1..=3_u64)
        .map(|thread| {
            let (inbox, driver) = (Arc::clone(inbox), Arc::clone(&driver));
            thread::spawn(move || {
                let (mut posted, mut kept) = (Posted::default(), 0);
                for round in 0..2 {
                    let (scope, bytes) = (10 * thread + round, 1 << (4 * thread + round));
                    let counts = if thread == 3 { Counted::Own } else { Counted::OwnAndUnscoped };
                    posted.post(&inbox, open_of(scope, counts));
                    let address = driver.alloc(1 << (20 + scope));
                    posted.post(&inbox, alloc(address, bytes));
                    posted.post(&inbox, free(address));
                    // Every free of the second thread fails.
                    if thread == 2 {
                        posted.post(&inbox, EventKind::FreeFailed);
                        kept += bytes;
                    } else {
                        driver.free(address);
                    }
                    posted.close(&inbox, scope);
                }
                (inbox.this_thread(), posted, kept)
            })
        })
        .collect();
    let mut all: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    around.close(inbox, 0);
    all.push((inbox.this_thread(), around, 0));
    all
}

fn each_event_is_applied_once_and_in_the_order_of_its_thread() {
    in_many_orders(|| {
        let inbox = Arc::new(Inbox::tapped(Recorder));
        let all = churn(&inbox);
        let events = checked_events();
        assert_eq!(events.len(), all.iter().map(|(_, posted, _)| posted.events.len()).sum::<usize>());
        for (thread, posted, _) in &all {
            let of_thread: Vec<_> =
                events.iter().filter(|event| event.thread == *thread).map(|event| event.kind).collect();
            assert_eq!(of_thread, posted.events, "{thread:?}");
        }
        let threads: BTreeSet<_> = all.iter().map(|(thread, ..)| thread.0).collect();
        assert!(threads.into_iter().eq(1..=4), "each thread has its own number");
        // Frees that fail do not count.
        assert_eq!(inbox.counts().events, 2 * 3 * 2 - 2);
        assert_eq!(live(&inbox), all.iter().map(|(.., kept)| kept).sum::<u64>());
    });
}

/// Returns used and peaked of each scope when it was closed, from a ledger to which one thread applies the events in this order.
/// `crates/core/src/ledger/tests/histories.rs` compares the ledger with a simple implementation.
fn of_closed_scopes(events: &[Applied]) -> BTreeMap<u64, (i64, u64)> {
    let (mut ledger, mut closed) = (Ledger::default(), BTreeMap::new());
    for Applied { number, time, thread, kind } in events {
        let event = Event { number: *number, time: *time, thread: *thread, kind };
        match kind {
            EventKind::Alloc { .. } | EventKind::Free { .. } => _ = ledger.apply(&event),
            EventKind::Close { scope } => {
                closed.extend(ledger.query(&event).map(|trace| (scope.0, used_and_peaked(&trace))));
            }
            _ => _ = ledger.query(&event),
        }
    }
    closed
}

fn each_trace_follows_from_the_order_of_events() {
    let peaks = in_many_orders(|| {
        let all = churn(&Arc::new(Inbox::tapped(Recorder)));
        let expected = of_closed_scopes(&checked_events());
        let closed = all.iter().flat_map(|(_, posted, _)| &posted.closed);
        let closed = closed.map(|(scope, trace)| {
            assert_eq!((trace.lost, trace.untracked), (0, 0));
            (*scope, used_and_peaked(trace))
        });
        assert_eq!(closed.collect::<BTreeMap<_, _>>(), expected);
        expected[&0]
    });
    assert!(peaks.len() > 1, "the orders differ: {peaks:?}");
}

/// One thread frees 10 bytes, and another thread allocates 100 bytes, possibly at the same address. Returns the live bytes, and
/// the used bytes of a scope around both.
fn handed_over(free_first: bool) -> BTreeSet<(u64, i64)> {
    in_every_order(move || {
        let (inbox, driver) = (Arc::new(Inbox::tapped(Recorder)), Arc::new(Driver::default()));
        post(&inbox, &open(0));
        let address = driver.alloc(0);
        post(&inbox, &alloc(address, 10));
        let gives = thread::spawn({
            let (inbox, driver) = (Arc::clone(&inbox), Arc::clone(&driver));
            move || {
                if free_first {
                    post(&inbox, &free(address));
                    driver.free(address);
                } else {
                    driver.free(address);
                    post(&inbox, &free(address));
                }
            }
        });
        post(&inbox, &alloc(driver.alloc(1024), 100));
        gives.join().unwrap();
        let trace = inbox.ask(None, &close(0)).expect("the scope is open");
        checked_events();
        (live(&inbox), trace.used.get())
    })
}

fn a_free_that_is_recorded_before_the_call_removes_its_own_block() {
    assert_eq!(handed_over(true), [(100, 100)].into());
}

fn a_free_that_is_recorded_after_the_call_can_remove_the_next_block_at_the_address() {
    assert_eq!(handed_over(false), [(0, 0), (100, 100)].into());
}

fn a_free_that_failed_brings_back_its_own_block() {
    let outcomes = in_every_order(|| {
        let inbox = Arc::new(Inbox::tapped(Recorder));
        post(&inbox, &alloc(1, 10));
        post(&inbox, &alloc(2, 100));
        let fails = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                post(&inbox, &free(1));
                post(&inbox, &EventKind::FreeFailed);
            }
        });
        post(&inbox, &free(2));
        fails.join().unwrap();
        live(&inbox)
    });
    assert_eq!(outcomes, [10].into());
}

const POOL: PoolId = PoolId(1);

fn part(address: u64, bytes: u64) -> EventKind {
    let block = Block { context: POOL.0, ..Block::new(DEVICE, Bytes::new(bytes), MemKind::Part) };
    EventKind::Alloc { key: Key::of_part(POOL, address), block }
}

fn unpart(address: u64) -> EventKind {
    EventKind::Free { key: Key::of_part(POOL, address), block: None }
}

/// Returns an inbox with a pool and an open scope.
fn with_pool() -> Arc<Inbox> {
    let inbox = Arc::new(Inbox::tapped(Recorder));
    post(&inbox, &EventKind::PoolRegistered { pool: POOL, device: DEVICE });
    post(&inbox, &open(0));
    inbox
}

/// Posts these events on a new thread.
fn post_on_thread(inbox: &Arc<Inbox>, events: &[EventKind]) -> thread::JoinHandle<()> {
    let (inbox, events) = (Arc::clone(inbox), events.to_vec());
    thread::spawn(move || events.iter().for_each(|event| _ = post(&inbox, event)))
}

/// Used and peaked in both views, and the number of lost events.
type BothViews = ((i64, u64), (i64, u64), u64);

fn of_both_views(trace: &Trace) -> BothViews {
    let driver = trace.driver.expect("there is a pool");
    (used_and_peaked(trace), (driver.used.get(), driver.peaked.get()), trace.lost)
}

/// Two threads let a pool grow. Returns the numbers in both views, and the number of blocks that were counted for the program
/// because results were read too early.
fn growths(has_lock: bool) -> BTreeSet<(BothViews, u64)> {
    in_every_order(move || {
        let inbox = with_pool();
        let lock = Arc::new(shuttle::sync::Mutex::new(()));
        let grow = move |inbox: &Inbox, lock: &shuttle::sync::Mutex<()>, address| {
            let _locked = has_lock.then(|| lock.lock());
            post(inbox, &alloc(address, 100));
            post(inbox, &part(address, 10));
        };
        let other = thread::spawn({
            let (inbox, lock) = (Arc::clone(&inbox), Arc::clone(&lock));
            move || grow(&inbox, &lock, 2000)
        });
        grow(&inbox, &lock, 1000);
        other.join().unwrap();
        let trace = inbox.ask(None, &close(0)).expect("the scope is open");
        (of_both_views(&trace), inbox.pools()[0].read_early)
    })
}

fn growth_of_a_pool_under_its_lock_is_no_peak_in_any_order() {
    assert_eq!(growths(true), [(((20, 0), (200, 0), 0), 0)].into());
}

fn growth_of_a_pool_without_a_lock_is_right_or_says_that_it_may_not_be() {
    let early = |blocks| (((20, 90), (200, 0), 0), blocks);
    assert_eq!(growths(false), [(((20, 0), (200, 0), 0), 0), early(1), early(2)].into());
}

fn a_query_while_a_pool_grows_is_right_or_says_that_it_may_not_be() {
    let seen = in_every_order(|| {
        let inbox = with_pool();
        let other = post_on_thread(&inbox, &[alloc(2000, 100), part(2000, 10)]);
        post(&inbox, &EventKind::PoolsQueried);
        other.join().unwrap();
        let trace = inbox.ask(None, &close(0)).expect("the scope is open");
        (of_both_views(&trace), inbox.pools()[0].read_early)
    });
    assert_eq!(seen, [(((10, 0), (100, 0), 0), 0), (((10, 90), (100, 0), 0), 1)].into());
}

fn parts_of_several_threads_are_counted_once() {
    let seen = in_many_orders(|| {
        let inbox = with_pool();
        post(&inbox, &alloc(1000, 100));
        post(&inbox, &part(1000, 1));
        let others = [
            post_on_thread(&inbox, &[part(1010, 2), unpart(1010), part(1010, 4)]),
            // The freed part does not exist, whatever the order is.
            post_on_thread(&inbox, &[part(1020, 8), unpart(1030)]),
            post_on_thread(&inbox, &[EventKind::PoolReserved { pool: POOL, bytes: Bytes::new(100) }, part(1040, 16)]),
        ];
        for other in others {
            other.join().unwrap();
        }
        let trace = inbox.ask(None, &close(0)).expect("the scope is open");
        checked_events();
        let pool = inbox.pools()[0];
        (trace.used.get(), trace.lost, pool.parts, pool.part_bytes.get(), pool.wrong.unknown)
    });
    assert_eq!(seen, [(29, 1, 4, 29, 1)].into());
}

/// Returns the used bytes of a scope of one thread that adopts another thread, which allocates 10 bytes and then 100 bytes.
fn bytes_that_a_scope_adopts(threads: Threads) -> BTreeSet<i64> {
    in_many_orders(move || {
        let inbox = Arc::new(Inbox::tapped(Recorder));
        let other = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                post(&inbox, &alloc(1, 10));
                post(&inbox, &alloc(2, 100));
                inbox.this_thread()
            }
        });
        post(&inbox, &open_of(0, Counted::Own));
        post(&inbox, &EventKind::Adopt { scope: ScopeId(0), threads });
        let trace = inbox.ask(None, &close(0)).expect("the scope is open");
        let other = other.join().unwrap();
        let events = checked_events();
        let mut is_adopting = false;
        let (mut adopted, mut names) = (0, Vec::new());
        for event in &events {
            match event.kind {
                EventKind::Adopt { .. } => is_adopting = true,
                EventKind::Close { .. } => is_adopting = false,
                EventKind::Alloc { block, .. } if is_adopting => adopted += block.bytes.get().cast_signed(),
                EventKind::Named { .. } => names.push((event.number, event.thread, is_adopting)),
                _ => {}
            }
        }
        assert_eq!(trace.used.get(), if threads == Threads::named("other") { 0 } else { adopted });
        // The name is asked for once, right before the first allocation that depends on it.
        assert!(names.len() == usize::from(adopted > 0 && threads != Threads::Unscoped), "{names:?}");
        for (number, thread, was_adopting) in names {
            let next = events.iter().find(|event| event.number == number + 1).expect("an allocation");
            assert!(was_adopting && (thread, next.thread) == (other, other));
            assert!(matches!(next.kind, EventKind::Alloc { .. }));
        }
        trace.used.get()
    })
}

fn a_scope_adopts_what_a_thread_allocates_from_then_on_until_it_is_closed() {
    let all = [0, 10, 100, 110].into();
    assert_eq!(bytes_that_a_scope_adopts(Threads::Unscoped), all);
    assert_eq!(bytes_that_a_scope_adopts(Threads::named("worker-")), all);
    assert_eq!(bytes_that_a_scope_adopts(Threads::named("other")), [0].into());
}

/// Returns used and peaked of a scope while another thread allocates 100 bytes and frees them.
fn results_next_to_another_thread(counts: Counted) -> BTreeSet<(i64, u64)> {
    in_every_order(move || {
        let inbox = Arc::new(Inbox::tapped(Recorder));
        let other = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                post(&inbox, &alloc(1, 100));
                post(&inbox, &free(1));
            }
        });
        post(&inbox, &open_of(0, counts));
        let trace = inbox.ask(None, &close(0)).expect("the scope is open");
        other.join().unwrap();
        checked_events();
        used_and_peaked(&trace)
    })
}

fn a_scope_counts_another_thread_in_each_possible_way_and_in_no_other() {
    // The scope has seen no event, or only a block that stayed live; only the free; both events; or only the allocation.
    assert_eq!(results_next_to_another_thread(Counted::OwnAndUnscoped), [(0, 0), (-100, 0), (0, 100), (100, 0)].into());
}

fn a_scope_of_one_thread_does_not_count_another() {
    assert_eq!(results_next_to_another_thread(Counted::Own), [(0, 0)].into());
}

/// There are two threads, and the first may end before the second starts. The outcomes are whether both had the same id.
fn a_scope_of_one_thread_does_not_count_a_thread_that_had_its_number() {
    let outcomes = in_many_orders(|| {
        set_lends_again(true);
        let inbox = Arc::new(Inbox::tapped(Recorder));
        let threads = [1, 2].map(|thread| {
            let inbox = Arc::clone(&inbox);
            thread::spawn(move || {
                let number = inbox.this_thread();
                post(&inbox, &open_of(thread, Counted::Own));
                post(&inbox, &alloc(thread, 100 * thread));
                // The block belongs to the trace in which it was allocated, whichever thread frees it.
                post(&inbox, &free(3 - thread));
                let trace = inbox.ask(None, &EventKind::Read { scope: ScopeId(thread) }).expect("it is open");
                assert_eq!(trace.peaked.get() + trace.used.get().unsigned_abs(), 100 * thread);
                number
            })
        });
        let numbers = threads.map(|thread| thread.join().unwrap());
        set_lends_again(false);
        checked_events();
        numbers[0] == numbers[1]
    });
    assert_eq!(outcomes, [false, true].into());
}

fn no_event_comes_between_a_reading_and_its_query() {
    in_every_order(|| {
        let inbox = Arc::new(Inbox::tapped(Recorder));
        post(&inbox, &open(0));
        let other = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                post(&inbox, &alloc(1, 100));
                assert_eq!(inbox.ask(Some(&SAMPLE), &close(1)), None, "there is no such scope");
            }
        });
        assert!(inbox.ask(Some(&SAMPLE), &close(0)).is_some());
        other.join().unwrap();
        let events = checked_events();
        let samples = events.iter().filter(|event| matches!(event.kind, EventKind::Sample { .. }));
        assert_eq!(samples.count(), 2);
        for pair in events.windows(2).filter(|pair| matches!(pair[0].kind, EventKind::Sample { .. })) {
            assert_eq!(pair[0].thread, pair[1].thread, "{events:?}");
        }
    });
}

/// Threads are interrupted while they are in the inbox, or wait for it, and the interruption posts to the inbox. Returns the
/// number of lost events in the scope around all threads.
fn interrupted(threads: u64) -> u64 {
    let inbox = Arc::new(Inbox::tapped(Recorder));
    post(&inbox, &open(0));
    let threads: Vec<_> = (1..=threads)
        .map(|thread| {
            let inbox = Arc::clone(&inbox);
            thread::spawn(move || {
                let inside = Arc::clone(&inbox);
                interrupt_with(move || assert_eq!(post(&inside, &alloc(thread, 100)), Answer::Applied));
                post(&inbox, &open(thread));
                let inside = Arc::clone(&inbox);
                interrupt_with(move || assert_eq!(inside.ask(Some(&SAMPLE), &close(thread)), None));
                assert!(inbox.ask(None, &close(thread)).is_some());
            })
        })
        .collect();
    // The next event of any thread records the loss.
    post(&inbox, &EventKind::ReadFailed { device: DEVICE, gauge: Gauge::Sampled });
    for thread in threads {
        thread.join().unwrap();
    }
    let trace = inbox.ask(None, &close(0)).expect("the scope is open");
    let counts: Vec<_> = checked_events()
        .iter()
        .filter_map(|event| if let EventKind::Lost { count } = event.kind { Some(count) } else { None })
        .collect();
    assert!(counts.iter().all(|count| *count > 0));
    assert_eq!(counts.iter().sum::<u64>(), trace.lost);
    assert_eq!(live(&inbox), 0);
    trace.lost
}

fn lost_events_are_reported_once() {
    assert_eq!(in_many_orders(|| interrupted(3)), [9].into());
    assert_eq!(in_every_order(|| interrupted(1)), [3].into());
}

fn a_scope_is_closed_once() {
    let outcomes = in_every_order(|| {
        let inbox = Arc::new(Inbox::tapped(Recorder));
        post(&inbox, &open(0));
        let other = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || inbox.ask(None, &close(0)).is_some()
        });
        let here = inbox.ask(None, &close(0)).is_some();
        (here, other.join().unwrap())
    });
    assert_eq!(outcomes, [(true, false), (false, true)].into());
}

/// The actions of another thread on the subscription.
type Other = fn(&Subscription, &Arc<Inbox>, &AtomicBool, bool);

/// Opens a scope as the session does, and allocates in it, while other threads make these calls. Returns whether the allocation
/// was intercepted, and whether the scope reports lost events. `None` if the scope is not exact.
fn unsubscribed(loss_first: bool, others: &'static [Other]) -> BTreeSet<Option<(bool, bool)>> {
    in_many_orders(move || {
        let (inbox, subscribed) = (Arc::new(Inbox::tapped(Recorder)), Arc::new(AtomicBool::new(true)));
        let subscription = Arc::new(Subscription::new());
        let others: Vec<_> = others
            .iter()
            .map(|other| {
                let (inbox, subscribed, subscription) =
                    (Arc::clone(&inbox), Arc::clone(&subscribed), Arc::clone(&subscription));
                thread::spawn(move || other(&subscription, &inbox, &subscribed, loss_first))
            })
            .collect();
        let before = subscription.interruptions();
        let outcome = start(&subscription, false, &subscribed).then(|| {
            post(&inbox, &open(0));
            if subscription.interruptions() != before {
                post(&inbox, &LOST);
            }
            let intercepted = subscribed.load(SeqCst);
            if intercepted {
                post(&inbox, &alloc(1, 100));
            }
            let trace = inbox.ask(None, &close(0)).expect("the scope is open");
            (intercepted, trace.lost > 0)
        });
        for other in others {
            other.join().unwrap();
        }
        assert_ne!(
            subscription.why_not(|| "given up").is_some(),
            subscribed.load(SeqCst),
            "what was wanted last is what is"
        );
        checked_events();
        outcome
    })
}

fn give_up(subscription: &Subscription, inbox: &Arc<Inbox>, subscribed: &AtomicBool, loss_first: bool) {
    let record_loss = || _ = post(inbox, &LOST);
    let unsubscribe = || subscribed.store(false, SeqCst);
    let is_live = || subscribed.load(SeqCst);
    if loss_first {
        subscription.stop(is_live, record_loss, unsubscribe);
    } else {
        subscription.stop(is_live, unsubscribe, record_loss);
    }
}

/// Subscribes to a driver that never rejects a subscription. Returns whether allocations are intercepted.
fn start(subscription: &Subscription, anew: bool, subscribed: &AtomicBool) -> bool {
    let subscribe = || {
        subscribed.store(true, SeqCst);
        Ok(())
    };
    subscription.start(anew, || "given up", subscribe).is_ok()
}

fn restart(subscription: &Subscription, _: &Arc<Inbox>, subscribed: &AtomicBool, _: bool) {
    assert!(start(subscription, true, subscribed));
}

fn no_scope_misses_events_unreported_while_one_thread_subscribes_and_another_unsubscribes() {
    let outcomes = unsubscribed(true, &[give_up, restart]);
    assert!(!outcomes.contains(&Some((false, false))), "{outcomes:?}");
    assert!(outcomes.contains(&None) && outcomes.contains(&Some((true, false))), "{outcomes:?}");
    let outcomes = unsubscribed(true, &[give_up, restart, give_up]);
    assert!(!outcomes.contains(&Some((false, false))), "{outcomes:?}");
}

fn a_thread_that_asks_does_not_wait_for_another_reading_which_is_left_out_if_it_is_older() {
    // A reading may take long: the driver's library may be slow, and the function of a custom gauge may wait for the thread that
    // asks.
    for device in [DEVICE, Device { family: Family::Custom, ordinal: 0 }] {
        let recorded = in_many_orders(move || recorded_beside_a_sampler(device));
        assert!(recorded.contains(&5) && recorded.iter().any(|count| *count < 5), "{recorded:?}");
    }
}

/// Returns the number of recorded readings of a sampler that waits for the thread that opens and closes a scope.
fn recorded_beside_a_sampler(device: Device) -> usize {
    let inbox = Arc::new(Inbox::tapped(Recorder));
    let (readings, count) = (Arc::new(Readings::new()), Arc::new(AtomicU64::new(0)));
    let of_program = Arc::new(shuttle::sync::Mutex::new(()));
    let read = move |started: u64, count: &AtomicU64| {
        let used = Bytes::new(started << 32 | count.fetch_add(1, SeqCst));
        EventKind::Sample { device, memory: GpuMemory::new(used, Bytes::ZERO, used, None) }
    };
    let sampler = thread::spawn({
        let (inbox, readings, count, of_program) =
            (Arc::clone(&inbox), Arc::clone(&readings), Arc::clone(&count), Arc::clone(&of_program));
        move || {
            for _ in 0..3 {
                let started = count.fetch_add(1, SeqCst);
                readings.post(&inbox, device, || {
                    let sample = read(started, &count);
                    drop(of_program.lock().unwrap());
                    sample
                });
            }
        }
    });
    let spec = ScopeSpec { gauge: Gauge::Sampled, ..ScopeSpec::exact(device) };
    let open = EventKind::Open { scope: ScopeId(0), spec };
    let held = of_program.lock().unwrap();
    let started = count.fetch_add(1, SeqCst);
    let Ok(_) = readings.ask::<Infallible>(&inbox, device, || Ok(read(started, &count)), &open);
    let before = count.fetch_add(1, SeqCst);
    let Ok(_) = readings.ask::<Infallible>(&inbox, device, || Ok(read(before, &count)), &close(0));
    drop(held);
    sampler.join().unwrap();
    let (mut recorded, mut at_close) = (Vec::new(), None);
    for event in checked_events() {
        match event.kind {
            // The used bytes contain the times at which the reading started and ended.
            EventKind::Sample { memory, .. } => {
                recorded.push((memory.used.get() >> 32, memory.used.get() & 0xffff_ffff));
            }
            EventKind::Close { .. } => at_close = recorded.last().copied(),
            _ => {}
        }
    }
    let is_older = |pair: &[(u64, u64)]| pair[1].1 < pair[0].0;
    assert!(!recorded.windows(2).any(is_older), "an older reading after a newer one: {recorded:?}");
    assert!(at_close.expect("a reading").1 > before, "the trace ends with an old reading: {recorded:?}");
    recorded.len()
}

fn missed_events_are_reported_as_lost_if_the_loss_is_recorded_first() {
    let expected = [None, Some((true, false)), Some((true, true)), Some((false, true))];
    assert_eq!(unsubscribed(true, &[give_up]), expected.into());
}

fn missed_events_may_go_unreported_if_the_loss_is_recorded_afterwards() {
    assert!(unsubscribed(false, &[give_up]).contains(&Some((false, false))));
}
