//! Where memory is: scopes over threads and tasks, the summary, the breakdown, what
//! is still there, what is said when memory runs out. What changes the whole process runs in a process of its own.

use std::{
    collections::BTreeMap,
    env,
    future::{Future, poll_fn},
    mem,
    panic::{AssertUnwindSafe, catch_unwind, panic_any},
    pin::{Pin, pin},
    process::{Command, Output, Stdio},
    sync::{
        Barrier, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
};

use gpumem::{
    Bytes, Error, GpuMemTrace, LiveBlock, OutOfMemory, PartKind, ScopeHandle, ScopeSummary, Sink, breakdown,
    gpu_mem_trace, on_oom, retry_after_trim,
    sim::{SimBlock, SimGpu},
};
use gpumem_tests::{Random, simulated_gpu};
use unicode_width::UnicodeWidthStr;

const MIB: u64 = 1 << 20;

fn take(gpu: &SimGpu, bytes: u64) -> SimBlock {
    gpu.alloc(Bytes::new(bytes)).expect("the device has room")
}

/// What the summary says of a device, by path.
fn scopes(gpu: &SimGpu) -> BTreeMap<String, ScopeSummary> {
    let all = gpumem::summary().scopes.into_iter().filter(|scope| scope.device == gpu.ordinal());
    all.map(|scope| (scope.path.join("/"), scope)).collect()
}

/// What was ever allocated in each path of a device, the scopes inside it included, and what of that is in use.
#[track_caller]
fn check_scopes(gpu: &SimGpu, expected: &[(&str, u64, u64)]) {
    let told: Vec<_> =
        scopes(gpu).into_iter().map(|(path, scope)| (path, scope.allocated.get(), scope.used.get())).collect();
    let told: Vec<_> = told.iter().map(|(path, allocated, used)| (path.as_str(), *allocated, *used)).collect();
    assert_eq!(told, expected);
}

fn sizes(blocks: &[LiveBlock]) -> Vec<u64> {
    blocks.iter().map(|block| block.bytes.get()).collect()
}

/// Pending once.
async fn others_turn() {
    let mut is_over = false;
    poll_fn(|context| {
        context.waker().wake_by_ref();
        if mem::replace(&mut is_over, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Polls both in turns on one thread, as `join!` does.
async fn join<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut of_a, mut of_b) = (None, None);
    poll_fn(|context| {
        for is_first in [true, false] {
            if is_first && of_a.is_none() {
                if let Poll::Ready(value) = a.as_mut().poll(context) {
                    of_a = Some(value);
                }
            } else if !is_first
                && of_b.is_none()
                && let Poll::Ready(value) = b.as_mut().poll(context)
            {
                of_b = Some(value);
            }
        }
        if of_a.is_some() && of_b.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (of_a.expect("it has ended"), of_b.expect("it has ended"))
}

mod nesting {
    use super::*;

    #[test]
    fn a_thread_allocates_in_the_scope_that_it_was_handed() {
        let gpu = simulated_gpu();
        let trace = GpuMemTrace::with_ctx("load");
        let handle = trace.handle();
        let of_trace = take(&gpu, 1);
        let blocks = thread::scope(|threads| {
            let spawn = |thread: u64, handed: bool| {
                let (gpu, handle) = (&gpu, handle.clone());
                threads.spawn(move || {
                    gpu.make_current();
                    let entered = handed.then(|| handle.enter());
                    let outside = take(gpu, 10 + thread);
                    let inside = GpuMemTrace::scope("decode", |_| take(gpu, 100 + thread));
                    drop(entered);
                    (outside, inside, take(gpu, 1000))
                })
            };
            let threads: Vec<_> = (0..4).map(|thread| spawn(thread, true)).chain([spawn(9, false)]).collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect::<Vec<_>>()
        });
        let (outer, inner) = (10 + 11 + 12 + 13, 100 + 101 + 102 + 103);
        let all = 1 + outer + inner + 4 * 1000 + 19 + 109 + 1000;
        check_scopes(
            &gpu,
            &[
                ("", all, all),
                ("decode", 109, 109),
                ("load", 1 + outer + inner, 1 + outer + inner),
                ("load/decode", inner, inner),
            ],
        );
        assert_eq!(scopes(&gpu)["load/decode"].calls, 4);
        drop((blocks, of_trace));
        assert!(scopes(&gpu).values().all(|scope| scope.used == Bytes::ZERO && scope.peak > Bytes::ZERO));
    }

    #[test]
    fn tasks_that_take_turns_on_one_thread_have_their_own() {
        let gpu = simulated_gpu();
        let (a, b) = (GpuMemTrace::with_ctx("a"), GpuMemTrace::with_ctx("b"));
        // Who opens a scope is in it: tasks are to be entered from outside of both.
        let (in_a, in_b) = (a.handle(), b.handle());
        let task = |handle: &ScopeHandle, bytes: u64| {
            let gpu = gpu.clone();
            handle.wrap(async move {
                let mut kept = Vec::new();
                for _ in 0..3 {
                    kept.push(take(&gpu, bytes));
                    others_turn().await;
                }
                kept
            })
        };
        thread::scope(|threads| {
            threads.spawn(|| {
                gpu.make_current();
                let kept = pollster::block_on(join(task(&in_a, 1), task(&in_b, 10)));
                check_scopes(&gpu, &[("", 33, 33), ("a", 33, 33), ("a/b", 30, 30)]);
                let between = take(&gpu, 100);
                drop((kept, between));
            });
        });
        check_scopes(&gpu, &[("", 133, 0), ("a", 33, 0), ("a/b", 30, 0)]);
    }

    #[test]
    fn a_task_that_moves_between_threads_stays_in_its_scope() {
        let gpu = simulated_gpu();
        let trace = GpuMemTrace::with_ctx("request");
        let of_task = gpu.clone();
        let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(trace.handle().wrap(async move {
            let mut kept = Vec::new();
            for size in [1, 10, 100] {
                kept.push(take(&of_task, size));
                others_turn().await;
            }
            // Dropped in the scope as well.
        }));
        let mut kept = Vec::new();
        loop {
            let (polled, own) = thread::scope(|threads| {
                let poll = || {
                    gpu.make_current();
                    let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    (polled, take(&gpu, 1000))
                };
                threads.spawn(poll).join().expect("it does not panic")
            });
            kept.push(own);
            if polled.is_ready() {
                break;
            }
        }
        let own = 1000 * kept.len() as u64;
        assert_eq!(kept.len(), 4);
        check_scopes(&gpu, &[("", own + 111, own), ("request", 111, 0)]);
    }

    #[gpu_mem_trace]
    async fn alpha(gpu: &SimGpu) -> Vec<SimBlock> {
        let first = take(gpu, 1);
        others_turn().await;
        vec![first, take(gpu, 2)]
    }

    #[gpu_mem_trace]
    async fn beta(gpu: &SimGpu) -> Vec<SimBlock> {
        let first = take(gpu, 10);
        others_turn().await;
        let inner = alpha(gpu).await;
        others_turn().await;
        [vec![first, take(gpu, 20)], inner].into_iter().flatten().collect()
    }

    #[gpu_mem_trace]
    async fn both(gpu: &SimGpu) -> (Vec<SimBlock>, Vec<SimBlock>) {
        join(alpha(gpu), beta(gpu)).await
    }

    #[test]
    fn traced_async_functions_that_are_joined_have_their_own() {
        let gpu = simulated_gpu();
        let kept = pollster::block_on(both(&gpu));
        let between = take(&gpu, 1000);
        check_scopes(
            &gpu,
            &[
                ("", 1036, 1036),
                ("both", 36, 36),
                ("both/alpha", 3, 3),
                ("both/beta", 33, 33),
                ("both/beta/alpha", 3, 3),
            ],
        );
        // One that is dropped before its end leaves its scope too.
        {
            let mut dropped = pin!(alpha(&gpu));
            assert!(dropped.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        let after = take(&gpu, 1);
        assert_eq!((scopes(&gpu)["alpha"].calls, scopes(&gpu)["alpha"].used), (1, Bytes::ZERO));
        assert_eq!(scopes(&gpu)[""].used.get(), 1037);
        drop((kept, between, after));
    }

    #[test]
    fn a_handle_that_outlives_its_trace() {
        let gpu = simulated_gpu();
        let trace = GpuMemTrace::with_ctx("closed");
        let handle = trace.handle();
        let (before, after) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|threads| {
            let inside = threads.spawn(|| {
                gpu.make_current();
                let entered = handle.enter();
                before.wait();
                after.wait();
                // Closed meanwhile: this thread is in it until it leaves.
                let inside = take(&gpu, 1);
                drop(entered);
                (inside, take(&gpu, 10))
            });
            before.wait();
            drop(trace);
            after.wait();
            drop(inside.join().expect("it does not panic"));
        });
        check_scopes(&gpu, &[("", 11, 0), ("closed", 1, 0)]);
        // Entered when it is closed: nothing is.
        let outer = GpuMemTrace::with_ctx("outer");
        let block = handle.in_scope(|| take(&gpu, 100));
        let of_task = pollster::block_on(handle.wrap(async { take(&gpu, 200) }));
        drop(outer);
        check_scopes(&gpu, &[("", 311, 300), ("closed", 1, 0), ("outer", 300, 300)]);
        drop((block, of_task));
        // Of a trace that is off, likewise.
        let off = GpuMemTrace::builder().device(u32::MAX).ctx("off").start_or_off();
        drop(off.handle().in_scope(|| take(&gpu, 5)));
        assert_eq!(scopes(&gpu)[""].allocated.get(), 316);
        assert!(!scopes(&gpu).contains_key("off"));
    }

    #[test]
    fn guards_that_are_dropped_out_of_order_and_while_unwinding() {
        let gpu = simulated_gpu();
        let (a, b) = (GpuMemTrace::with_ctx("a"), GpuMemTrace::with_ctx("b"));
        drop(a);
        let in_b = take(&gpu, 1);
        drop(b);
        let outside = take(&gpu, 10);
        // Nothing of it was allocated in `a`.
        check_scopes(&gpu, &[("", 11, 11), ("a", 0, 0), ("b", 1, 1)]);
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _trace = GpuMemTrace::with_ctx("unwinding");
            let _held = take(&gpu, 100);
            panic_any(());
        }));
        assert!(unwound.is_err());
        drop((take(&gpu, 1000), in_b, outside));
        check_scopes(&gpu, &[("", 1111, 0), ("a", 0, 0), ("b", 1, 0), ("unwinding", 100, 0)]);
        // A variable that is used again and again.
        let mut trace = GpuMemTrace::with_ctx("cell");
        let mut kept = Vec::new();
        for _ in 0..3 {
            drop(std::mem::replace(&mut trace, GpuMemTrace::with_ctx("cell")));
            kept.push(take(&gpu, 1));
        }
        drop((trace, kept));
        assert_eq!((scopes(&gpu)["cell"].calls, scopes(&gpu)["cell"].allocations), (4, 3));
        assert!(!scopes(&gpu).contains_key("cell/cell"));
    }
}

#[test]
fn a_scope_on_a_device_that_it_was_not_opened_for() {
    let other = simulated_gpu();
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("here");
    let block = take(&other, 5);
    let told = &scopes(&other)["here"];
    let figures = [told.calls, told.used.get(), told.peak.get(), told.device_peak.get()];
    assert_eq!(figures, [0, 5, 5, 5], "no less in use on the device than in the scope");
    assert_eq!(scopes(&gpu)["here"].device_peak, Bytes::ZERO);
    assert_eq!(sizes(&trace.live()), [5]);
    drop(block);
}

#[test]
fn what_is_too_deep_to_be_told_apart_is_in_all_scopes_around_it() {
    fn deeper(gpu: &SimGpu, depth: usize) -> SimBlock {
        let trace = GpuMemTrace::with_ctx("deeper");
        let block = if depth == 0 { take(gpu, 7) } else { deeper(gpu, depth - 1) };
        if depth.is_multiple_of(250) {
            assert_eq!(sizes(&trace.live()), [7]);
        }
        block
    }
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("outermost");
    let _block = deeper(&gpu, 1_000);
    assert_eq!(sizes(&trace.live()), [7]);
    let told = scopes(&gpu);
    assert!(told.len() == 2 + 64 && told.values().all(|scope| scope.used == 7 && scope.allocations == 1), "{told:#?}");
    let calls: u64 = told.values().map(|scope| scope.calls).sum();
    assert_eq!(calls, 1 + 1_001);
}

/// What a test keeps by itself of what it does, to be compared with what is told.
#[derive(Default)]
struct Log {
    events: u64,
    in_use: u64,
    scopes: BTreeMap<Vec<String>, Figures>,
    /// The scopes that are open, by the event that opened them: their path, and the most that was in use meanwhile.
    open: BTreeMap<u64, (Vec<String>, u64)>,
    /// The paths that each scope ever had.
    paths: BTreeMap<u64, Vec<Vec<String>>>,
    blocks: Vec<(SimBlock, AllocGroup)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    calls: u64,
    used: u64,
    peak: u64,
    device_peak: u64,
    allocated: u64,
    allocations: u64,
}

#[derive(Clone, Debug)]
struct AllocGroup {
    event: u64,
    path: Vec<String>,
    /// Who allocated it, then on whose behalf that was.
    strand: Vec<u64>,
}

/// Where a thread is: in a trace of its own, or in one that it was handed.
struct Place {
    path: Vec<String>,
    strand: Vec<u64>,
    of: Guard,
}

enum Guard {
    /// And the event that opened it.
    Own(Box<GpuMemTrace>, AllocGroup),
    /// And the event that opened it.
    Handed(#[expect(dead_code)] gpumem::Entered, u64),
}

impl Log {
    fn above(path: &[String]) -> impl Iterator<Item = Vec<String>> {
        (0..=path.len()).map(|depth| path[..depth].to_vec())
    }

    fn alloc(&mut self, block: SimBlock, path: &[String], strand: &[u64]) {
        self.events += 1;
        let bytes = block.bytes().get();
        self.in_use += bytes;
        for above in Self::above(path) {
            let figures = self.scopes.entry(above).or_default();
            figures.used += bytes;
            figures.peak = figures.peak.max(figures.used);
            figures.allocated += bytes;
            figures.allocations += 1;
        }
        self.blocks.push((block, AllocGroup { event: self.events, path: path.to_vec(), strand: strand.to_vec() }));
        self.see();
    }

    /// Takes a block out, to be freed.
    fn free(&mut self, at: usize) -> SimBlock {
        let (block, origin) = self.blocks.swap_remove(at);
        self.in_use -= block.bytes().get();
        for above in Self::above(&origin.path) {
            self.scopes.get_mut(&above).expect("it was allocated there").used -= block.bytes().get();
        }
        block
    }

    fn see(&mut self) {
        for (path, most) in self.open.values_mut() {
            *most = self.in_use.max(*most);
            let figures = self.scopes.entry(path.clone()).or_default();
            figures.device_peak = figures.device_peak.max(*most);
        }
    }

    fn opened(&mut self, path: &[String]) -> u64 {
        self.events += 1;
        self.scopes.entry(path.to_vec()).or_default().calls += 1;
        self.open.insert(self.events, (path.to_vec(), 0));
        self.paths.insert(self.events, vec![path.to_vec()]);
        self.see();
        self.events
    }

    /// A scope has another path from now on.
    fn moved(&mut self, opened: u64, to: &[String]) {
        let (path, _) = self.open.get_mut(&opened).expect("it is open");
        let from = std::mem::replace(path, to.to_vec());
        self.scopes.get_mut(&from).expect("it was opened there").calls -= 1;
        self.scopes.entry(to.to_vec()).or_default().calls += 1;
        self.paths.entry(opened).or_default().push(to.to_vec());
        self.see();
    }

    /// A thread closes a trace that is not its newest: what it opened inside is in the scope around it from now on.
    fn close_early(&mut self, places: &mut Vec<Place>, at: usize) {
        let closed = places.remove(at);
        self.left(&closed);
        let mut outer = closed.path.clone();
        outer.pop();
        let mut left = closed.path.clone();
        let mut moved: Vec<(u64, Vec<String>)> = Vec::new();
        for place in &mut places[at..] {
            let (opened, is_own) = match &place.of {
                Guard::Own(_, opened) => (opened.event, true),
                Guard::Handed(_, opened) => (*opened, false),
            };
            let to = if let Some((_, to)) = moved.iter().find(|(of, _)| *of == opened) {
                to.clone()
            } else {
                let Some((name, _)) = place.path.split_last().filter(|(_, parent)| is_own && *parent == left) else {
                    break;
                };
                let to: Vec<_> = outer.iter().cloned().chain([name.clone()]).collect();
                self.moved(opened, &to);
                moved.push((opened, to.clone()));
                to
            };
            left = std::mem::replace(&mut place.path, to.clone());
            outer = to;
        }
    }

    fn left(&mut self, place: &Place) {
        if let Guard::Own(_, opened) = &place.of {
            self.open.remove(&opened.event);
        }
    }

    #[track_caller]
    fn check(&self, gpu: &SimGpu) {
        let told = |scope: &ScopeSummary| Figures {
            calls: scope.calls,
            used: scope.used.get(),
            peak: scope.peak.get(),
            device_peak: scope.device_peak.get(),
            allocated: scope.allocated.get(),
            allocations: scope.allocations,
        };
        let summary = gpumem::summary();
        let own = summary.scopes.iter().filter(|scope| scope.device == gpu.ordinal());
        let own: Vec<_> = own.map(|scope| (scope.path.clone(), told(scope))).collect();
        assert!(own.windows(2).all(|pair| pair[0].1.peak >= pair[1].1.peak), "ordered by peak: {own:?}");
        let mut expected = self.scopes.clone();
        expected.retain(|_, figures| figures.calls > 0 || figures.allocations > 0);
        // Where a scope was handed to, they may have gone on in it after it was closed.
        for figures in expected.values_mut() {
            figures.device_peak = figures.device_peak.max(figures.peak);
        }
        assert_eq!(own.into_iter().collect::<BTreeMap<_, _>>(), expected);
        assert_eq!((summary.untracked, summary.lost, summary.unheard), (0, 0, None));
    }

    /// What is live by the innermost scope.
    #[track_caller]
    fn check_breakdown(&self, gpu: &SimGpu) {
        let told = breakdown(gpu.ordinal()).expect("it can be read");
        let sum: Bytes = told.parts.iter().map(|part| part.bytes).sum();
        assert_eq!(sum, told.memory.used, "{told}");
        assert!(told.to_string().lines().all(|line| line.width() <= 80), "{told}");
        let mut expected: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (block, AllocGroup { path, .. }) in &self.blocks {
            let name = if path.is_empty() { "outside of all scopes".to_owned() } else { path.join(" > ") };
            let (bytes, count) = expected.entry(name).or_default();
            (*bytes, *count) = (*bytes + block.bytes().get(), *count + 1);
        }
        let scopes = told.parts.iter().filter(|part| part.kind == PartKind::Scope);
        let scopes: BTreeMap<_, _> = scopes.map(|part| (part.name.clone(), (part.bytes.get(), part.count))).collect();
        assert_eq!(scopes, expected);
    }

    #[track_caller]
    fn check_live(&self, trace: &GpuMemTrace, opened: &AllocGroup) {
        let is_inside = |of: &AllocGroup| {
            let is_in_path = self.paths[&opened.event].iter().any(|path| of.path.starts_with(path));
            of.strand.ends_with(&opened.strand) && of.event > opened.event && is_in_path
        };
        let inside = self.blocks.iter().filter(|(_, origin)| is_inside(origin));
        let mut expected: Vec<_> = inside.map(|(block, _)| block.bytes().get()).collect();
        expected.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!(sizes(&trace.live()), expected, "{opened:?}");
    }
}

/// One thread of a random history. What it does and what it writes down of it are one step: others see both or neither.
fn live_a_life(
    number: u64,
    seed: u64,
    gpu: &SimGpu,
    log: &Mutex<Log>,
    handles: &Mutex<Vec<(AllocGroup, ScopeHandle)>>,
) {
    const STEPS: usize = 400;
    gpu.make_current();
    let mut random = Random::new(seed.wrapping_mul(1000) + number);
    let mut places: Vec<Place> = Vec::new();
    for _ in 0..STEPS {
        let what = random.below(100_u32);
        let mut log = log.lock().expect("no thread has panicked");
        let (path, strand) = places
            .last()
            .map_or_else(|| (Vec::new(), vec![number]), |place| (place.path.clone(), place.strand.clone()));
        match what {
            0..35 => {
                let bytes = Bytes::new(1 + random.below(5_000));
                let block = if what.is_multiple_of(2) { gpu.alloc(bytes) } else { gpu.alloc_async(bytes) };
                log.alloc(block.expect("the device has room"), &path, &strand);
            }
            35..65 if !log.blocks.is_empty() => {
                let at = random.below(log.blocks.len());
                drop(log.free(at));
            }
            65..78 if places.len() < 6 => {
                let name = ["a", "b", "c"][random.below(3)];
                let trace = GpuMemTrace::with_ctx(name);
                let path: Vec<_> = path.into_iter().chain([name.to_owned()]).collect();
                let opened = AllocGroup { event: log.opened(&path), path: path.clone(), strand: strand.clone() };
                handles.lock().expect("no thread has panicked").push((opened.clone(), trace.handle()));
                places.push(Place { path, strand, of: Guard::Own(Box::new(trace), opened) });
            }
            78..84 if places.len() < 6 => {
                let handles = handles.lock().expect("no thread has panicked");
                let Some((opened, handle)) = handles.get(random.below(handles.len())) else { continue };
                let entered = handle.enter();
                // Of one that is closed nothing is entered.
                if let Some((path, _)) = log.open.get(&opened.event) {
                    let of = Guard::Handed(entered, opened.event);
                    let is_counted = opened.strand.contains(&number);
                    let own = (!is_counted).then_some(number);
                    let strand = own.into_iter().chain(opened.strand.iter().copied()).collect();
                    places.push(Place { path: path.clone(), strand, of });
                }
            }
            84..87 if !places.is_empty() => {
                let at = random.below(places.len());
                if matches!(places[at].of, Guard::Own(..)) {
                    log.close_early(&mut places, at);
                }
            }
            87..96 => {
                if let Some(place) = places.pop() {
                    log.left(&place);
                    drop(place);
                }
            }
            96 => log.check(gpu),
            97 => log.check_breakdown(gpu),
            _ => {
                for place in &places {
                    if let Guard::Own(trace, opened) = &place.of {
                        log.check_live(trace, opened);
                    }
                }
            }
        }
    }
    // One by one, as the log has it.
    while let Some(place) = places.pop() {
        let mut log = log.lock().expect("no thread has panicked");
        log.left(&place);
        drop(place);
    }
}

#[test]
fn random_histories_of_threads_are_told_to_the_byte() {
    for seed in 0..8 {
        let gpu = simulated_gpu();
        let (log, handles) = (Mutex::new(Log::default()), Mutex::new(Vec::new()));
        thread::scope(|threads| {
            for number in 1..=4 {
                let (gpu, log, handles) = (&gpu, &log, &handles);
                threads.spawn(move || live_a_life(number, seed, gpu, log, handles));
            }
        });
        let mut log = log.into_inner().expect("no thread has panicked");
        log.check(&gpu);
        log.check_breakdown(&gpu);
        while !log.blocks.is_empty() {
            drop(log.free(0));
        }
        log.check(&gpu);
        assert!(log.scopes.values().all(|figures| figures.used == 0));
    }
}

#[test]
fn tables_stand_in_80_columns_whatever_scopes_are_called() {
    gpumem::set_sink(Sink::custom(|_| ()));
    let gpu = SimGpu::install(Bytes::gib(1 << 20)).expect("GPUMEM_SIM is not set");
    gpu.make_current();
    let names = [
        "x".repeat(500),
        "a name that goes on and on, well beyond what any column can be wide".to_owned(),
        "two\nlines\tand \u{1b}[31mred\u{7}".to_owned(),
        "模型的前向传播和反向传播以及优化器的状态更新都在这里".to_owned(),
        "عربي \u{202e}backwards".to_owned(),
        "e\u{301}\u{301}\u{301} 👩‍👩‍👧‍👦 🇪🇺".repeat(9),
        "\0".to_owned(),
    ];
    let mut kept = Vec::new();
    let traces: Vec<_> = names
        .iter()
        .map(|name| {
            let trace = GpuMemTrace::with_ctx(name);
            // The columns are as wide as figures get: 4 TiB at once, 8 PiB in all.
            for _ in 0..2048 {
                drop(gpu.alloc(Bytes::gib(4 << 10)));
            }
            kept.push(take(&gpu, 3 * MIB + 7));
            trace
        })
        .collect();
    let of_device = gpumem::summary().scopes.into_iter().filter(|scope| scope.device == gpu.ordinal());
    assert_eq!(of_device.count(), names.len() + 1);
    let breakdown = breakdown(gpu.ordinal()).expect("it can be read");
    let live = traces[0].live();
    assert_eq!(live.len(), names.len());
    let texts = [gpumem::summary().to_string(), breakdown.to_string()];
    println!("{}\n{}", texts[0], texts[1]);
    for text in &texts {
        for line in text.lines() {
            assert!(line.width() <= 80, "{} columns: {line}", line.width());
            assert!(!line.contains(|c: char| c.is_control()), "{line:?}");
        }
    }
    // Names may be cut off, figures are not.
    let whole = texts[0].lines().find(|line| line.contains("419430")).unwrap_or_else(|| panic!("{}", texts[0]));
    assert!(!whole.contains('…') || whole.find('…') < Some(30), "{whole}");
    assert!(live.iter().all(|block| !block.to_string().contains(|c: char| c.is_control())), "{}", live[0]);
}

/// Runs a part of this file in a process of its own, with these variables and none other of gpumem's.
fn start(what: &str, variables: &[(&str, &str)]) -> Command {
    let mut child = Command::new(env::current_exe().expect("a test has a path"));
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("GPUMEM_")) {
        child.env_remove(name);
    }
    child
        .args(["--exact", "places::child", "--nocapture", "--test-threads=1"])
        .env("GPUMEM_TEST_CHILD", what)
        .env("RUST_BACKTRACE", "0")
        .envs(variables.iter().copied())
        .stdin(Stdio::null());
    child
}

struct Said {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Said {
    fn of(output: Output) -> Self {
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(stdout.contains("running 1 test"), "{stdout}\n{stderr}");
        let stderr = stderr.split_inclusive('\n').filter(|line| !line.contains("those of a simulated GPU")).collect();
        Self { code: output.status.code(), stdout, stderr }
    }

    /// What it printed by itself.
    fn answers(&self) -> Vec<&str> {
        self.stdout.lines().filter_map(|line| line.strip_prefix("> ")).collect()
    }
}

#[track_caller]
fn run(what: &str, variables: &[(&str, &str)]) -> Said {
    Said::of(start(what, variables).output().expect("this test can be run again"))
}

/// One that ends well.
#[track_caller]
fn passes(what: &str, variables: &[(&str, &str)]) -> Said {
    let said = run(what, variables);
    assert_eq!(said.code, Some(0), "{}\n{}", said.stdout, said.stderr);
    said
}

/// What `start` runs; by itself nothing.
#[test]
fn child() {
    let Ok(what) = env::var("GPUMEM_TEST_CHILD") else { return };
    // libtest has begun a line.
    println!();
    let (_, run) = CHILDREN.iter().find(|(name, _)| *name == what).expect("it is on the list");
    run();
}

const CHILDREN: &[(&str, fn())] = &[
    ("many names", many_names),
    ("blocks", live::blocks),
    ("deep", live::deep),
    ("leaks", leaks::leaks),
    ("no leaks", leaks::no_leaks),
    ("leaks and panics", leaks::leaks_and_panics),
    ("leaks and exits", leaks::leaks_and_exits),
    ("no trace", leaks::no_trace),
    ("peak", peaks::peak),
    ("peak and refused", peaks::peak_and_refused),
    ("refused", oom::refused),
    ("refused often", oom::refused_often),
    ("hook that panics", oom::hook_that_panics),
    ("hook that allocates", oom::hook_that_allocates),
    ("hook that sets another", oom::hook_that_sets_another),
    ("hook that exits", oom::hook_that_exits),
    ("retries", oom::retries),
    ("retries in vain", oom::retries_in_vain),
];

fn many_names() {
    let gpu = simulated_gpu();
    let mut kept = Vec::new();
    for number in 0..20_000 {
        GpuMemTrace::scope(format!("step {number}"), |_| kept.push(take(&gpu, 1)));
    }
    let summary = gpumem::summary();
    let root = summary.scopes.iter().find(|scope| scope.path.is_empty()).expect("the process is there");
    let rest: Vec<_> = summary.scopes.iter().filter(|scope| scope.calls > 1).collect();
    println!("> {} scopes, {} in all", summary.scopes.len(), root.used.get());
    println!("> {} calls of {} paths, {} used", rest[0].calls, rest.len(), rest[0].used.get());
    println!("> {}", rest[0].path.join("/"));
    let calls: u64 = summary.scopes.iter().map(|scope| scope.calls).sum();
    println!("> {calls} calls");
}

#[test]
fn names_without_end_are_told_together_under_their_place() {
    let said = passes("many names", &[]);
    let [scopes, rest, path, calls] = said.answers()[..] else { panic!("{}", said.stdout) };
    let apart = 1 << 10;
    assert_eq!(scopes, format!("{} scopes, 20000 in all", apart + 2));
    assert_eq!(rest, format!("{0} calls of 1 paths, {0} used", 20_000 - apart));
    assert!(path.contains("places.rs:"), "{path}");
    assert_eq!(calls, "20000 calls");
}

mod live {
    use std::{
        cell::Cell,
        ffi::{c_int, c_void},
        rc::Rc,
    };

    use gpumem_tests::deeper;

    use super::*;

    #[test]
    fn what_is_still_there_of_traces() {
        let gpu = simulated_gpu();
        let before = take(&gpu, 1);
        let mut outer = GpuMemTrace::with_ctx("outer");
        assert!(outer.live().is_empty());
        let a = take(&gpu, 10);
        let inner = GpuMemTrace::with_ctx("inner");
        let (b, freed) = (take(&gpu, 20), take(&gpu, 30));
        let pooled = gpu.alloc_async(Bytes::new(25)).expect("there is room");
        // Other threads' is theirs, unless it was handed to them.
        let others = thread::scope(|threads| {
            let (gpu, handle) = (&gpu, inner.handle());
            let alone = threads.spawn(move || take(gpu, 40));
            let handed = threads.spawn(move || handle.in_scope(|| take(gpu, 50)));
            [alone, handed].map(|thread| thread.join().expect("it does not panic"))
        });
        assert_eq!(sizes(&outer.live()), [50, 30, 25, 20, 10]);
        assert_eq!(sizes(&inner.live()), [50, 30, 25, 20]);
        drop(freed);
        assert_eq!(sizes(&inner.live()), [50, 25, 20]);
        drop(inner);
        let after_inner = take(&gpu, 5);
        assert_eq!(sizes(&outer.live()), [50, 25, 20, 10, 5]);
        // A stopped one keeps to what it had, as far as that is still there.
        outer.stop();
        let after = take(&gpu, 60);
        assert_eq!(sizes(&outer.live()), [50, 25, 20, 10, 5]);
        drop((a, others));
        assert_eq!(sizes(&outer.live()), [25, 20, 5]);
        let kinds: Vec<_> = outer.live().iter().map(|block| (block.kind, block.path.join("/"))).collect();
        assert_eq!(
            kinds,
            [("pool", "outer/inner"), ("device", "outer/inner"), ("device", "outer")]
                .map(|(kind, path)| (kind, path.to_owned()))
        );
        drop((before, b, pooled, after_inner, after));
        assert!(outer.live().is_empty());
    }

    #[test]
    fn the_same_path_at_the_same_time_on_three_threads() {
        let gpu = simulated_gpu();
        let (all_in, told) = (Barrier::new(3), Barrier::new(3));
        let own = |thread: u64| {
            gpu.make_current();
            [0, 10].map(|round| {
                let trace = GpuMemTrace::with_ctx("same");
                // The last round's is still there, and of another time.
                mem::forget(take(&gpu, thread + round));
                all_in.wait();
                let live = sizes(&trace.live());
                told.wait();
                live
            })
        };
        let live = thread::scope(|threads| {
            let own = &own;
            let started = [1, 2, 3].map(|thread| threads.spawn(move || own(thread)));
            started.map(|thread| thread.join().expect("it does not panic"))
        });
        assert_eq!(live, [1, 2, 3].map(|thread| [vec![thread], vec![thread + 10]]));
        assert_eq!(scopes(&gpu)["same"].calls, 6);
    }

    #[test]
    fn blocks_of_others_that_come_and_go_meanwhile() {
        let gpu = simulated_gpu();
        let trace = GpuMemTrace::with_ctx("busy");
        let kept: Vec<_> = (1..=2000).map(|bytes| take(&gpu, bytes)).collect();
        let rounds_left = AtomicU64::new(20);
        let seen: Vec<_> = thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    while rounds_left.load(Relaxed) > 0 {
                        drop(take(&gpu, 7));
                    }
                });
            }
            let look = |_| {
                let live = sizes(&trace.live());
                rounds_left.fetch_sub(1, Relaxed);
                (live.len(), live.iter().sum::<u64>())
            };
            (0..20).map(look).collect()
        });
        assert_eq!(seen, [(2000, 2000 * 2001 / 2); 20]);
        drop(kept);
    }

    pub(super) fn blocks() {
        let gpu = simulated_gpu();
        let trace = GpuMemTrace::with_ctx("train");
        let opened = line!() - 1;
        let large = gpu.alloc(Bytes::mib(1));
        let small = gpu.alloc(Bytes::kib(1));
        let pooled = gpu.alloc_async(Bytes::mib(2));
        let line = line!();
        println!("> {opened} {} {} {}", line - 1, line - 3, line - 2);
        for block in trace.live() {
            let text = |text: &Option<String>| text.as_deref().unwrap_or("?").to_owned();
            let functions = block.backtrace.iter().any(|frame| frame.contains("blocks"));
            println!("> {} {} {functions} {}", text(&block.line), text(&block.scope_place), text(&block.library));
            println!("> {block}");
        }
        drop((large, small, pooled));
    }

    /// Allocates below many functions that say nothing of whose it is, some of them of C's.
    #[inline(never)]
    fn asks_from_afar(gpu: &SimGpu) -> (SimBlock, u32) {
        thread_local! {
            static ASK: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
        }
        extern "C" fn order(_: *const c_void, _: *const c_void) -> c_int {
            deeper(60, &mut || ASK.take().into_iter().for_each(|ask| ask()));
            0
        }
        unsafe extern "C" {
            fn qsort(
                of: *mut c_void,
                count: usize,
                size: usize,
                order: extern "C" fn(*const c_void, *const c_void) -> c_int,
            );
        }

        let taken = Rc::new(Cell::new(None));
        let (to, gpu) = (Rc::clone(&taken), gpu.clone());
        ASK.set(Some(Box::new(move || to.set(gpu.alloc_async(Bytes::mib(3)).ok()))));
        let mut numbers = [2_u64, 1];
        // SAFETY: the numbers are as many and as large as it says, and `order` reads none of them.
        unsafe { qsort(numbers.as_mut_ptr().cast(), 2, 8, order) };
        (taken.take().expect("the device has room"), line!() - 1)
    }

    pub(super) fn deep() {
        let gpu = simulated_gpu();
        let trace = GpuMemTrace::with_ctx("train");
        // The second is of a stack that is known.
        let blocks: Vec<_> = (0..2).map(|_| asks_from_afar(&gpu)).collect();
        for block in trace.live() {
            let count = |name: &str| block.backtrace.iter().filter(|frame| frame.contains(name)).count();
            let outermost = block.backtrace.iter().rposition(|frame| frame.contains("asks_from_afar"));
            let outermost = outermost.expect("its function is on the stack");
            let is_there = block.backtrace[outermost].contains(&format!("tests/sim/places.rs:{}:", blocks[0].1));
            println!("> {} {outermost} {is_there}", count("deeper::deeper"));
        }
        drop(blocks);
    }

    #[test]
    fn a_line_is_found_however_much_is_called_from_there() {
        let said = passes("deep", &[]);
        assert_eq!(said.answers().len(), 2);
        for told in said.answers() {
            let told: Vec<_> = told.split(' ').collect();
            let [functions, outermost, is_there] = told[..] else { panic!("{}", said.stdout) };
            let [functions, outermost] = [functions, outermost].map(|count| count.parse::<usize>().unwrap());
            assert!(functions >= 61 && outermost > functions, "{}", said.stdout);
            assert_eq!(is_there, "true");
        }
    }

    #[test]
    fn the_line_that_asked_is_the_programs_own() {
        // Of a block in the pool, a large one that is not, and a small one.
        for (setting, known) in [
            ("", [true, true, false]),
            ("auto", [true, true, false]),
            ("1", [true, true, true]),
            ("0", [false, false, false]),
            ("off", [false, false, false]),
            ("nonsense", [true, true, false]),
        ] {
            let said = passes("blocks", &[("GPUMEM_BACKTRACE", setting)]);
            let complaint = "gpumem: cannot use GPUMEM_BACKTRACE: `nonsense` is not one of";
            assert_eq!(said.stderr.contains(complaint), setting == "nonsense", "{}", said.stderr);
            let answers = said.answers();
            let [opened, lines @ ..] = &answers[0].split(' ').collect::<Vec<_>>()[..] else {
                panic!("{}", said.stdout)
            };
            assert_eq!(answers.len(), 7, "{}", said.stdout);
            for (at, (line, is_known)) in lines.iter().zip(known).enumerate() {
                let told: Vec<_> = answers[1 + 2 * at].split(' ').collect();
                let [told, scope, functions, library] = told[..] else { panic!("{}", said.stdout) };
                assert!(scope.ends_with(&format!("tests/sim/places.rs:{opened}")), "{scope}, not {opened}");
                assert_eq!((functions, library), (if is_known { "true" } else { "false" }, "?"));
                let text = answers[2 + 2 * at];
                if is_known {
                    assert!(told.contains(&format!("tests/sim/places.rs:{line}:")), "{told}, not {line}");
                    assert!(!told.starts_with('/'), "not from where the program was built: {told}");
                    assert!(
                        text.contains(&format!("tests/sim/places.rs:{line}:")) && text.ends_with(", in train"),
                        "{text}"
                    );
                } else {
                    assert_eq!(told, "?");
                    assert!(text.contains(&format!("in the scope of tests/tests/sim/places.rs:{opened}")), "{text}");
                }
            }
        }
    }
}

