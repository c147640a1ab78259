//! Tests of the ledger with scripts. A line is one event, one millisecond after the line before; a line with `=` is a query
//! of a scope and its expected figures. Sizes are in MiB. `@` is the device (0 by default), `%` the thread that posts the
//! event (1 by default).
//!
//! ```text
//! open a                               opens a scope with exact figures
//! open a of own, open a of task, open a of all    one without threads in no scope; one of a task, in which no thread is at first;
//!                                      one of all threads
//! open a sampled                       one that is sampled
//! enter a %2, leave a %2               a thread enters and leaves an open scope
//! adopt a [DSD-]                       an open scope adopts all threads without a scope, or those with such names
//! named DSD-0 %2                       the name of a thread
//! read a = 10 15, reset a = 10 15, close a = 10 15 [stale] [shared=5] [on=1, here] [lost=1]
//!                                      used and peaked; [driver=10/15] those of the driver's view
//! alloc x 10 [kind], free x            an allocation, a free
//! free_failed, untracked, found 10     what follows a free: it failed; the size is not known; a late lookup
//! gone 1                               context 1 is destroyed
//! sample 100, unread                   a sample (MiB in use of 1000); a reading that failed
//! lost 1, displaced 2 1                lost events; displaced functions of the driver: how many, and how many new ones
//! inside a = 10 20                     the sizes of the live blocks that were allocated in a scope
//! watch 1 allocations, watch 1 others, unwatch 1    a budget wants to know what other threads do
//! alloc x 10 at 100                    a block whose address is 100 MiB
//! pool 1, reserved 1 30, empty 1       a pool is registered, reports what it has from the driver, frees all its parts
//! part 1 100 5, unpart 1 100, resize 1 100 7     a part of pool 1 at 100 MiB is allocated, freed, resized
//! pool 1 = 2 15 5 [unknown=1 doubled=1 outside=1 late=1]    its parts, their bytes, what it keeps unused
//! ended %2                             a thread has ended, and another one has its id
//! needs_name %2 = true                 whether the name of a thread is needed
//! noticed = alloc 1 @0 [in scope] [guest]       what the event before was to it, or `nothing`
//! tree /a/b = calls used peak device-peak allocated allocations    (the last two without the scopes inside)
//! ```

mod adoption;
mod at_peak;
mod blocks;
mod groups;
mod guests;
mod histories;
mod noticed;
mod observed;
mod pools;
pub(super) mod rule;
mod samples;
mod scopes;
mod tree;

use std::{collections::HashMap, fmt::Write, time::Duration};

use super::{stats::Count, traces::peak_above, *};
use crate::model::{
    Block, Bytes, CallsiteId, Counted, Device, Event, EventKind, Family, Gauge, GpuMemory, Key, MemKind, OwnerThread,
    PoolId, ScopeId, ScopeSpec, Space, StackId, Tag, ThreadId, ThreadName, Threads, Trace,
};

const MIB: i64 = 1 << 20;

/// Returns a small random generator. A fixed seed makes each failure repeatable.
pub(super) fn numbers(mut seed: u64) -> impl FnMut(u64) -> u64 {
    move |below| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    }
}

#[derive(Default)]
struct Runner {
    ledger: Ledger,
    names: HashMap<String, u64>,
    number: u64,
    noticed: Option<Noticed>,
    /// The number of allocations and frees that took the fast path.
    fast: u64,
}

impl Runner {
    fn id(&mut self, name: &str) -> u64 {
        let next = self.names.len() as u64 + 1;
        *self.names.entry(name.to_owned()).or_insert(next)
    }

    /// Scopes `a` and `a.2` have the same callsite.
    fn callsite(&mut self, scope: &str) -> CallsiteId {
        let name = scope.split('.').next().unwrap_or(scope);
        CallsiteId(u32::try_from(self.id(name)).unwrap() + 1)
    }

    /// Returns `calls used peak device_peak allocated allocations` of a path, in MiB.
    fn tree(&mut self, path: &str, ordinal: u32) -> Option<String> {
        let nodes = self.ledger.nodes();
        let path: Vec<CallsiteId> =
            path.split('/').filter(|scope| !scope.is_empty()).map(|scope| self.callsite(scope)).collect();
        let at = |ordinal| {
            let root = nodes.iter().position(|(device, node)| {
                node.parent == NodeId::NONE && device.is_some_and(|device| device.ordinal == ordinal)
            })?;
            path.iter().try_fold(root, |outer, callsite| {
                nodes.iter().position(|(_, node)| node.parent.0 as usize == outer && node.callsite == *callsite)
            })
        };
        let ScopeNode { calls, in_use, peak, device_peak, allocated, allocations, .. } = nodes[at(ordinal)?].1;
        let [in_use, peak, device_peak] = [in_use, peak, device_peak].map(|bytes| bytes / MIB);
        Some(format!("{calls} {in_use} {peak} {device_peak} {} {allocations}", allocated >> 20))
    }

