//! Compares random histories with a simple implementation that keeps everything.

use std::collections::BTreeMap;

use super::*;
use crate::ledger::threads::MOST_ENTERED;

/// A block.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PlainBlock {
    owner: PlainOwner,
    number: u64,
    bytes: u64,
    block: Block,
}

/// The threads and the tasks for which a block counts: the host of the first scope, and all of them as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlainOwner {
    first: u32,
    all: u128,
}

impl PlainOwner {
    fn own(thread: ThreadId) -> Self {
        Self { first: thread.0, all: 1 << thread.0 }
    }

    fn with(self, thread: ThreadId) -> Self {
        Self { all: self.all | 1 << thread.0, ..self }
    }

    /// Returns the owner in the innermost of these scopes.
    fn of_thread(thread: ThreadId, entered: &[PlainEntered]) -> Self {
        let own = Self::own(thread);
        let (first, others) = entered.split_at(entered.len().min(MOST_ENTERED));
        first.iter().chain(others.last()).fold(own, |around, entered| {
            entered.host.map_or(entered.owner, |host| Self { all: around.all | host.all, ..host })
        })
    }
}

/// A scope that a thread is in. It has a host if the thread did not open it.
struct PlainEntered {
    scope: u64,
    owner: PlainOwner,
    host: Option<PlainOwner>,
}

/// A scope: what it counts, its start in the history, and its owner.
struct PlainScope {
    device: usize,
    of_thread: Option<u32>,
    began: usize,
    owner: PlainOwner,
    opener: usize,
    /// The number of the event that it began with.
    number: u64,
    /// The bytes in use and the peak, if a trace of another thread overlapped it.
    own: Option<(i64, i64)>,
    /// Before this event it counted the whole process.
    whole_before: u64,
    task: Option<PlainTask>,
}

/// A task: its bit, its bytes in use, and these bytes and their peak since the scope began.
struct PlainTask {
    bit: u32,
    in_use: i64,
    start: i64,
    peak: i64,
}

impl PlainScope {
    /// Returns whether it is a trace of another thread on this device.
    fn overlaps(&self, device: usize, opener: usize) -> bool {
        self.task.is_none() && self.device == device && self.opener != opener
    }
}

/// The levels of the process and of each thread, on both devices.
type Levels = [[i64; 2]; 5];

/// Notes that a thread opens a scope on this device. From now on the open scopes of other threads count by themselves.
fn overlap(
    scopes: &mut HashMap<u64, PlainScope>,
    history: &[Levels],
    (device, opener, number): (usize, usize, u64),
) -> bool {
    let mut is_overlapped = false;
    for other in scopes.values_mut().filter(|other| other.overlaps(device, opener)) {
        is_overlapped = true;
        let levels = history[other.began..].iter().map(|now| now[0][device]);
        if other.own.is_none() {
            (other.own, other.whole_before) = (levels.clone().next_back().zip(levels.max()), number);
        }
    }
    is_overlapped
}

/// Adds the block with this key to the scopes that count it, or subtracts it.
fn change_own(scopes: &mut HashMap<u64, PlainScope>, ledger: &Ledger, key: Key, plain: &PlainBlock, sign: i64) {
    for (id, scope) in scopes.iter_mut() {
        let is_on_device = plain.block.kind.is_on_device() && scope.device == plain.block.device.ordinal as usize;
        if let Some(task) = &mut scope.task
            && is_on_device
            && plain.owner.all & 1 << task.bit > 0
        {
            task.in_use += sign * plain.bytes.cast_signed();
            task.peak = task.peak.max(task.in_use);
        }
        if let Some((in_use, peak)) = &mut scope.own
            && is_on_device
            && (ledger.is_inside(key, ScopeId(*id)) || (scope.number..scope.whole_before).contains(&plain.number))
        {
            *in_use += sign * plain.bytes.cast_signed();
            *peak = (*peak).max(*in_use);
        }
    }
}