mod peaks {
    use gpumem::{Gauge, PeakHolders};

    use super::*;

    /// The scope of each holder and its bytes.
    fn told(peak: &PeakHolders) -> Vec<(String, i64)> {
        let sum: i64 = peak.holders.iter().map(|holder| holder.bytes.get()).sum();
        assert_eq!(sum, peak.bytes.get().cast_signed(), "{peak}");
        assert!(peak.to_string().lines().all(|line| line.width() <= 80), "{peak}");
        peak.holders.iter().map(|holder| (holder.path.join("/"), holder.bytes.get())).collect()
    }

    fn expected(holders: &[(&str, i64)]) -> Vec<(String, i64)> {
        holders.iter().map(|(path, bytes)| ((*path).to_owned(), *bytes)).collect()
    }

    #[test]
    fn of_traces_that_overlap() {
        let gpu = simulated_gpu();
        let before = GpuMemTrace::scope("before", |_| take(&gpu, 100));
        let outer = GpuMemTrace::builder().ctx("outer").at_peak(true).start().expect("exact");
        assert_eq!(told(&outer.peak_holders().expect("asked for")), []);
        let a = take(&gpu, 10);
        drop(before);
        // The outer one's peak is here: more than before, though less is in use.
        let b = GpuMemTrace::scope("inner", |_| take(&gpu, 1000));
        let mut inner = GpuMemTrace::builder().ctx("inner").at_peak(true).start().expect("exact");
        drop(b);
        let of_outer = expected(&[("outer/inner", 1000), ("outer", 10), ("before", -100)]);
        let others = thread::scope(|threads| {
            let gpu = &gpu;
            threads.spawn(move || GpuMemTrace::scope("other", |_| take(gpu, 500))).join().expect("it does not panic")
        });
        assert_eq!(told(&inner.peak_holders().expect("asked for")), [], "it is at its start");
        let c = take(&gpu, 600);
        let of_inner = expected(&[("outer/inner", 600 - 1000), ("other", 500)]);
        let of_inner: Vec<_> = of_inner.into_iter().rev().collect();
        assert_eq!(told(&inner.peak_holders().expect("asked for")), of_inner);
        // The outer one has a new peak, by the same allocation.
        let of_outer_now = expected(&[("outer/inner", 600), ("other", 500), ("outer", 10), ("before", -100)]);
        assert_ne!(of_outer, of_outer_now);
        assert_eq!(told(&outer.peak_holders().expect("asked for")), of_outer_now);
        inner.stop();
        drop((a, c, others));
        assert_eq!(told(&inner.peak_holders().expect("it was stopped")), of_inner);
        assert_eq!(told(&outer.peak_holders().expect("asked for")), of_outer_now);
        let peak = outer.peak_holders().expect("asked for");
        assert_eq!(peak.bytes, outer.data().peak_over_start());
        drop(inner);
        drop(outer);
    }