    fn key(&mut self, name: &str) -> Key {
        Key::new(Space::Address, self.id(name))
    }

    fn open(&mut self, scope: &str, device: Device, gauge: Gauge, thread: Option<&str>) -> EventKind {
        let every = Duration::from_millis(u64::from(gauge == Gauge::Sampled));
        let counts = match thread {
            None => Counted::OwnAndUnscoped,
            Some("all") => Counted::AllThreads,
            Some("task") => Counted::Task,
            Some("own") => Counted::Own,
            Some(other) => panic!("not a kind of scope: {other}"),
        };
        EventKind::Open {
            scope: ScopeId(self.id(scope)),
            spec: ScopeSpec {
                device,
                gauge,
                every,
                counts,
                callsite: self.callsite(scope),
                source: crate::model::Source::Dispatch,
                at_peak: false,
            },
        }
    }

    fn alloc(&mut self, block: &str, device: Device, bytes: Bytes, kind: MemKind) -> EventKind {
        EventKind::Alloc { key: self.key(block), block: Block::new(device, bytes, kind) }
    }

    /// Applies an event. As in the inbox, an allocation or a free tries the fast path first.
    fn post(&mut self, kind: &EventKind, thread: ThreadId) -> Option<Trace> {
        self.number += 1;
        let (number, time) = (self.number, Duration::from_millis(self.number));
        let is_fast = match *kind {
            EventKind::Alloc { key, block } if block.tag().is_of_driver() => {
                self.ledger.set_time(time);
                self.ledger.alloc_like_latest(key, block.bytes, block.tag(), number, thread)
            }
            EventKind::Free { key, .. } => self.ledger.free_like_latest(key, thread),
            _ => false,
        };
        let (event, mut trace) = (Event { number, time, thread, kind }, None);
        match kind {
            _ if is_fast => self.fast += 1,
            EventKind::Alloc { .. } | EventKind::Free { .. } => _ = self.ledger.apply(&event),
            _ => trace = self.ledger.query(&event),
        }
        self.noticed = self.ledger.noticed();
        trace
    }

    fn lines(&mut self, script: &str) {
        script.split([';', '\n']).map(str::trim).filter(|line| !line.is_empty()).for_each(|line| self.line(line));
    }