/// The simple implementation: all levels of bytes in use are kept, and each query reads all of them.
#[test]
#[allow(clippy::too_many_lines, reason = "it is a list of possible events")]
fn all_figures_agree_with_the_simple_way() {
    const THREADS: usize = 4;
    for seed in 1..40_u64 {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        // Some histories are so long that groups are forgotten.
        let (stacks, steps) = if seed % 20 == 19 { (9000, 30_000) } else { ([1, 3, 50][random(3)], 1000) };
        let mut runner = Runner::default();
        let devices = [0, 1].map(|ordinal| Device { family: Family::Cuda, ordinal });
        let is_displaced = seed % 2 == 0;
        if is_displaced {
            runner.post(&EventKind::Displaced { now: 1, more: 1 }, ThreadId(1));
        }
        let mut live: HashMap<u64, PlainBlock> = HashMap::new();
        // The block of the newest free, or the number of the event that counted it as untracked.
        let mut freed: [Option<(u64, std::result::Result<PlainBlock, u64>)>; THREADS] = [None; THREADS];
        // The numbers of the events that counted untracked frees.
        let mut untracked: Vec<u64> = Vec::new();
        // Bytes in use of the process and of each thread, on both devices.
        let mut history = vec![[[0_i64; 2]; THREADS + 1]];
        let mut scopes: HashMap<u64, PlainScope> = HashMap::new();
        let mut entered: [Vec<PlainEntered>; THREADS] = Default::default();
        let (mut events, mut allocated, mut next_scope, mut tasks) = (0, 0, 1000, 0);
        // The scopes that adopt threads: all threads without a scope, or those of one half.
        let mut adopters: BTreeMap<u64, Option<usize>> = BTreeMap::new();
        for thread in 0..THREADS {
            let name = ThreadName::new(format!("{}-{thread}", thread % 2).as_bytes());
            runner.post(&EventKind::Named { name }, ThreadId(u32::try_from(thread).unwrap() + 1));
        }
        let change = |history: &mut Vec<[[i64; 2]; THREADS + 1]>, plain: &PlainBlock, sign: i64| {
            let mut now = *history.last().unwrap();
            let device = plain.block.device.ordinal as usize;
            if plain.block.kind.is_on_device() {
                for at in (0..=THREADS).filter(|at| *at == 0 || plain.owner.all & 1 << at > 0) {
                    now[at][device] += sign * plain.bytes.cast_signed();
                }
            }
            history.push(now);
        };
        for step in 0..steps {
            let thread = random(THREADS);
            let id = ThreadId(u32::try_from(thread).unwrap() + 1);
            let owner = PlainOwner::of_thread(id, &entered[thread]);
            match random(15) {
                0..4 => {
                    adopters.retain(|scope, _| scopes.contains_key(scope));
                    let adopter = adopters.iter().rev().find(|(_, half)| half.is_none_or(|half| half == thread % 2));
                    let owner = match adopter.filter(|_| entered[thread].is_empty()) {
                        None => owner,
                        Some((scope, _)) => {
                            let adopter = &scopes[scope];
                            let of_opener = &entered[adopter.opener];
                            let opener = ThreadId(u32::try_from(adopter.opener).unwrap() + 1);
                            let is_in = adopter.task.is_none() && !of_opener.is_empty();
                            let host = is_in.then(|| PlainOwner::of_thread(opener, of_opener));
                            host.unwrap_or(adopter.owner).with(id)
                        }
                    };
                    let name = random(600) as u64 * 512;
                    let kind = MemKind::ALL[random(5)];
                    let bytes = random(1000) as u64;
                    let stack = StackId(u32::try_from(random(stacks)).unwrap());
                    let context = u8::try_from(random(3)).unwrap();
                    let block = Block { context, stack, ..Block::new(devices[random(2)], Bytes::new(bytes), kind) };
                    let key = Key::new(Space::Address, name);
                    if let Some(missed) = live.remove(&name) {
                        change_own(&mut scopes, &runner.ledger, key, &missed, -1);
                        change(&mut history, &missed, -1);
                        // After a loss, or while functions are displaced, an allocation at an address that is in use first
                        // removes the block whose free was missed.
                        if !is_displaced {
                            runner.post(&EventKind::Lost { count: 1 }, id);
                        }
                    }
                    runner.post(&EventKind::Alloc { key, block }, id);
                    let plain = PlainBlock { owner, number: runner.number, bytes, block };
                    change_own(&mut scopes, &runner.ledger, key, &plain, 1);
                    live.insert(name, plain);
                    change(&mut history, &plain, 1);
                    events += 1;
                    allocated += u64::from(kind.is_on_device());
                }
                4..7 => {
                    let mut names: Vec<u64> = live.keys().copied().collect();
                    names.sort_unstable();
                    let is_known = !names.is_empty() && random(8) > 0;
                    let name = if is_known { names[random(names.len())] } else { 1 << 40 };
                    let key = Key::new(Space::Address, name);
                    let removed = live.remove(&name);
                    if let Some(removed) = &removed {
                        change_own(&mut scopes, &runner.ledger, key, removed, -1);
                    }
                    runner.post(&EventKind::Free { key, block: None }, id);
                    if let Some(removed) = &removed {
                        change(&mut history, removed, -1);
                    }
                    if removed.is_none() {
                        runner.post(&EventKind::Untracked, id);
                        untracked.push(runner.number);
                    }
                    freed[thread] = Some((name, removed.ok_or(runner.number)));
                    events += 1;
                }
                7 => {
                    // The driver has not reused the address, because the block was not freed.
                    if let Some((name, block)) = freed[thread].filter(|(name, _)| !live.contains_key(name)) {
                        runner.post(&EventKind::FreeFailed, id);
                        freed[thread] = None;
                        match block {
                            Ok(block) => {
                                change_own(&mut scopes, &runner.ledger, Key::new(Space::Address, name), &block, 1);
                                live.insert(name, block);
                                change(&mut history, &block, 1);
                            }
                            Err(number) => untracked.retain(|untracked| *untracked != number),
                        }
                        events -= 1;
                    }
                }
                8 if random(6) == 0 => {
                    let context = u8::try_from(1 + random(2)).unwrap();
                    for (name, plain) in live.iter().filter(|(_, plain)| plain.block.context == context) {
                        change_own(&mut scopes, &runner.ledger, Key::new(Space::Address, *name), plain, -1);
                    }
                    runner.post(&EventKind::ContextDestroyed { context }, id);
                    // These are one event: no scope is read in between.
                    live.retain(|_, plain| {
                        let is_removed = plain.block.context == context;
                        if is_removed {
                            change(&mut history, plain, -1);
                        }
                        !is_removed
                    });
                }
                9 => {
                    let device = random(2);
                    let of_thread = (random(2) == 0).then_some(id);
                    // The bits of an owner have room for this number.
                    let bit = (tasks < 100 && random(3) == 0).then_some(10 + tasks);
                    let spec = ScopeSpec {
                        counts: match bit {
                            Some(_) => Counted::Task,
                            None => of_thread.map_or(Counted::Process, Counted::Thread),
                        },
                        callsite: CallsiteId(2 + u32::try_from(random(3)).unwrap()),
                        ..ScopeSpec::exact(devices[device])
                    };
                    next_scope += 1;
                    runner.post(&EventKind::Open { scope: ScopeId(next_scope), spec }, id);
                    let (began, number) = (history.len() - 1, runner.number);
                    tasks += u32::from(bit.is_some());
                    let is_overlapped = bit.is_none() && overlap(&mut scopes, &history, (device, thread, number));
                    let level = history[began][0][device];
                    let scope = PlainScope {
                        device,
                        of_thread: of_thread.filter(|_| bit.is_none()).map(|thread| thread.0),
                        began,
                        owner: bit.map_or(owner, |bit| owner.with(ThreadId(bit))),
                        opener: thread,
                        number,
                        own: is_overlapped.then_some((level, level)),
                        whole_before: 0,
                        task: bit.map(|bit| PlainTask { bit, in_use: 0, start: 0, peak: 0 }),
                    };
                    scopes.insert(next_scope, scope);
                    if bit.is_none() {
                        entered[thread].push(PlainEntered { scope: next_scope, owner, host: None });
                    }
                }
                10 => {
                    let Some((scope, open)) = scopes.iter().min_by_key(|(scope, _)| *scope ^ step) else { continue };
                    entered[thread].push(PlainEntered { scope: *scope, owner, host: Some(open.owner) });
                    runner.post(&EventKind::Enter { scope: ScopeId(*scope) }, id);
                }
                14 => {
                    let Some(scope) = scopes.keys().min_by_key(|scope| **scope ^ step).copied() else { continue };
                    let half = [None, Some(0), Some(1)][random(3)];
                    let threads = half.map_or(Threads::Unscoped, |half| Threads::named(&format!("{half}-")));
                    runner.post(&EventKind::Adopt { scope: ScopeId(scope), threads }, id);
                    adopters.insert(scope, half);
                }
                11 => {
                    // It may have entered other scopes later.
                    let mut later_first = entered[thread].iter().rev();
                    let left = later_first.find(|entered| entered.host.is_some() && random(4) > 0);
                    let Some(scope) = left.map(|left| left.scope) else { continue };
                    let at = entered[thread].iter().rposition(|entered| entered.scope == scope);
                    entered[thread].remove(at.unwrap());
                    runner.post(&EventKind::Leave { scope: ScopeId(scope) }, id);
                }
                _ => {
                    let Some(scope) = scopes.keys().min_by_key(|scope| **scope ^ step).copied() else { continue };
                    let queries =
                        [EventKind::Read { scope: ScopeId(scope) }, EventKind::Reset { scope: ScopeId(scope) }];
                    let how = random(4);
                    let close = EventKind::Close { scope: ScopeId(scope) };
                    let trace = runner.post(queries.get(how).unwrap_or(&close), id).expect("it is open");
                    let open = scopes.get_mut(&scope).unwrap();
                    let of = |moment: &[[i64; 2]; THREADS + 1]| {
                        moment[open.of_thread.map_or(0, |thread| thread as usize)][open.device]
                    };
                    let levels = &history[open.began..];
                    let own = open.own.filter(|_| open.of_thread.is_none());
                    let (end, most) =
                        own.unwrap_or_else(|| (of(levels.last().unwrap()), levels.iter().map(of).max().unwrap()));
                    let start = of(&levels[0]);
                    let of_task = open.task.as_ref().map(|task| (task.start, task.in_use, task.peak));
                    let (start, end, most) = of_task.unwrap_or((start, end, most));
                    let missed = untracked.iter().filter(|number| **number > open.number).count() as u64;
                    let expected = (end - start, most.abs_diff(start.max(end)), missed);
                    let figures = (trace.used.get(), trace.peaked.get(), trace.untracked);
                    assert_eq!(figures, expected, "seed {seed}, step {step}, scope {scope}");
                    assert_eq!(trace.own_scope, own.is_some(), "seed {seed}, step {step}, scope {scope}");
                    if how == 1 {
                        (open.began, open.number) = (history.len() - 1, runner.number);
                        if let Some(task) = &mut open.task {
                            (task.start, task.peak) = (task.in_use, task.in_use);
                            continue;
                        }
                        let (device, opener, level) = (open.device, open.opener, history[open.began][0][open.device]);
                        let is_overlapped = scopes.values().any(|other| other.overlaps(device, opener));
                        let scope = scopes.get_mut(&scope).unwrap();
                        (scope.own, scope.whole_before) = (is_overlapped.then_some((level, level)), 0);
                    } else if how > 1 {
                        let opener = &mut entered[open.opener];
                        opener.retain(|entered| entered.scope != scope || entered.host.is_some());
                        scopes.remove(&scope);
                    }
                }
            }
            if step % 50 == 0 {
                let counts = runner.ledger.counts();
                assert_eq!(
                    (counts.events, counts.untracked),
                    (events, untracked.len() as u64),
                    "seed {seed}, step {step}"
                );
                let mut blocks: Vec<_> = (0..BLOCK_PARTS).flat_map(|part| runner.ledger.blocks(part, None)).collect();
                blocks.sort_by_key(|block| block.number);
                let blocks = blocks.iter().map(|known| {
                    let KnownBlock { group: AllocGroup { stack, kind, context, .. }, device, bytes, .. } = *known;
                    let block = Block { device, bytes, kind, context, stack };
                    (known.key.get(), known.thread.0, known.number, bytes.get(), block)
                });
                let plain = |(name, plain): (&u64, &PlainBlock)| {
                    (*name, plain.owner.first, plain.number, plain.bytes, plain.block)
                };
                let mut expected: Vec<_> = live.iter().map(plain).collect();
                expected.sort_by_key(|(_, _, number, ..)| *number);
                assert_eq!(blocks.collect::<Vec<_>>(), expected, "seed {seed}, step {step}");
                let of_all: (u64, u64) = runner
                    .ledger
                    .groups()
                    .iter()
                    .fold((0, 0), |(blocks, bytes), live| (blocks + live.blocks, bytes + live.bytes.get()));
                let expected = live.values().fold((0, 0), |(blocks, bytes), plain| (blocks + 1, bytes + plain.bytes));
                assert_eq!(of_all, expected, "seed {seed}, step {step}");
                let stats = runner.ledger.stats();
                assert_eq!(stats.iter().map(|stat| stat.on_device.blocks.allocated).sum::<u64>(), allocated);
                for DeviceStats { device, on_device, .. } in stats {
                    let most = history.iter().map(|now| now[0][device.ordinal as usize]).max().unwrap();
                    assert_eq!(on_device.bytes.peak.cast_signed(), most, "seed {seed}, step {step}");
                }
            }
        }
    }
}