    #[test]
    fn of_one_thread_and_of_nobody() {
        let gpu = simulated_gpu();
        let builder = || GpuMemTrace::builder().ctx("own");
        let mut own = builder().thread_local_only().at_peak(true).start().expect("exact");
        let others = thread::scope(|threads| threads.spawn(|| take(&gpu, 1 << 30)).join().expect("it does not panic"));
        drop(take(&gpu, 5 * MIB));
        let peak = own.peak_holders().expect("asked for");
        assert_eq!(told(&peak), expected(&[("own", 5 << 20)]));
        let holder = &peak.holders[0];
        let line = line!() - 4;
        assert!(holder.line.as_ref().is_some_and(|line| line.contains("places.rs:")), "{peak:?}");
        assert!(holder.caller.as_ref().is_some_and(|at| at.contains(&format!("places.rs:{line}:"))), "{peak:?}");
        own.reset();
        assert_eq!(told(&own.peak_holders().expect("asked for")), []);
        own.report_n_reset();
        let kept = take(&gpu, 1);
        own.stop();
        assert_eq!(told(&own.peak_holders().expect("asked for")), expected(&[("own", 1)]));
        own.start();
        assert_eq!(told(&own.peak_holders().expect("asked for")), []);
        drop((kept, others));
        assert_eq!(builder().start().expect("exact").peak_holders(), None, "nobody asked");
        let sampled = builder().gauge(Gauge::Sampled).at_peak(true).on_exit_report(false).start().expect("it is read");
        assert_eq!(sampled.peak_holders(), None);
    }