    #[allow(clippy::too_many_lines, reason = "it is a list of possible lines")]
    fn line(&mut self, line: &str) {
        let (event, expected) = line.split_once('=').map_or((line, None), |_| {
            let (event, expected) = line.split_once(" = ").expect(line);
            (event, Some(expected))
        });
        let mut words: Vec<&str> = event.split_whitespace().collect();
        let ordinal = match words.iter().position(|word| word.starts_with('@')) {
            Some(at) => words.remove(at)[1..].parse().expect(line),
            None => 0,
        };
        let device = Device { family: Family::Cuda, ordinal };
        let thread = match words.iter().position(|word| word.starts_with('%')) {
            Some(at) => ThreadId(words.remove(at)[1..].parse().expect(line)),
            None => ThreadId(1),
        };
        let mib = |text: &str| Bytes::mib(text.parse().expect(line));
        let at = |address: &str| Key::new(Space::Address, mib(address).get());
        let pool_of = |pool: &str| PoolId(pool.parse().expect(line));
        let part = |pool: &str, address: &str| Key::of_part(pool_of(pool), mib(address).get());
        let kind = match words[..] {
            ["open", scope] => self.open(scope, device, Gauge::Exact, None),
            ["open", scope, "sampled"] => self.open(scope, device, Gauge::Sampled, None),
            ["open", scope, "of", thread] => self.open(scope, device, Gauge::Exact, Some(thread)),
            ["alloc", block, size] => self.alloc(block, device, mib(size), MemKind::Device),
            ["alloc", block, size, "pool"] => self.alloc(block, device, mib(size), MemKind::Pool),
            ["alloc", block, size, "managed"] => self.alloc(block, device, mib(size), MemKind::Managed),
            ["alloc", block, size, "pinned"] => self.alloc(block, device, mib(size), MemKind::PinnedHost),
            ["alloc", block, size, "graph"] => self.alloc(block, device, mib(size), MemKind::Graph),
            ["shrink", block, size] => EventKind::Shrink { key: self.key(block), bytes: mib(size) },
            ["alloc", block, size, "vmm"] => self.alloc(block, device, mib(size), MemKind::Vmm),
            ["alloc", block, size, "handle"] => {
                let key = Key::new(Space::Handle, self.id(block));
                EventKind::Alloc { key, block: Block::new(device, mib(size), MemKind::Vmm) }
            }
            ["alloc", _, size, "at", address] => {
                EventKind::Alloc { key: at(address), block: Block::new(device, mib(size), MemKind::Device) }
            }
            ["free", "at", address] => EventKind::Free { key: at(address), block: None },
            ["pool", pool] if expected.is_none() => EventKind::PoolRegistered { pool: pool_of(pool), device },
            ["pool", pool] => {
                let pools = self.ledger.pools();
                let known = pools.iter().find(|known| known.pool == pool_of(pool)).expect(line);
                let WrongCalls { unknown, doubled, outside, late, below } = known.wrong;
                let unused = known.unused().map_or("?".to_owned(), |unused| unused.mb().to_string());
                let mut values = format!("{} {} {unused}", known.parts, known.part_bytes.mb());
                let not_believed = if known.reported == known.reserved { 0 } else { known.reported.mb() };
                let mut counts = vec![("unknown", unknown), ("doubled", doubled), ("outside", outside), ("late", late)];
                counts.extend([("below", below), ("early", known.read_early), ("reported", not_believed)]);
                for (name, count) in counts {
                    if count > 0 {
                        _ = write!(values, " {name}={count}");
                    }
                }
                assert_eq!(Some(values.as_str()), expected, "{line}");
                return;
            }
            ["reserved", pool, size] => EventKind::PoolReserved { pool: pool_of(pool), bytes: mib(size) },
            ["empty", pool] => EventKind::PoolEmptied { pool: pool_of(pool) },
            ["part", pool, address, size] => {
                let PoolId(context) = pool_of(pool);
                let block = Block { context, ..Block::new(device, mib(size), MemKind::Part) };
                EventKind::Alloc { key: part(pool, address), block }
            }
            ["unpart", pool, address] => EventKind::Free { key: part(pool, address), block: None },
            ["resize", pool, address, size] => EventKind::Shrink { key: part(pool, address), bytes: mib(size) },
            ["free", block] => EventKind::Free { key: self.key(block), block: None },
            ["free", block, size] => {
                let known = Block::new(device, mib(size), MemKind::Device);
                EventKind::Free { key: self.key(block), block: Some(known) }
            }
            ["free_failed"] => EventKind::FreeFailed,
            ["untracked"] => EventKind::Untracked,
            ["alloc", block, size, "in", context] => {
                let context = context.parse().expect(line);
                let block_of = Block { context, ..Block::new(device, mib(size), MemKind::Device) };
                EventKind::Alloc { key: self.key(block), block: block_of }
            }
            ["found", size] => EventKind::LateLookup { block: Block::new(device, mib(size), MemKind::Device) },
            ["gone", context] => EventKind::ContextDestroyed { context: context.parse().expect(line) },
            ["sample", used] => {
                let (total, used) = (Bytes::mib(1000), mib(used));
                let free = total.checked_sub(used).expect(line);
                EventKind::Sample { device, memory: GpuMemory { total, free, used, reserved: None } }
            }
            ["unread"] => EventKind::ReadFailed { device, gauge: Gauge::Sampled },
            ["read", scope] => EventKind::Read { scope: ScopeId(self.id(scope)) },
            ["reset", scope] => EventKind::Reset { scope: ScopeId(self.id(scope)) },
            ["close", scope] => EventKind::Close { scope: ScopeId(self.id(scope)) },
            ["enter", scope] => EventKind::Enter { scope: ScopeId(self.id(scope)) },
            ["leave", scope] => EventKind::Leave { scope: ScopeId(self.id(scope)) },
            ["adopt", scope] => EventKind::Adopt { scope: ScopeId(self.id(scope)), threads: Threads::Unscoped },
            ["adopt", scope, name] => {
                EventKind::Adopt { scope: ScopeId(self.id(scope)), threads: Threads::named(name) }
            }
            ["named", name] => EventKind::Named { name: ThreadName::new(name.as_bytes()) },
            ["reset-summary"] => EventKind::ResetSummary,
            ["reset-peaks"] => EventKind::ResetPeaks { device },
            ["watch", id, what] => {
                let what = if what == "allocations" { Noticing::AllocationsOfOthers } else { Noticing::OfOthers };
                self.ledger.watch(id.parse().expect(line), device, what, thread);
                return;
            }
            ["ended"] => {
                self.ledger.start_thread(thread);
                return;
            }
            ["needs_name"] => {
                assert_eq!(Some(self.ledger.needs_name(thread).to_string().as_str()), expected, "{line}");
                return;
            }
            ["unwatch", id] => {
                self.ledger.unwatch(id.parse().expect(line));
                return;
            }
            ["noticed"] => {
                let noticed = self.noticed.map_or("nothing".to_owned(), |it| {
                    let what = if it.is_free { "free" } else { "alloc" };
                    let scope = if it.is_in_scope { " in scope" } else { "" };
                    let guest = if it.is_guest { " guest" } else { "" };
                    format!("{what} {} @{}{scope}{guest}", it.bytes.mb(), it.device.ordinal)
                });
                assert_eq!(Some(noticed.as_str()), expected, "{line}");
                return;
            }
            ["tree", path] => {
                assert_eq!(self.tree(path, ordinal).as_deref(), expected, "{line}");
                return;
            }
            ["inside", scope] => {
                let scope = ScopeId(self.id(scope));
                let period = self.ledger.scope_period(scope, self.number).expect("it is open");
                let blocks = (0..BLOCK_PARTS).flat_map(|part| self.ledger.blocks(part, Some(&period)));
                let mut sizes: Vec<_> = blocks.map(|block| block.bytes.mb()).collect();
                sizes.sort_unstable();
                let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
                let sizes = if sizes.is_empty() { "none".to_owned() } else { sizes.join(" ") };
                assert_eq!(Some(sizes.as_str()), expected, "{line}");
                return;
            }
            ["displaced", now, more] => {
                EventKind::Displaced { now: now.parse().expect(line), more: more.parse().expect(line) }
            }
            ["queried"] => EventKind::PoolsQueried,
            ["lost", count] => EventKind::Lost { count: count.parse().expect(line) },
            _ => panic!("not an event: {line}"),
        };
        let trace = self.post(&kind, thread);
        match (trace, expected) {
            (None, None) => {}
            (Some(trace), Some(expected)) => {
                let values = trace_values(&trace);
                for word in expected.split_whitespace() {
                    assert!(values.split_whitespace().any(|value| value == word), "{line}\ngives: {values}");
                }
                assert!(
                    values.starts_with(&expected.split_whitespace().take(2).collect::<Vec<_>>().join(" ")),
                    "{line}"
                );
                let peak = trace.peak_over_start().get().cast_signed();
                assert_eq!(peak, trace.used.get().max(0) + trace.peaked.get().cast_signed(), "{line}");
            }
            (trace, _) => panic!("{line}: gives {trace:?}"),
        }
    }
}