    #[test]
    fn of_a_device_in_the_summary() {
        let gpu = simulated_gpu();
        let outside = take(&gpu, 1);
        let weights = GpuMemTrace::scope("load", |_| take(&gpu, 100));
        GpuMemTrace::scope("train", |_| {
            let own = take(&gpu, 10);
            GpuMemTrace::scope("forward", |_| drop(take(&gpu, 1000)));
            drop(own);
        });
        drop(weights);
        // More in this scope, but less in all.
        GpuMemTrace::scope("check", |_| drop(take(&gpu, 1005)));
        let at_peak: Vec<_> = scopes(&gpu).into_iter().map(|(path, scope)| (path, scope.at_peak.get())).collect();
        let at_peak: Vec<_> = at_peak.iter().map(|(path, bytes)| (path.as_str(), *bytes)).collect();
        assert_eq!(at_peak, [("", 1111), ("check", 0), ("load", 100), ("train", 1010), ("train/forward", 1000)]);
        assert_eq!(scopes(&gpu)[""].peak.get(), 1111);
        drop(outside);
    }

    pub(super) fn peak() {
        let gpu = simulated_gpu();
        let before = take(&gpu, 3 * MIB);
        let train = GpuMemTrace::with_ctx("train");
        let step = GpuMemTrace::with_ctx("step");
        let held = take(&gpu, 20 * MIB);
        drop(take(&gpu, 2 * MIB));
        drop((held, step, train, before));
        drop(take(&gpu, 24 * MIB));
    }

    #[test]
    fn of_the_process_at_its_end() {
        let said = passes("peak", &[("GPUMEM_PEAK", "1")]);
        let lines: Vec<_> = said.stderr.lines().skip_while(|line| !line.contains(" ends. ")).collect();
        assert!(lines[0].starts_with("gpumem: process "), "{}", said.stderr);
        assert!(lines[0].ends_with(" ends. simulated device 0: the peak was 25 MiB, made of"), "{}", said.stderr);
        let row = |row: &str| lines.iter().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") == row);
        for wanted in ["train > step 22 MiB", "outside of all scopes 3 MiB"] {
            assert!(row(wanted), "{wanted}: {}", said.stderr);
        }
        let of_lines = |mib: &str| lines.iter().any(|line| line.contains("places.rs:") && line.ends_with(mib));
        assert!(of_lines(" 20 MiB") || of_lines(" 22 MiB"), "{}", said.stderr);
        for variables in [&[][..], &[("GPUMEM_PEAK", "0")], &[("GPUMEM_PEAK", "")]] {
            assert_eq!(passes("peak", variables).stderr, "");
        }
        assert_eq!(passes("no trace", &[("GPUMEM_PEAK", "1")]).stderr, "");
        let said = run("leaks and exits", &[("GPUMEM_PEAK", "1")]);
        assert!(said.stderr.contains(" the peak was 6.00 MiB, made of"), "{}", said.stderr);
    }