impl Ledger {
    fn nodes(&mut self) -> Vec<(Option<Device>, ScopeNode)> {
        let mut last = None;
        while let Some(next) = self.store_device_peaks(last) {
            last = Some(next);
        }
        let mut nodes = Vec::new();
        loop {
            let part = self.sums().nodes_from(nodes.len());
            if part.is_empty() {
                return nodes;
            }
            assert!(part.len() <= PART_LEN);
            nodes.extend(part);
        }
    }

    fn groups(&mut self) -> Vec<GroupUsage> {
        (0..).step_by(PART_LEN).map_while(|first| self.sums().groups_from(first)).flatten().collect()
    }
}

fn trace_values(trace: &Trace) -> String {
    let peaked = trace.peaked.get().cast_signed();
    assert_eq!((trace.used.get() % MIB, peaked % MIB), (0, 0));
    let mut text = format!("{} {} lost={} untracked={}", trace.used.mb(), peaked / MIB, trace.lost, trace.untracked);
    _ = write!(text, " shared={}", trace.shared.mb());
    match trace.allocated_on {
        Some(device) => _ = write!(text, " on={device}"),
        None => text.push_str(" here"),
    }
    if let Some(driver) = trace.driver {
        _ = write!(text, " driver={}/{}", driver.used.mb(), driver.peaked.mb());
    }
    if trace.stale {
        text.push_str(" stale");
    }
    if let Some(sampling) = trace.sampling {
        let gap = sampling.longest_gap.as_millis();
        let _ = write!(text, " readings={} gap={gap}", sampling.readings);
    }
    text
}

fn check(script: &str) -> Ledger {
    let mut runner = Runner::default();
    runner.lines(script);
    runner.ledger
}