    #[test]
    fn is_told_when_memory_runs_out_if_it_was_higher() {
        let said = passes("peak and refused", &[]);
        assert!(said.stderr.contains("simulated device 0: the peak was 40 GiB, made of\n  big  "), "{}", said.stderr);
    }

    pub(super) fn peak_and_refused() {
        let gpu = simulated_gpu();
        GpuMemTrace::scope("big", |_| drop(take(&gpu, 40 << 30)));
        let _held = take(&gpu, 30 << 30);
        assert!(gpu.alloc(Bytes::gib(50)).is_err());
    }
}

mod leaks {
    use std::fs::File;

    use super::*;

    const WANTED: &[(&str, &str)] = &[("GPUMEM_LEAKS", "1")];

    pub(super) fn leaks() {
        let gpu = simulated_gpu();
        let _train = GpuMemTrace::with_ctx("train");
        let _step = GpuMemTrace::with_ctx("step");
        mem::forget(gpu.alloc(Bytes::mib(1)));
        println!("> {}", line!() - 1);
        for _ in 0..3 {
            mem::forget(gpu.alloc_async(Bytes::kib(1)));
        }
        drop(take(&gpu, 5 * MIB));
    }

    pub(super) fn no_leaks() {
        let gpu = simulated_gpu();
        drop(take(&gpu, 5 * MIB));
    }

    pub(super) fn leaks_and_panics() {
        leaks();
        panic!("as it is meant to");
    }

    pub(super) fn leaks_and_exits() {
        leaks();
        std::process::exit(7);
    }

    pub(super) fn no_trace() {
        SimGpu::install(Bytes::gib(1)).expect("GPUMEM_SIM is not set");
    }

    #[track_caller]
    fn ensure_told(said: &Said) {
        let line: u32 = said.answers()[0].parse().expect("a number");
        let told: Vec<_> = said.stderr.lines().skip_while(|line| !line.contains(" ends, ")).collect();
        let [first, of_line, caller, of_scope] = told[..] else { panic!("{}", said.stderr) };
        assert!(caller.starts_with("    from tests/sim/places.rs:"), "{caller}");
        assert!(
            first.starts_with("gpumem: process ") && first.ends_with(" ends, and 4 blocks (1.00 MiB) were not freed:"),
            "{first}"
        );
        assert!(of_line.contains(&format!("places.rs:{line}:")) && of_line.contains("train > step"), "{of_line}");
        assert!(of_line.contains("1 MiB") && of_line.contains("1 block"), "{of_line}");
        assert!(
            of_scope.contains("3 KiB") && of_scope.contains("3 blocks") && of_scope.contains("train > step"),
            "{of_scope}"
        );
        assert!(told.iter().all(|line| line.width() <= 80), "{}", said.stderr);
    }

    #[test]
    fn what_was_not_freed_is_told_at_the_end() {
        ensure_told(&passes("leaks", WANTED));
        let said = passes("no leaks", WANTED);
        assert!(said.stderr.ends_with(" ends, and all that was allocated is freed\n"), "{}", said.stderr);
        for variables in [&[][..], &[("GPUMEM_LEAKS", "0")], &[("GPUMEM_LEAKS", "")]] {
            assert_eq!(passes("leaks", variables).stderr, "");
        }
        // Nobody listened.
        assert_eq!(passes("no trace", WANTED).stderr, "");
    }

    #[test]
    fn however_the_process_ends() {
        let said = run("leaks and panics", WANTED);
        assert_eq!(said.code, Some(101), "{}", said.stderr);
        ensure_told(&said);
        let said = run("leaks and exits", WANTED);
        assert_eq!(said.code, Some(7), "{}", said.stderr);
        ensure_told(&said);
    }

    #[test]
    fn a_stderr_that_cannot_be_written_to_does_no_harm() {
        let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("it is there"));
        for (what, code) in [("leaks", 0), ("leaks and exits", 7)] {
            let output = start(what, WANTED).stderr(full()).output().expect("it can be run");
            assert_eq!(Said::of(output).code, Some(code));
            let child = start(what, WANTED);
            let mut closed = Command::new("sh");
            closed.args(["-c", "exec \"$0\" \"$@\" 2>&-"]).arg(child.get_program()).args(child.get_args());
            for (name, value) in child.get_envs() {
                match value {
                    Some(value) => closed.env(name, value),
                    None => closed.env_remove(name),
                };
            }
            assert_eq!(Said::of(closed.output().expect("there is a shell")).code, Some(code));
        }
    }
}

mod oom {
    use super::*;

    /// A device of 1 GiB of which 712 MiB are in use, 64 MiB of them kept by its pool.
    fn crowded() -> (SimGpu, Vec<SimBlock>) {
        let gpu = SimGpu::install(Bytes::gib(1)).expect("GPUMEM_SIM is not set");
        gpumem::subscribe().expect("simulated devices can be heard");
        let weights = GpuMemTrace::scope("load", |_| take(&gpu, 600 * MIB));
        let train = GpuMemTrace::with_ctx("train");
        let pooled = gpu.alloc_async(Bytes::mib(64)).expect("there is room");
        let activation = GpuMemTrace::scope("forward", |_| take(&gpu, 48 * MIB));
        drop(pooled);
        drop(train);
        (gpu, vec![weights, activation])
    }

    fn ask(gpu: &SimGpu) -> Result<SimBlock, Error> {
        gpu.alloc(Bytes::mib(900))
    }

    pub(super) fn refused() {
        let (gpu, _kept) = crowded();
        on_oom(|oom: &OutOfMemory| {
            let free = oom.breakdown.as_ref().map(|breakdown| breakdown.memory.free).expect("it can be read");
            println!("> {} of {}, {} in {:?}, {free} free", oom.asked, oom.kind, oom.device, oom.path);
            println!("> {}", oom.line.as_deref().unwrap_or("not known yet"));
            println!(
                "> {:?}",
                oom.scopes.iter().map(|place| (place.name.as_str(), place.bytes.mb())).collect::<Vec<_>>()
            );
        });
        let _train = GpuMemTrace::with_ctx("train");
        let _backward = GpuMemTrace::with_ctx("backward");
        // The lines of what is live are known before the refusal. There is little time then.
        breakdown(gpu.ordinal()).expect("it can be read");
        assert!(gpu.alloc(Bytes::mib(900)).is_err_and(|error| error.is_out_of_memory()));
        println!("> {}", line!() - 1);
        // What is wrong is not out of memory.
        assert!(gpu.alloc(Bytes::ZERO).is_err());
    }

    pub(super) fn refused_often() {
        static CALLED: AtomicU64 = AtomicU64::new(0);
        let (gpu, _kept) = crowded();
        on_oom(|_| _ = CALLED.fetch_add(1, Relaxed));
        for _ in 0..5 {
            assert!(ask(&gpu).is_err());
        }
        thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| (0..10).for_each(|_| assert!(gpu.alloc_async(Bytes::gib(2)).is_err())));
            }
        });
        println!("> {}", CALLED.load(Relaxed));
    }

    pub(super) fn hook_that_panics() {
        let (gpu, _kept) = crowded();
        on_oom(|_| panic!("as it is meant to"));
        for _ in 0..2 {
            println!("> {}", ask(&gpu).is_err_and(|error| error.is_out_of_memory()));
        }
    }

    pub(super) fn hook_that_allocates() {
        let (gpu, _kept) = crowded();
        let own = gpu.clone();
        on_oom(move |_| {
            println!("> a hook");
            println!("> {}", ask(&own).is_err_and(|error| error.is_out_of_memory()));
            println!("> {}", retry_after_trim(|| ask(&own)).is_err());
            println!("> {}", GpuMemTrace::scope("in the hook", |_| own.alloc(Bytes::mib(1))).is_ok());
        });
        println!("> {}", ask(&gpu).is_err());
    }

    pub(super) fn hook_that_sets_another() {
        struct Last;
        impl Drop for Last {
            fn drop(&mut self) {
                println!("> the first is gone");
                on_oom(|_| println!("> third"));
            }
        }
        let (gpu, _kept) = crowded();
        let last = Last;
        on_oom(move |_| {
            let _ = &last;
            println!("> first");
            on_oom(|_| println!("> second"));
        });
        assert!(ask(&gpu).is_err());
        assert!(ask(&gpu).is_err());
    }

    pub(super) fn hook_that_exits() {
        let (gpu, _kept) = crowded();
        on_oom(|_| std::process::exit(3));
        drop(ask(&gpu));
    }

    fn reports(said: &Said) -> usize {
        said.stderr.lines().filter(|line| line.contains("is out of memory")).count()
    }

    #[test]
    fn a_refusal_says_who_holds_the_memory() {
        // Where a machine is so busy that the reading takes too long, the function is told so.
        let said = (0..10).map(|_| passes("refused", &[])).find(|said| said.answers().len() == 4);
        let said = said.expect("a reading of a simulated device takes little time");
        let [told, at, scopes, line] = said.answers()[..] else { panic!("{}", said.stdout) };
        let place = format!("tests/sim/places.rs:{line}:21");
        assert_eq!(told, "900 MiB of device, 0 in [\"train\", \"backward\"], 312 MiB free");
        assert!(at == place || at == "not known yet", "{at}");
        assert_eq!(scopes, "[(\"load\", 600), (\"train > forward\", 48)]");
        assert!(said.stderr.lines().all(|line| line.width() <= 80), "{}", said.stderr);
        let expected = format!(
            "gpumem: device 0 is out of memory: 900 MiB (device) were asked for\n  \
               at {place}\n  \
               in train > backward\n\
             device 0 (simulated GPU (1 GiB)): 712 MiB of 1 GiB in use, 312 MiB free\n  \
               this process                                           712 MiB\n    \
                 load                                                 600 MiB  1 block\n    \
                 train > forward                                       48 MiB  1 block\n    \
                 kept by the pool, unused                              64 MiB\n\
             gpumem::empty_cache() would give back 64 MiB\n\
             places that hold most:\n"
        );
        let (head, places) = said.stderr.split_at(expected.len().min(said.stderr.len()));
        assert_eq!(head, expected);
        // Both were taken on one line, called from two, and what is in the pool was not looked at.
        let places: Vec<_> = places.lines().collect();
        let [large, large_from, small, small_from, peak, at_peak @ ..] = &places[..] else { panic!("{}", said.stderr) };
        assert!(large.starts_with("  tests/sim/places.rs:") && large.ends_with("  600 MiB  1 block"), "{large}");
        assert!(small.starts_with("  tests/sim/places.rs:") && small.ends_with("   48 MiB  1 block"), "{small}");
        for caller in [large_from, small_from] {
            assert!(caller.starts_with("    from tests/sim/places.rs:"), "{caller}");
        }
        // More was in use before.
        assert_eq!(*peak, "simulated device 0: the peak was 712 MiB, made of");
        for (scope, mib) in [("load", 600), ("train", 64), ("train > forward", 48)] {
            let row = |line: &&str| line.starts_with(&format!("  {scope}  ")) && line.ends_with(&format!(" {mib} MiB"));
            assert!(at_peak.iter().any(row), "{scope}: {}", said.stderr);
        }
    }

    #[test]
    fn three_are_reported_and_each_is_told_the_hook() {
        let said = passes("refused often", &[]);
        assert_eq!((reports(&said), said.answers()), (3, vec!["45"]), "{}", said.stderr);
        assert!(said.stderr.ends_with("gpumem: more of them are not reported\n"), "{}", said.stderr);
        let silent = passes("refused often", &[("GPUMEM_REPORT", "off")]);
        assert_eq!((silent.stderr.as_str(), silent.answers()), ("", vec!["45"]));
    }

    #[test]
    fn hooks_that_misbehave_do_no_harm() {
        let said = passes("hook that panics", &[]);
        assert_eq!((reports(&said), said.answers()), (1, vec!["true", "true"]));
        let said = passes("hook that allocates", &[]);
        assert_eq!((reports(&said), said.answers()), (1, vec!["a hook", "true", "true", "true", "true"]));
        let said = passes("hook that sets another", &[]);
        assert_eq!(said.answers(), ["first", "the first is gone", "third"]);
        let said = run("hook that exits", &[("GPUMEM_LEAKS", "1")]);
        assert_eq!((said.code, reports(&said)), (Some(3), 1));
        assert!(said.stderr.contains(" ends, and 2 blocks (648 MiB) were not freed:"), "{}", said.stderr);
    }

    /// How often it was tried.
    fn tried<T>(attempt: impl Fn() -> Result<T, Error>) -> (u32, Result<T, Error>) {
        let mut count = 0;
        let result = retry_after_trim(|| {
            count += 1;
            attempt()
        });
        (count, result)
    }

    pub(super) fn retries() {
        let (gpu, _kept) = crowded();
        on_oom(|_| println!("> a hook"));
        let (count, block) = tried(|| gpu.alloc(Bytes::mib(350)));
        println!("> {count} {}", block.is_ok());
        drop(block);
        let (count, block) = tried(|| gpu.alloc(Bytes::mib(1)));
        println!("> {count} {}", block.is_ok());
        let (count, other) = tried(|| gpu.alloc(Bytes::ZERO));
        println!("> {count} {}", other.is_err_and(|error| !error.is_out_of_memory()));
        // What another thread is refused is not this one's.
        let (count, elsewhere) = tried(|| {
            thread::scope(|threads| threads.spawn(|| assert!(ask(&gpu).is_err())).join().expect("it does not panic"));
            gpu.alloc(Bytes::ZERO)
        });
        println!("> {count} {}", elsewhere.is_err());
        // One attempt inside another, which succeeds at the second try of either.
        drop(gpu.alloc_async(Bytes::mib(64)));
        let (count, nested) = tried(|| tried(|| gpu.alloc(Bytes::mib(350))).1);
        println!("> {count} {}", nested.is_ok());
    }

    pub(super) fn retries_in_vain() {
        let (gpu, _kept) = crowded();
        on_oom(|oom| println!("> a hook, {}", oom.asked));
        let (count, full) = tried(|| ask(&gpu));
        println!("> {count} {}", full.is_err_and(|error| error.is_out_of_memory()));
        let (count, full) = tried(|| tried(|| gpu.alloc(Bytes::mib(901))).1);
        println!("> {count} {}", full.is_err());
        // A panic in it: what is refused afterwards is told.
        let unwound = catch_unwind(AssertUnwindSafe(|| retry_after_trim(|| -> Result<(), Error> { panic_any(()) })));
        assert!(unwound.is_err() && gpu.alloc(Bytes::mib(902)).is_err());
    }

    #[test]
    fn a_second_try_after_the_pools_gave_back() {
        let said = passes("retries", &[]);
        assert_eq!(said.answers(), ["2 true", "1 true", "1 true", "a hook", "1 true", "1 true"]);
        assert_eq!(reports(&said), 1, "{}", said.stderr);
        let said = passes("retries in vain", &[]);
        let answers = said.answers();
        assert_eq!(answers[..2], ["a hook, 900 MiB", "2 true"]);
        assert_eq!(answers.iter().filter(|answer| **answer == "a hook, 901 MiB").count(), 1, "{answers:?}");
        assert_eq!(answers.last(), Some(&"a hook, 902 MiB"));
    }
}
