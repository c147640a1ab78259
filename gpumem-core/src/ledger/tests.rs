//! The fold, with scripts as data. A line is one event, one millisecond after the line before; a line with `=` says
//! what the scope must have come to. Amounts are MiB, devices are `@0` unless said otherwise.
//!
//! ```text
//! open a            an exact scope           alloc x 10 [kind]   free x       lost 1
//! open a of 2       one of thread 2 alone    alloc y 10 %2       free y %1    (%: the thread that does it, else 1)
//! open a sampled    a sampled scope          sample 100          unread       (sample: MiB in use of 1000)
//! open a pool       one of the pool's marks  marks 30 10         unread pool  (the high mark, and in use)
//! enter a %2        leave a %2               reset-peaks         inside a = 10 20    (blocks that are still there)
//! tree /a/b = calls used peak device-peak allocated allocations  (the last two without the scopes inside)
//! untracked         displaced 2 1            (nobody knows the newest free's block; functions that others took, new ones)
//! read a = 10 15    reset a = 10 15          close a = 10 15 [stale] [overlapped, alone] [lost=1]
//! ```

use std::{collections::HashMap, fmt::Write, time::Duration};

use super::{stats::Count, *};
use crate::model::{CallsiteId, Key, Space, StackId, Tag};

const MIB: i64 = 1 << 20;

/// A small generator with a fixed seed: what fails once fails always.
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
}

impl Runner {
    fn id(&mut self, name: &str) -> u64 {
        let next = self.names.len() as u64 + 1;
        *self.names.entry(name.to_owned()).or_insert(next)
    }

    /// Scopes `a` and `a.2` are opened in one place.
    fn callsite(&mut self, scope: &str) -> CallsiteId {
        let name = scope.split('.').next().unwrap_or(scope);
        CallsiteId(u32::try_from(self.id(name)).unwrap() + 1)
    }

    /// `calls used peak device_peak allocated allocations` of each path, in MiB.
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
        let thread = thread.map(|number| ThreadId(number.parse().expect("a number")));
        EventKind::Open {
            scope: ScopeId(self.id(scope)),
            spec: ScopeSpec {
                device,
                gauge,
                every,
                thread,
                callsite: self.callsite(scope),
                source: crate::model::Source::Dispatch,
                at_peak: false,
            },
        }
    }

    fn alloc(&mut self, block: &str, device: Device, bytes: Bytes, kind: MemKind) -> EventKind {
        EventKind::Alloc { key: self.key(block), block: Block::new(device, bytes, kind) }
    }

    fn post(&mut self, kind: &EventKind, thread: ThreadId) -> Option<Trace> {
        self.number += 1;
        self.ledger.apply(&Event { number: self.number, time: Duration::from_millis(self.number), thread, kind });
        self.ledger.last_trace()
    }

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
        let kind = match words[..] {
            ["open", scope] => self.open(scope, device, Gauge::Exact, None),
            ["open", scope, "sampled"] => self.open(scope, device, Gauge::Sampled, None),
            ["open", scope, "pool"] => self.open(scope, device, Gauge::Pool, None),
            ["open", scope, "of", thread] => self.open(scope, device, Gauge::Exact, Some(thread)),
            ["alloc", block, size] => self.alloc(block, device, mib(size), MemKind::Device),
            ["alloc", block, size, "pool"] => self.alloc(block, device, mib(size), MemKind::Pool),
            ["alloc", block, size, "managed"] => self.alloc(block, device, mib(size), MemKind::Managed),
            ["alloc", block, size, "pinned"] => self.alloc(block, device, mib(size), MemKind::PinnedHost),
            ["alloc", block, size, "graph"] => self.alloc(block, device, mib(size), MemKind::Graph),
            ["shrink", block, size] => EventKind::Shrink { key: self.key(block), bytes: mib(size) },
            ["alloc", block, size, "vmm"] => self.alloc(block, device, mib(size), MemKind::Vmm),
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
            ["marks", high, used] => {
                let (used_high, used) = (mib(high), mib(used));
                let usage = PoolUsage { pool: 0, used, used_high, reserved: used_high, reserved_high: used_high };
                EventKind::PoolUsage { device, usage }
            }
            ["unread"] => EventKind::ReadFailed { device, gauge: Gauge::Sampled },
            ["unread", "pool"] => EventKind::ReadFailed { device, gauge: Gauge::Pool },
            ["read", scope] => EventKind::Read { scope: ScopeId(self.id(scope)) },
            ["reset", scope] => EventKind::Reset { scope: ScopeId(self.id(scope)) },
            ["close", scope] => EventKind::Close { scope: ScopeId(self.id(scope)) },
            ["enter", scope] => EventKind::Enter { scope: ScopeId(self.id(scope)) },
            ["leave", scope] => EventKind::Leave { scope: ScopeId(self.id(scope)) },
            ["reset-peaks"] => EventKind::ResetPeaks { device },
            ["tree", path] => {
                assert_eq!(self.tree(path, ordinal).as_deref(), expected, "{line}");
                return;
            }
            ["inside", scope] => {
                let scope = ScopeId(self.id(scope));
                let within = self.ledger.within(scope, self.number).expect("it is open");
                let blocks = (0..PARTS).flat_map(|part| self.ledger.blocks(part, Some(&within)));
                let mut sizes: Vec<_> = blocks.map(|held| held.bytes.mb()).collect();
                sizes.sort_unstable();
                let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
                let told = if sizes.is_empty() { "none".to_owned() } else { sizes.join(" ") };
                assert_eq!(Some(told.as_str()), expected, "{line}");
                return;
            }
            ["marks-lost"] => EventKind::PoolMarkDisturbed { device },
            ["displaced", now, more] => {
                EventKind::Displaced { now: now.parse().expect(line), more: more.parse().expect(line) }
            }
            ["lost", count] => EventKind::Lost { count: count.parse().expect(line) },
            _ => panic!("not an event: {line}"),
        };
        let trace = self.post(&kind, thread);
        match (trace, expected) {
            (None, None) => {}
            (Some(trace), Some(expected)) => {
                let told = tell(&trace);
                for word in expected.split_whitespace() {
                    assert!(told.split_whitespace().any(|said| said == word), "{line}\ncame to: {told}");
                }
                assert!(told.starts_with(&expected.split_whitespace().take(2).collect::<Vec<_>>().join(" ")), "{line}");
                let peak = trace.peak_over_start().get().cast_signed();
                assert_eq!(peak, trace.used.get().max(0) + trace.peaked.get().cast_signed(), "{line}");
            }
            (trace, _) => panic!("{line}: came to {trace:?}"),
        }
    }
}

impl Ledger {
    fn nodes(&mut self) -> Vec<(Option<Device>, ScopeNode)> {
        let mut last = None;
        while let Some(next) = self.note_device_peaks(last) {
            last = Some(next);
        }
        let mut nodes = Vec::new();
        loop {
            let part = self.nodes_from(nodes.len());
            if part.is_empty() {
                return nodes;
            }
            assert!(part.len() <= SLICE);
            nodes.extend(part);
        }
    }

    fn groups(&mut self) -> Vec<GroupUsage> {
        (0..).step_by(SLICE).map_while(|first| self.groups_from(first)).flatten().collect()
    }
}

fn tell(trace: &Trace) -> String {
    let peaked = trace.peaked.get().cast_signed();
    assert_eq!((trace.used.get() % MIB, peaked % MIB), (0, 0));
    let mut told = format!("{} {} lost={} untracked={}", trace.used.mb(), peaked / MIB, trace.lost, trace.untracked);
    told.push_str(if trace.overlapped { " overlapped" } else { " alone" });
    if trace.stale {
        told.push_str(" stale");
    }
    if let Some(sampling) = trace.sampling {
        let gap = sampling.longest_gap.as_millis();
        let _ = write!(told, " readings={} gap={gap}", sampling.readings);
    }
    told
}

fn check(script: &str) -> Ledger {
    let mut runner = Runner::default();
    for line in script.split([';', '\n']).map(str::trim).filter(|line| !line.is_empty()) {
        runner.line(line);
    }
    runner.ledger
}

#[test]
fn fastai_deleted_test_sequence() {
    check(
        "open t; alloc a 10; alloc b 15; free b; read t = 10 15
         free a; read t = 0 25
         alloc c 10; reset t = 10 15; free c; read t = -10 0",
    );
}

#[test]
fn ipyexperiments_examples() {
    check("open t; alloc a 256; close t = 256 0");
    check("open t; alloc a 256; alloc b 256; free a; close t = 256 256");
}

#[test]
fn nothing_happened() {
    check("open t; close t = 0 0");
    check("alloc a 10; open t; read t = 0 0; close t = 0 0");
}

#[test]
fn nested_and_overlapping_scopes_each_keep_their_own_peak() {
    check(
        "open outer; alloc a 10; open inner; alloc b 50; free b; close inner = 0 50
         alloc c 20; free c; close outer = 10 50",
    );
    check("open a; alloc x 30; free x; open b; alloc y 10; close a = 10 20; alloc z 5; close b = 15 0");
    check("open a; open b; open c; alloc x 7; close b = 7 0; free x; close a = 0 7; close c = 0 7");
    check("alloc x 40; open a; free x; open b; alloc y 20; free y; close a = -40 0; close b = 0 20");
}

#[test]
fn reset_begins_anew_and_nothing_falls_between() {
    check("open t; alloc a 5; reset t = 5 0; alloc b 7; reset t = 7 0; free a; free b; close t = -12 0");
    check("open o; open t; alloc a 9; free a; reset t = 0 9; read t = 0 0; close o = 0 9");
}

#[test]
fn a_closed_or_unknown_scope_comes_to_nothing() {
    check("open t; close t = 0 0; close t; read t; reset t; alloc a 1");
}

#[test]
fn devices_are_apart() {
    check("open a @0; open b @1; alloc x @1 10; close a = 0 0; close b = 10 0");
    check("open a @0; open b @1; alloc x @0 10; alloc y @1 20; free x; close a = 0 10; close b = 20 0");
}

#[test]
fn frees_of_blocks_that_nobody_heard_of() {
    check("open t; free x; untracked; close t = 0 0 untracked=1");
    check("open t; free x 10; close t = -10 0");
    check("open t; alloc a 4; free x 10; alloc b 8; close t = 2 2");
}

#[test]
fn an_untracked_free_that_is_looked_up_after_all() {
    check("open t; free x; untracked; free y; found 10; read t = -10 0 untracked=1; open u; close u = 0 0 untracked=0");
}

/// The driver frees after the look-up, so the block is there when the scope opens.
#[test]
fn a_scope_that_opens_during_a_look_up_begins_before_the_free() {
    check("free x; open t; found 10; free y; untracked; close t = -10 0 untracked=1");
    check("free x; open t; untracked; close t = 0 0 untracked=1");
    check("free x; open t %2; free_failed; free y; untracked; close t = 0 0 untracked=1");
    check("free x; untracked; open t; free_failed; free y; untracked; close t = 0 0 untracked=1");
    check(
        "open o; free x; untracked; open t; reset t = 0 0 untracked=0; free_failed; close t = 0 0 untracked=0; close o = 0 0 untracked=0",
    );
}

#[test]
fn only_what_happened_is_heard() {
    for (script, heard) in [
        ("alloc a 1; free a", 2),
        ("alloc a 1; free a; free_failed", 1),
        ("alloc a 1; open t; free a; open u; free_failed; open v; free a", 2),
        ("free x; free_failed", 0),
        ("free x; untracked; free_failed", 0),
        ("free x; untracked", 1),
        ("free x 10; free_failed; free y; found 7; free_failed", 0),
    ] {
        assert_eq!(check(script).counts().heard, heard, "{script}");
    }
}

#[test]
fn a_sampled_scope_loses_no_events() {
    check("sample 100; open t sampled; open u; lost 2; sample 100; close t = 0 0 lost=0; close u = 0 0 lost=2");
}

#[test]
fn a_function_that_others_took_is_told_to_each_scope_once() {
    check("open o; displaced 1 1; open t; open u; close u = 0 0 lost=1; close t = 0 0 lost=1; close o = 0 0 lost=1");
    check("displaced 2 2; open t; displaced 3 1; close t = 0 0 lost=3; displaced 0 0; open u; close u = 0 0 lost=0");
    check("open t; displaced 1 1; reset t = 0 0 lost=1; displaced 0 0; close t = 0 0 lost=1");
    check("displaced 1 1; displaced 0 0; lost 1; open u; close u = 0 0 lost=0");
    check("lost 5; displaced 1 1; displaced 0 0; displaced 1 1; open t; displaced 1 1; close t = 0 0 lost=2");
}

/// As two cells of a notebook that use one variable do, and `mem::replace`.
#[test]
fn scopes_closed_in_the_order_in_which_they_were_opened() {
    check(
        "open a; alloc x 1; open b; alloc y 2; close a = 3 0
         alloc z 30; open c; alloc w 400; tree /a = 1 3 3 3 1 1; tree /a/b = 0 2 2 3 2 1
         tree /b = 1 430 430 433 30 1; tree /b/c = 1 400 400 433 400 1
         inside b = 2 30 400; inside c = 400
         close b = 432 0; free z; tree /b = 1 400 430 433 30 1; alloc v 1; close c = 371 29; tree /c = 1 1 1 433 1 1",
    );
    // The same name again and again, each opened before the last is closed.
    check(
        "open t; alloc a 1; open t.2; close t = 1 0; alloc b 2; open t.3; close t.2 = 2 0; alloc c 4; close t.3 = 4 0
         tree /t = 3 7 7 7 7 3; tree /t/t = 0 0 0 3 0 0",
    );
    // On another device, and two at once.
    check(
        "open a; open b @1; open c; close a = 0 0; alloc x 1; close b = 0 0; alloc y 2; tree /b/c = 0 1 1 1 1 1
         tree /c = 1 2 2 3 2 1; inside c = 1 2; close c = 3 0",
    );
    // What was entered elsewhere stays where it is.
    check(
        "open o %2; open a; enter o; open b; close a = 0 0; alloc x 5; tree /o/b = 1 5 5 5 5 1; close b = 5 0; leave o
         alloc y 1; tree / = 0 6 6 0 1 1",
    );
    // Entered again on its own thread.
    check(
        "open a; open b; enter b; close a = 0 0; alloc x 5; tree /b = 1 5 5 5 5 1; inside b = 5; leave b; close b = 5 0",
    );
}

#[test]
fn kinds_that_are_not_on_the_device_for_certain_are_kept_apart() {
    check("open t; alloc a 1; alloc b 2 pool; alloc c 4 vmm; alloc d 8 managed; alloc e 16 pinned; close t = 7 0");
    let mut ledger = check("alloc a 8 managed; alloc b 16 pinned; alloc c 1; alloc d 2; free a; free c");
    let kinds = ledger.stats()[0].kinds;
    let [device, pool, managed, pinned, vmm, graph] = kinds.map(|kind| (kind.blocks.current, kind.bytes.current >> 20));
    assert_eq!((device, pool, managed, pinned, vmm, graph), ((1, 2), (0, 0), (0, 0), (1, 16), (0, 0), (0, 0)));
}

#[test]
fn a_block_of_which_a_part_is_given_back_stays_whose_it_is() {
    let ledger = check(
        "open t; alloc a 8 graph; shrink a 3; read t = 3 5; open u; shrink a 1; close u = -2 0; free a; close t = 0 8; shrink a 1",
    );
    let mut ledger = ledger;
    let graph = ledger.stats()[0].kinds[MemKind::Graph as usize];
    assert_eq!(
        (graph.blocks.peak, graph.bytes.peak >> 20, graph.bytes.allocated >> 20, graph.bytes.freed() >> 20),
        (1, 8, 8, 8)
    );
}

/// While blocks are read in parts.
#[test]
fn a_block_of_which_a_part_is_given_back_stays_where_it_is() {
    let mut runner = Runner::default();
    (1..2000).for_each(|block| runner.line(&format!("alloc {block} 2 graph")));
    let mut met = runner.ledger.blocks(0, None);
    (1..2000).rev().for_each(|block| runner.line(&format!("shrink {block} 1")));
    met.extend((1..PARTS).flat_map(|part| runner.ledger.blocks(part, None)));
    met.sort_by_key(|held| held.number);
    assert!(met.iter().map(|held| held.number).eq(1..2000), "each once");
}

#[test]
fn a_context_that_is_gone_takes_its_blocks_along() {
    check(
        "open t; alloc a 10 in 1; alloc b 20 in 2; alloc c 5 vmm; gone 1; free a; untracked; read t = 25 10 untracked=1; gone 3",
    );
    let mut ledger = check("open t @1; alloc a 10 in 1; alloc b 1 in 1; alloc d @1 40 in 2; gone 1; close t = 40 0");
    assert_eq!(ledger.counts().gone, 2);
}

#[test]
fn a_free_that_fails_leaves_the_block_with_whoever_allocated_it() {
    check("open t of 2; alloc a 10 %2; free a %3; free_failed %3; read t = 10 0; free a; close t = 0 10");
    check("open t of 3; alloc a 10 %2; free a %3; free_failed %3; close t = 0 0");
    check(
        "open t; alloc a 1; alloc b 2; free a %2; free b %3; free_failed %2; read t = 1 2; free_failed %2; free_failed; close t = 1 2",
    );
    check("open t; free x 10; free_failed; read t = 0 0; free y; found 7; free_failed; close t = 0 0 untracked=0");
    check("open t; free x; free_failed; free x; untracked; free_failed; close t = 0 0 untracked=0");
}

#[test]
fn a_scope_of_one_thread_counts_what_that_thread_allocated() {
    check("open t of 2; alloc a 10; alloc b 20 %2; alloc c 40 %3; free a %2; close t = 20 0");
    check("open t of 2; alloc b 20 %2; free b %1; close t = 0 20");
    check("alloc b 20 %2; open t of 2; free b %1; alloc c 5 %2; close t = -15 0");
    check("open p; open t of 1; open u of 2; alloc a 1; alloc b 2 %2; close t = 1 0; close u = 2 0; close p = 3 0");
    check(
        "open t of 2; open u of 2; alloc a 7 %2; close t = 7 0; free a %2; close u = 0 7; open v of 2; close v = 0 0",
    );
    check("open t of 2 @1; alloc a 7 %2; alloc b 9 @1 %2; reset t = 9 0; free b; close t = -9 0");
}

#[test]
fn an_address_given_out_again_without_a_free() {
    check("open t; alloc a 10; alloc a 30; read t = 30 0; free a; close t = 0 30");
}

#[test]
fn samples_move_sampled_scopes_only() {
    check("sample 100; open t sampled; sample 300; sample 150; close t = 50 150 readings=3 gap=2");
    check("sample 100; open t; sample 300; close t = 0 0");
    check("sample 100; open t sampled; alloc a 10; sample 100; close t = 0 0 readings=2");
}

#[test]
fn a_peak_is_never_negative_even_when_the_sampler_missed_the_growth() {
    check("sample 0; open t sampled; sample 300; close t = 300 0");
}

#[test]
fn each_sampled_scope_knows_its_own_gaps_and_readings() {
    check(
        "sample 1; open a sampled; unread; unread; unread; sample 1; open b sampled; sample 1
         close b = 0 0 readings=2 gap=2; sample 1; close a = 0 0 readings=4 gap=5",
    );
}

#[test]
fn a_failed_reading_keeps_the_last_good_figures_and_says_so() {
    check("sample 10; open t sampled; sample 40; unread; read t = 30 0 stale; sample 20; close t = 10 20");
    check("sample 10; open t sampled; unread; close t = 0 0 stale readings=1");
}

#[test]
fn a_scope_that_began_unread_is_never_a_number() {
    check(
        "sample 10; open t sampled; unread; reset t = 0 0 stale; sample 40; read t = 30 0 stale; reset t = 30 0 stale; sample 50; close t = 10 0",
    );
}

#[test]
fn a_mark_is_a_peak_of_all_open_scopes_of_the_pool_and_of_no_later_one() {
    check("marks 90 10; open t pool; marks 50 20; read t = 10 30; marks 20 10; close t = 0 40");
    check(
        "marks 0 0; open o pool; marks 40 10; open i pool; marks 15 10; close i = 0 5; marks 10 5; reset o = 5 35
         marks 5 5; close o = 0 0",
    );
    // In use may have grown after the mark was read.
    check("marks 0 0; open t pool; marks 10 30; read t = 30 0; marks 30 0; close t = 0 30");
    check(
        "marks 9 9 @1; open t pool @1; marks 7 7; alloc a @1 5; sample @1 5; open e @1; close t = 0 0; close e = 0 0",
    );
}

#[test]
fn marks_that_could_not_be_read() {
    check("marks 10 10; open t pool; marks 40 20; unread pool; read t = 10 20 stale; marks 20 20; close t = 10 20");
    check(
        "marks 10 10; open t pool; open s sampled; unread pool; close s = 0 0; reset t = 0 0 stale; marks 30 30; close t = 20 0 stale",
    );
    check("marks 1 1; open t pool; free x; close t = 0 0 untracked=0");
}

#[test]
fn each_path_of_scopes_knows_what_it_holds() {
    check(
        "open a; alloc x 10; open b; alloc y 20; free y; alloc z 5; close b = 5 15; tree /a/b = 1 5 20 30 25 2
         close a = 15 15; tree /a = 1 15 30 30 10 1; tree / = 0 15 30 0 0 0; free x; free z; tree /a = 1 0 30 30 10 1",
    );
    check("alloc w 100; open a; alloc x 10; close a = 10 0; tree /a = 1 10 10 110 10 1; tree / = 0 110 110 0 100 1");
    check("open a; alloc x 1; close a = 1 0; open a.2; alloc y 2; tree /a = 2 3 3 3 3 2; close a.2 = 2 0");
    check(
        "open a; open a.2; alloc x 4; close a.2 = 4 0; close a = 4 0; tree /a/a = 1 4 4 4 4 1; tree /a = 1 4 4 4 0 0",
    );
    // Of other threads only what they were handed.
    check(
        "open a; alloc x 4 %2; tree /a = 1 0 0 4 0 0; enter a %2; alloc y 2 %2; tree /a = 1 2 2 6 2 1; close a = 6 0",
    );
    check("open a; open b %2; alloc x 1 %2; tree /b = 1 1 1 1 1 1; close b %2 = 1 0; close a = 1 0");
    // A peak is of one moment: runs of events from several paths, between each other.
    check(
        "open a; open b; alloc x 8; open c %2; alloc y 1 %2; free x; alloc z 3 %2; free y; alloc v 6
         tree /a/b = 1 6 8 9 14 2; tree /a = 1 6 8 9 0 0; tree /c = 1 3 4 9 4 2; tree / = 0 9 9 0 0 0",
    );
    // What the scope allocates on another device has the same path there.
    check("open a; open b; alloc x @1 7; close b = 0 0; tree /a/b @1 = 0 7 7 0 7 1; tree /a @1 = 0 7 7 0 0 0");
    check("open a; alloc x 7; free x %2; free_failed %2; tree /a = 1 7 7 7 7 1");
    check("open a; alloc x 7 in 1; gone 1; tree /a = 1 0 7 7 7 1");
    check("open a sampled; alloc x 7; close a = 0 0 ; tree /a = 1 7 7 7 7 1");
    // As its traces, of what is on the device for certain.
    check("open a; alloc x 1 managed; alloc y 2 pinned; alloc z 4; free x; tree /a = 1 4 4 4 4 1; close a = 4 0");
}

#[test]
fn a_thread_is_in_the_scope_that_it_entered_last_and_not_left() {
    check("open a; open b; leave a; alloc x 1; leave b; alloc y 2; tree /a/b = 1 1 1 3 1 1; tree / = 0 3 3 0 2 1");
    check("open a; close a = 0 0; enter a; alloc x 1; leave a; leave a; tree / = 0 1 1 0 1 1");
    check("open a; enter a %2; open b %2; alloc x 1 %2; close b %3 = 1 0; alloc y 2 %2; tree /a = 1 3 3 3 2 1");
    check("open a; leave a; alloc x 1; enter a; alloc y 2; leave a; alloc z 4; close a = 7 0; tree /a = 1 2 2 7 2 1");
    check("open a; enter a; close a = 0 0; alloc x 1; leave a; alloc y 2; tree /a = 1 1 1 0 1 1");
    check("open a; leave a; enter a; close a %2 = 0 0; alloc x 1; leave a; alloc y 2; tree /a = 1 1 1 0 1 1");
}

#[test]
fn a_scope_of_one_thread_counts_what_it_is_handed_to() {
    check(
        "open t of 1; enter t %2; alloc a 10 %2; leave t %2; alloc b 20 %2; read t = 10 0; free a %3; close t = 0 10",
    );
    check("open t of 1; enter t %2; open u of 2 %2; alloc a 1 %2; alloc b 2; close u = 1 0; close t = 3 0");
    // Its own blocks, on whoever's behalf, and whoever frees them.
    check(
        "alloc o 8 %2; open t of 1; enter t %2; alloc h 4 %2; open u of 2 %2; free o %3; free h; alloc a 1 %2; inside u = 1
         close u = -11 0; inside t = 1; close t = 1 3",
    );
    // Handed on, and back.
    check(
        "open t of 1; enter t %2; open u of 2 %2; enter u %3; alloc a 1 %3; alloc b 2 %2; alloc c 4; enter u; alloc d 8
         inside t = 1 2 4 8; inside u = 1 2 8; free a; close u = 10 1; close t = 14 1",
    );
    check("open u of 2 %2; open t; enter t %2; alloc a 1 %2; leave t %2; close t = 1 0; free a; close u %2 = 0 1");
}

#[test]
fn a_trace_that_overlaps_another_threads_says_so() {
    check("open a; open b; alloc x 1; close b = 1 0 alone; close a = 1 0 alone");
    check("open a; open b %2; close b %2 = 0 0 overlapped; close a = 0 0 overlapped");
    check("open a; close a = 0 0 alone; open b %2; close b %2 = 0 0 alone; open a.2; close a.2 = 0 0 alone");
    check("open a; open b %2; read a = 0 0 overlapped; close a = 0 0 overlapped; close b %2 = 0 0 overlapped");
    // On the device, by any gauge.
    check("open a; open b @1 %2; close b %2 = 0 0 alone; close a = 0 0 alone");
    check("sample 10; open a; open b sampled %2; close b %2 = 0 0 overlapped; close a = 0 0 overlapped");
    // Since the reset.
    check(
        "open a; open b %2; close b %2 = 0 0 overlapped; reset a = 0 0 overlapped; read a = 0 0 alone; close a = 0 0 alone",
    );
    check("open a; open b %2; reset a = 0 0 overlapped; close b %2 = 0 0 overlapped; close a = 0 0 overlapped");
    // The newest of several threads is the trace's own.
    check("open a; open b %2; close b %2 = 0 0 overlapped; open c; close c = 0 0 alone; close a = 0 0 overlapped");
    check(
        "open b %2; open c %3; open a; reset a = 0 0 overlapped; close c = 0 0 overlapped; close b = 0 0 overlapped; close a = 0 0 overlapped",
    );
    // One that counts a thread alone includes nothing of others.
    check("open a of 1; open b %2; alloc x 1 %2; close b %2 = 1 0 overlapped; close a = 0 0 alone");
    check("open a; open b of 2 %2; close b %2 = 0 0 alone; close a = 0 0 overlapped");
    // Whoever closes it.
    check("open a; close a %2 = 0 0 alone; open b; close b %3 = 0 0 alone");
}

#[test]
fn guests_whose_blocks_are_freed_are_forgotten() {
    let mut runner = Runner::default();
    runner.line("open t of 1");
    for round in 0..20_000_u32 {
        let thread = ThreadId(2 + round % 7);
        if round >= 7 {
            runner.ledger.begin_thread(thread);
        }
        let key = Key::new(Space::Address, u64::from(round) << 9);
        runner.post(&EventKind::Enter { scope: ScopeId(1) }, thread);
        let block = Block::new(Device { family: Family::Cuda, ordinal: 0 }, Bytes::mib(1), MemKind::Device);
        runner.post(&EventKind::Alloc { key, block }, thread);
        runner.post(&EventKind::Leave { scope: ScopeId(1) }, thread);
        // One in a hundred stays.
        if round % 100 > 0 {
            runner.post(&EventKind::Free { key, block: None }, thread);
        }
        // Those of 200 blocks, and what came during a look; twice that before the next look begins, and what comes during it.
        assert!(runner.ledger.guests.len() < 2 * (200 + 10) + 10, "round {round}");
    }
    runner.line("read t = 200 1");
    assert_eq!(runner.ledger.guests.len(), runner.ledger.guests.owners());
}

/// Threads that enter the scope `t`, until some are forgotten.
fn guests_of_t(runner: &mut Runner, count: usize) {
    for _ in 0..count {
        runner.ledger.begin_thread(ThreadId(9));
        runner.line("enter t %9");
        runner.line("leave t %9");
    }
}

#[test]
fn more_than_can_be_told_was_allocated_in_all() {
    let mut runner = Runner::default();
    for _ in 0..40 {
        // 2^60 bytes.
        "alloc x 1099511627776; free x".split(';').for_each(|line| runner.line(line));
        assert!(!runner.ledger.nodes().is_empty());
    }
    let stat = runner.ledger.stats()[0].on_device;
    assert_eq!((stat.bytes.allocated, stat.bytes.freed(), stat.blocks.allocated), (u64::MAX, u64::MAX, 40));
    // Without a question in between.
    (0..40).for_each(|_| "alloc x 1099511627776; free x".split(';').for_each(|line| runner.line(line)));
}

/// After 2^32 threads and guests.
#[test]
fn the_last_strand_leads_to_nobody() {
    let mut runner = Runner::default();
    runner.line("alloc w 1 %2");
    runner.ledger.owners = OwnerThread::LAST.0;
    "open t of 3 %3; enter t %2; alloc x 5 %2; leave t %2; enter t %2; alloc y 5 %2; read t = 10 0; free x; close t = 5 5"
        .split(';')
        .for_each(|line| runner.line(line));
}

#[test]
fn a_scope_that_a_guest_opened_knows_its_hosts_when_the_guest_has_ended() {
    let mut runner = Runner::default();
    "open t of 1; enter t %2; open s %2".split(';').for_each(|line| runner.line(line));
    runner.ledger.begin_thread(ThreadId(2));
    guests_of_t(&mut runner, 100);
    "enter s %3; alloc x 5 %3; read t = 5 0".split(';').for_each(|line| runner.line(line));
}

#[test]
fn a_block_whose_free_fails_again_and_again_knows_its_hosts() {
    let mut runner = Runner::default();
    "open t of 1; enter t %2; alloc x 1 %2; leave t %2".split(';').for_each(|line| runner.line(line));
    for round in 0..200 {
        runner.line("free x %2");
        runner.line("read t = 0 1");
        guests_of_t(&mut runner, round % 13);
        runner.line("free_failed %2");
        guests_of_t(&mut runner, round % 7);
        runner.line("read t = 1 0");
    }
}

#[test]
fn what_is_still_there_of_a_scope() {
    check(
        "alloc w 1; open a; alloc x 10; alloc y 20 %2; inside a = 10; open b; alloc z 30 @1; inside a = 10 30; inside b = 30",
    );
    check("open a; alloc x 10; close a = 10 0; open a.2; alloc y 5; inside a.2 = 5; free y; inside a.2 = none");
    check("open a; open a.2 %2; alloc x 1; alloc y 2 %2; inside a = 1; inside a.2 = 2");
    let rivals: Vec<_> = (0..2000).map(|block| format!("alloc {block} 1;")).collect();
    let all = vec!["1"; 2000].join(" ");
    check(&format!("open a; {} inside a = {all}", rivals.concat()));
}

#[test]
fn deep_and_many_scopes_are_counted_together() {
    let mut runner = Runner::default();
    for scope in 0..100 {
        runner.line(&format!("open {scope}"));
    }
    for line in ["alloc x 1", "inside 0 = 1", "inside 63 = 1", "inside 99 = 1"] {
        runner.line(line);
    }
    let nodes = runner.ledger.nodes();
    assert_eq!(nodes.len(), 2 + 64 + 1);
    let others = nodes.iter().find(|(_, node)| node.callsite == CallsiteId::OTHERS).unwrap().1;
    assert_eq!((others.allocations, others.calls), (1, 36));
    assert!(nodes[1..].iter().all(|(_, node)| node.in_use == 1 << 20), "all scopes around it hold it");
}

#[test]
fn the_peak_of_the_whole_process_outlives_a_reset_of_statistics() {
    check("alloc a 5; free a; reset-peaks; alloc b 2; tree / = 0 2 5 0 7 2; reset-peaks; tree / = 0 2 5 0 7 2");
    check("alloc a 5; free a; reset-peaks; alloc b 9; tree / = 0 9 9 0 14 2");
}

#[test]
fn statistics_are_those_of_an_allocator() {
    let mut ledger =
        check("alloc a 4; alloc b 8 pool; free a; alloc c 2; alloc d 16 managed; reset-peaks; free b; alloc e 1 pool");
    let [stats] = ledger.stats()[..] else { panic!("one device") };
    let figures = |stat: Stat| {
        let of = |count: Count, unit: u64| {
            (count.current / unit, count.peak / unit, count.allocated / unit, count.freed() / unit)
        };
        (of(stat.bytes, 1 << 20), of(stat.blocks, 1))
    };
    assert_eq!(figures(stats.on_device), ((3, 10, 15, 12), (2, 2, 4, 2)));
    assert_eq!(figures(stats.kinds[MemKind::Device as usize]), ((2, 2, 6, 4), (1, 1, 2, 1)));
    assert_eq!(figures(stats.kinds[MemKind::Pool as usize]), ((1, 8, 9, 8), (1, 1, 2, 1)));
    assert_eq!(figures(stats.kinds[MemKind::Managed as usize]), ((16, 16, 16, 0), (1, 1, 1, 0)));
}

#[test]
fn an_origin_of_which_something_is_live_is_kept_though_it_came_last() {
    let mut ledger = Ledger::default();
    let device = Device { family: Family::Cuda, ordinal: 0 };
    for number in 1..5000 {
        // Each has a stack of its own.
        let stack = StackId(u32::try_from(number).unwrap());
        let tag = Tag::new(device, MemKind::Device, 0, stack);
        ledger.alloc(Key::new(Space::Address, number), Bytes::new(1), tag, number, ThreadId(1));
    }
    let blocks: Vec<_> = ledger.groups().iter().map(|live| live.blocks).collect();
    assert!(blocks.len() == 4999 && blocks.iter().all(|blocks| *blocks == 1), "{} groups", blocks.len());
}

#[test]
fn origins_of_which_nothing_is_live_are_forgotten() {
    let mut runner = Runner::default();
    runner.line("alloc kept 1");
    for thread in 1..20_000 {
        runner.line(&format!("alloc x 1 %{thread}"));
        runner.line(&format!("free x %{thread}"));
    }
    runner.line("free_failed %19999");
    runner.line("free x");
    runner.line("free kept");
    assert!(runner.ledger.groups().is_empty());
    assert_eq!(runner.ledger.stats()[0].on_device.bytes.current, 0);
    assert_eq!(runner.ledger.counts().untracked, 0);
}

/// A thread does not look again for the group of its newest allocation.
#[test]
fn the_origin_that_a_thread_used_last_is_not_forgotten() {
    let mut ledger = Ledger::default();
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let alloc = |ledger: &mut Ledger, name: u64, stack: u32, thread: u32| {
        let (key, tag) = (Key::new(Space::Address, name), Tag::new(device, MemKind::Device, 0, StackId(stack)));
        // Of what was live at the highest peak, groups are kept as well: that comes later.
        ledger.alloc(key, Bytes::new(stack.into()), tag, 1, ThreadId(thread));
        key
    };
    // Of what thread 2 freed last, the group is kept as well; that is another one.
    let (other, newest) = (alloc(&mut ledger, 1, 2, 2), alloc(&mut ledger, 2, 1, 2));
    ledger.free(newest, None, ThreadId(2));
    ledger.free(other, None, ThreadId(2));
    for stack in 3..20_000 {
        let key = alloc(&mut ledger, 3, stack, 1);
        ledger.free(key, None, ThreadId(1));
    }
    let key = alloc(&mut ledger, 4, 1, 2);
    assert_eq!(ledger.block(key).map(|held| held.group.stack), Some(StackId(1)));
}

/// Each time a few of all are looked at, since others wait; still there are never many more than are needed.
#[test]
fn origins_are_forgotten_in_parts() {
    let (kept, all) = if cfg!(miri) { (10, 100) } else { (6_000, 60_000) };
    let mut ledger = Ledger::default();
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let mut most = 0;
    for number in 1..all {
        let tag = Tag::new(device, MemKind::Device, 0, StackId(number));
        // Some stay, of each part of the numbers.
        let (key, stays) = (Key::new(Space::Address, number.into()), number.is_multiple_of(all / kept));
        ledger.alloc(key, Bytes::new(1), tag, number.into(), ThreadId(1));
        if !stays {
            ledger.free(key, None, ThreadId(1));
        }
        most = ledger.groups.numbers().max(most);
    }
    let live: Vec<_> = ledger.groups().iter().map(|live| live.group.stack.0).collect();
    assert_eq!(live.len(), all as usize / (all / kept) as usize - 1);
    assert!(live.iter().all(|stack| stack.is_multiple_of(all / kept)));
    assert!(most < 3 * kept as usize + 5_000, "{most} numbers");
}

/// The obvious way: each path keeps a sum and a maximum, and every event walks up.
#[test]
fn the_tree_agrees_with_the_obvious_way() {
    for seed in 1..60_u64 {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        let mut runner = Runner::default();
        let mut stacks = vec![Vec::<String>::new(); 3];
        let mut figures: HashMap<String, (i64, i64)> = HashMap::new();
        let mut blocks: Vec<(String, String, i64)> = Vec::new();
        let mut change = |path: &str, by: i64| {
            for end in path.match_indices('/').map(|(at, _)| at).chain([path.len()]).filter(|end| *end > 0) {
                let (sum, most) = figures.entry(path[..end].to_owned()).or_default();
                *sum += by;
                *most = (*most).max(*sum);
            }
        };
        for step in 0..300 {
            let thread = random(3);
            match random(5) {
                0 => {
                    let scope = format!("{}.{step}", ["a", "b", "c"][random(3)]);
                    runner.line(&format!("open {scope} %{}", thread + 1));
                    stacks[thread].push(scope);
                }
                1 => {
                    if let Some(scope) = stacks[thread].pop() {
                        let closed = EventKind::Close { scope: ScopeId(runner.id(&scope)) };
                        runner.post(&closed, ThreadId(u32::try_from(thread).unwrap() + 1));
                    }
                }
                2 if !blocks.is_empty() => {
                    let (block, path, size) = blocks.swap_remove(random(blocks.len()));
                    runner.line(&format!("free {block} %{}", thread + 1));
                    change(&path, -size);
                }
                _ => {
                    let size = i64::try_from(random(50)).unwrap();
                    let scopes = stacks[thread].iter().map(|scope| scope.split('.').next().unwrap());
                    let path = scopes.fold(String::new(), |path, scope| path + "/" + scope);
                    runner.line(&format!("alloc {step} {size} %{}", thread + 1));
                    change(&path, size);
                    blocks.push((step.to_string(), path, size));
                }
            }
        }
        for (path, (sum, most)) in &figures {
            let told = runner.tree(path, 0).expect(path);
            let told: Vec<i64> = told.split(' ').map(|word| word.parse().unwrap()).collect();
            assert_eq!((told[1], told[2]), (*sum, *most), "seed {seed}, {path}");
        }
    }
}

#[test]
fn lost_events_are_told_to_the_scopes_that_were_open() {
    check("open a; lost 3; open b; lost 1; close b = 0 0 lost=1; close a = 0 0 lost=4");
    // What disturbs a pool's mark disturbs nobody else.
    check(
        "open a; open p pool; marks-lost; open q pool; read q = 0 0 lost=0; read p = 0 0 lost=1; close a = 0 0 lost=0",
    );
    check("open p pool; open o @1 pool; lost 1; marks-lost @1; close p = 0 0 lost=0; close o = 0 0 lost=1");
}

#[test]
fn nothing_is_left_behind() {
    let ledger = check("open a; open b; alloc x 1; alloc y 2; free y; close a = 1 2; close b = 1 2; free x");
    assert!(ledger.scopes.is_empty());
    let ledger = check("open a of 1; open b of 1; open c of 2; close a = 0 0; close c = 0 0; close b = 0 0");
    assert!(ledger.locals.is_empty());
}

/// RMM's rule for counters that nest (`statistics_resource_adaptor`): a closed inner counter is folded into the outer
/// one by `peak = max(peak, value + inner.peak)`. An independent oracle for scopes that nest.
#[test]
fn nested_scopes_agree_with_the_merge_rule_of_rmm() {
    #[derive(Clone, Copy, Default)]
    struct Counter {
        value: i64,
        peak: i64,
    }
    for seed in 1..if cfg!(miri) { 5 } else { 300_u64 } {
        let mut random = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut ledger = Ledger::default();
        let mut number = 0;
        let mut apply = |kind| {
            number += 1;
            ledger.apply(&Event { number, time: Duration::from_nanos(number), thread: ThreadId(1), kind: &kind });
            ledger.last_trace()
        };
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let mut stack: Vec<(ScopeId, Counter)> = Vec::new();
        let mut blocks: Vec<(u64, i64)> = Vec::new();
        for step in 1..400_u64 {
            match random(6) {
                0 => {
                    let scope = ScopeId(step);
                    let spec = ScopeSpec {
                        device,
                        gauge: Gauge::Exact,
                        every: Duration::ZERO,
                        thread: None,
                        callsite: CallsiteId::NONE,
                        source: crate::model::Source::Dispatch,
                        at_peak: false,
                    };
                    apply(EventKind::Open { scope, spec });
                    stack.push((scope, Counter::default()));
                }
                1 => {
                    if let Some((scope, inner)) = stack.pop() {
                        let trace = apply(EventKind::Close { scope }).expect("it is open");
                        assert_eq!(trace.used.get(), inner.value, "seed {seed}");
                        assert_eq!(trace.peak_over_start().get().cast_signed(), inner.peak, "seed {seed}");
                        if let Some((_, outer)) = stack.last_mut() {
                            outer.peak = outer.peak.max(outer.value + inner.peak);
                            outer.value += inner.value;
                        }
                    }
                }
                2 | 3 if !blocks.is_empty() => {
                    let at = usize::try_from(random(blocks.len() as u64)).unwrap();
                    let (address, bytes) = blocks.swap_remove(at);
                    apply(EventKind::Free { key: Key::new(Space::Address, address), block: None });
                    if let Some((_, top)) = stack.last_mut() {
                        top.value -= bytes;
                    }
                }
                _ => {
                    let bytes = random(1000).cast_signed();
                    let block = Block::new(device, Bytes::new(bytes.unsigned_abs()), MemKind::Device);
                    apply(EventKind::Alloc { key: Key::new(Space::Address, step), block });
                    blocks.push((step, bytes));
                    if let Some((_, top)) = stack.last_mut() {
                        top.value += bytes;
                        top.peak = top.peak.max(top.value);
                    }
                }
            }
        }
    }
}

/// One loss does not slow what comes after the blocks of that time are gone; displaced functions do while they are.
#[test]
fn doubt_ends() {
    let is_doubtful = |script: &str| check(script).live.is_doubtful();
    assert!(!is_doubtful("alloc a 1"));
    assert!(!is_doubtful("lost 1; alloc a 1"));
    assert!(is_doubtful("alloc a 1; lost 1; alloc b 1"));
    assert!(!is_doubtful("alloc a 1; lost 1; alloc b 1; free a"));
    assert!(!is_doubtful("alloc a 1; lost 1; alloc a 2; alloc b 1"));
    assert!(is_doubtful("alloc a 1; displaced 1 1; alloc a 2; lost 0"));
    assert!(is_doubtful("alloc a 1; displaced 1 1; displaced 0 0"));
    assert!(!is_doubtful("alloc a 1; displaced 1 1; displaced 0 0; free a; alloc b 1"));
}

/// In the order in which they were opened. Steps that grow with the number of scopes would be 10^10 here.
#[test]
fn closing_the_oldest_of_many_scopes_looks_at_few_of_them() {
    let scopes = if cfg!(miri) { 100 } else { 100_000 };
    let mut runner = Runner::default();
    for scope in 0..scopes {
        runner.line(&format!("open s.{scope}"));
    }
    runner.line("alloc a 1");
    for scope in 0..scopes {
        runner.line(&format!("close s.{scope} = 1 0"));
    }
    assert!(runner.ledger.thread(ThreadId(1)).entered.is_empty());
}

/// Nothing is cut off a number of events, nor off a block's size.
#[test]
fn numbers_and_sizes_are_kept_whole() {
    for before in [0, (1 << 32) - 8, 1 << 33, (1 << 48) - 64] {
        let mut runner = Runner { number: before, ..Runner::default() };
        for line in ["open o", "alloc a 1", "open t", "alloc b 2", "inside t = 2", "inside o = 1 2"] {
            runner.line(line);
        }
        runner.number += 16;
        for line in ["open late", "alloc c 4", "inside late = 4", "inside t = 2 4", "inside o = 1 2 4"] {
            runner.line(line);
        }
        let key = runner.key("c");
        let block = runner.ledger.block(key).expect("it is live");
        assert_eq!(block.number, runner.number);
    }
    for bits in [32, 48, 50, 62] {
        let mut runner = Runner::default();
        let huge = Bytes::new((1 << bits) + 1);
        let key = runner.key("x");
        runner.line("open t");
        let alloc = runner.alloc("x", Device { family: Family::Cuda, ordinal: 0 }, huge, MemKind::Device);
        runner.post(&alloc, ThreadId(1));
        assert_eq!(runner.ledger.block(key).map(|block| block.bytes), Some(huge));
        // Out of the front cache and back.
        runner.line("lost 1");
        assert_eq!(runner.ledger.block(key).map(|block| block.bytes), Some(huge));
        assert_eq!(runner.ledger.groups()[0].bytes, huge);
        runner.line("free x");
        let close = EventKind::Close { scope: ScopeId(runner.id("t")) };
        let trace = runner.post(&close, ThreadId(1)).expect("it is open");
        assert_eq!((trace.used.get(), trace.peaked), (0, huge));
    }
}

/// A difference without a sign would make a high peak of it.
#[test]
fn a_peak_below_what_was_in_use_is_no_peak() {
    assert_eq!((above(10, 10), above(11, 10), above(-10, -30)), (Some(0), Some(1), Some(20)));
    assert_eq!((above(9, 10), above(i64::MIN, 1), above(i64::MAX, -1)), (None, None, None));
}

/// A block as the obvious way has it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plain {
    owner: PlainStrand,
    number: u64,
    bytes: u64,
    block: Block,
}

/// The threads on whose behalf something is allocated, from the first to the one that does it, and all of them as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlainStrand {
    first: u32,
    all: u32,
}

impl PlainStrand {
    fn own(thread: ThreadId) -> Self {
        Self { first: thread.0, all: 1 << thread.0 }
    }

    fn with(self, thread: ThreadId) -> Self {
        Self { all: self.all | 1 << thread.0, ..self }
    }
}

/// What the obvious way knows of a scope: what it looks at, where it began in the history, and on whose behalf it was opened.
struct PlainScope {
    device: usize,
    of_thread: Option<u32>,
    began: usize,
    owner: PlainStrand,
    opener: usize,
    /// Of the event that it began with.
    number: u64,
}

/// The obvious way: all that ever was in use is kept, and each question looks at all of it.
#[test]
#[allow(clippy::too_many_lines, reason = "it is a list of what may happen")]
fn everything_agrees_with_the_obvious_way() {
    const THREADS: usize = 4;
    for seed in 1..if cfg!(miri) { 2 } else { 40_u64 } {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        // Some go on until groups are forgotten.
        let (stacks, steps) = if seed % 20 == 19 { (9000, 30_000) } else { ([1, 3, 50][random(3)], 1000) };
        let mut runner = Runner::default();
        let devices = [0, 1].map(|ordinal| Device { family: Family::Cuda, ordinal });
        let is_displaced = seed % 2 == 0;
        if is_displaced {
            runner.post(&EventKind::Displaced { now: 1, more: 1 }, ThreadId(1));
        }
        let mut live: HashMap<u64, Plain> = HashMap::new();
        // The block, or the number of the event that said that nobody knows it.
        let mut freed: [Option<(u64, std::result::Result<Plain, u64>)>; THREADS] = [None; THREADS];
        // The numbers of these events.
        let mut untracked: Vec<u64> = Vec::new();
        // Of the process and of each thread, on both devices.
        let mut history = vec![[[0_i64; 2]; THREADS + 1]];
        let mut scopes: HashMap<u64, PlainScope> = HashMap::new();
        let mut entered: [Vec<(u64, PlainStrand, bool)>; THREADS] = Default::default();
        let (mut heard, mut allocated, mut next_scope) = (0, 0, 1000);
        let change = |history: &mut Vec<[[i64; 2]; THREADS + 1]>, plain: &Plain, sign: i64| {
            let mut now = *history.last().unwrap();
            let device = plain.block.device.ordinal as usize;
            if plain.block.kind.is_on_device() {
                for at in (0..=THREADS).filter(|at| *at == 0 || plain.owner.all & 1 << at > 0) {
                    now[at][device] += sign * plain.bytes.cast_signed();
                }
            }
            history.push(now);
        };
        for step in 0..if cfg!(miri) { 200 } else { steps } {
            let thread = random(THREADS);
            let id = ThreadId(u32::try_from(thread).unwrap() + 1);
            let owner = entered[thread].last().map_or(PlainStrand::own(id), |(_, owner, _)| *owner);
            match random(14) {
                0..4 => {
                    let name = random(600) as u64 * 512;
                    let kind = MemKind::ALL[random(5)];
                    let bytes = random(1000) as u64;
                    let stack = StackId(u32::try_from(random(stacks)).unwrap());
                    let context = u8::try_from(random(3)).unwrap();
                    let block = Block { context, stack, ..Block::new(devices[random(2)], Bytes::new(bytes), kind) };
                    if let Some(missed) = live.remove(&name) {
                        change(&mut history, &missed, -1);
                        // After this fact, or while functions are displaced, an allocation at an address that is in use first gives
                        // back the block whose free was missed.
                        if !is_displaced {
                            runner.post(&EventKind::Lost { count: 1 }, id);
                        }
                    }
                    runner.post(&EventKind::Alloc { key: Key::new(Space::Address, name), block }, id);
                    let plain = Plain { owner, number: runner.number, bytes, block };
                    live.insert(name, plain);
                    change(&mut history, &plain, 1);
                    heard += 1;
                    allocated += u64::from(kind.is_on_device());
                }
                4..7 => {
                    let mut names: Vec<u64> = live.keys().copied().collect();
                    names.sort_unstable();
                    let is_known = !names.is_empty() && random(8) > 0;
                    let name = if is_known { names[random(names.len())] } else { 1 << 40 };
                    runner.post(&EventKind::Free { key: Key::new(Space::Address, name), block: None }, id);
                    let taken = live.remove(&name);
                    if let Some(taken) = &taken {
                        change(&mut history, taken, -1);
                    }
                    if taken.is_none() {
                        runner.post(&EventKind::Untracked, id);
                        untracked.push(runner.number);
                    }
                    freed[thread] = Some((name, taken.ok_or(runner.number)));
                    heard += 1;
                }
                7 => {
                    // Nobody was given the block's name meanwhile: the driver has not had it back.
                    if let Some((name, block)) = freed[thread].filter(|(name, _)| !live.contains_key(name)) {
                        runner.post(&EventKind::FreeFailed, id);
                        freed[thread] = None;
                        match block {
                            Ok(block) => {
                                live.insert(name, block);
                                change(&mut history, &block, 1);
                            }
                            Err(number) => untracked.retain(|untracked| *untracked != number),
                        }
                        heard -= 1;
                    }
                }
                8 if random(6) == 0 => {
                    let context = u8::try_from(1 + random(2)).unwrap();
                    runner.post(&EventKind::ContextDestroyed { context }, id);
                    // In one step: nobody is told between two of them.
                    live.retain(|_, plain| {
                        let is_gone = plain.block.context == context;
                        if is_gone {
                            change(&mut history, plain, -1);
                        }
                        !is_gone
                    });
                }
                9 => {
                    let device = random(2);
                    let of_thread = (random(2) == 0).then_some(id);
                    let spec = ScopeSpec {
                        device: devices[device],
                        gauge: Gauge::Exact,
                        every: Duration::ZERO,
                        thread: of_thread,
                        callsite: CallsiteId(2 + u32::try_from(random(3)).unwrap()),
                        source: crate::model::Source::Dispatch,
                        at_peak: false,
                    };
                    next_scope += 1;
                    runner.post(&EventKind::Open { scope: ScopeId(next_scope), spec }, id);
                    let (began, of_thread) = (history.len() - 1, of_thread.map(|thread| thread.0));
                    let number = runner.number;
                    let scope = PlainScope { device, of_thread, began, owner, opener: thread, number };
                    scopes.insert(next_scope, scope);
                    entered[thread].push((next_scope, owner, true));
                }
                10 => {
                    let Some((scope, open)) = scopes.iter().min_by_key(|(scope, _)| *scope ^ step) else { continue };
                    entered[thread].push((*scope, open.owner.with(id), false));
                    runner.post(&EventKind::Enter { scope: ScopeId(*scope) }, id);
                }
                11 => {
                    let Some(at) = entered[thread].iter().rposition(|(.., by_opening)| !by_opening) else { continue };
                    let (scope, ..) = entered[thread].remove(at);
                    runner.post(&EventKind::Leave { scope: ScopeId(scope) }, id);
                }
                _ => {
                    let Some(scope) = scopes.keys().min_by_key(|scope| **scope ^ step).copied() else { continue };
                    let question =
                        [EventKind::Read { scope: ScopeId(scope) }, EventKind::Reset { scope: ScopeId(scope) }];
                    let how = random(4);
                    let close = EventKind::Close { scope: ScopeId(scope) };
                    let told = runner.post(question.get(how).unwrap_or(&close), id).expect("it is open");
                    let open = scopes.get_mut(&scope).unwrap();
                    let of = |moment: &[[i64; 2]; THREADS + 1]| {
                        moment[open.of_thread.map_or(0, |thread| thread as usize)][open.device]
                    };
                    let seen = &history[open.began..];
                    let (start, end) = (of(&seen[0]), of(seen.last().unwrap()));
                    let most = seen.iter().map(of).max().unwrap();
                    let missed = untracked.iter().filter(|number| **number > open.number).count() as u64;
                    let expected = (end - start, most.abs_diff(start.max(end)), missed);
                    let told = (told.used.get(), told.peaked.get(), told.untracked);
                    assert_eq!(told, expected, "seed {seed}, step {step}, scope {scope}");
                    if how == 1 {
                        (open.began, open.number) = (history.len() - 1, runner.number);
                    } else if how > 1 {
                        let opener = &mut entered[open.opener];
                        opener.retain(|(of, _, by_opening)| (*of, *by_opening) != (scope, true));
                        scopes.remove(&scope);
                    }
                }
            }
            if step % 50 == 0 {
                let counts = runner.ledger.counts();
                assert_eq!(
                    (counts.heard, counts.untracked),
                    (heard, untracked.len() as u64),
                    "seed {seed}, step {step}"
                );
                let mut told: Vec<_> = (0..PARTS).flat_map(|part| runner.ledger.blocks(part, None)).collect();
                told.sort_by_key(|held| held.number);
                let told = told.iter().map(|held| {
                    let KnownBlock { group: AllocGroup { stack, kind, context, .. }, device, bytes, .. } = *held;
                    let block = Block { device, bytes, kind, context, stack };
                    (held.key.get(), held.thread.0, held.number, bytes.get(), block)
                });
                let plain =
                    |(name, plain): (&u64, &Plain)| (*name, plain.owner.first, plain.number, plain.bytes, plain.block);
                let mut expected: Vec<_> = live.iter().map(plain).collect();
                expected.sort_by_key(|(_, _, number, ..)| *number);
                assert_eq!(told.collect::<Vec<_>>(), expected, "seed {seed}, step {step}");
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

/// A ledger that takes what it can the common way, and one that takes everything the general way. They are told the same, and
/// tell the same.
#[derive(Default)]
struct Twins {
    common: Ledger,
    general: Ledger,
    number: u64,
    /// How many events went the common way.
    alike: usize,
}

impl Twins {
    fn post(&mut self, kind: &EventKind, thread: ThreadId) {
        self.number += 1;
        let number = self.number;
        let event = Event { number, time: Duration::from_millis(100 * number), thread, kind };
        match *kind {
            EventKind::Alloc { key, block } => {
                self.common.set_time(event.time);
                self.general.set_time(event.time);
                self.general.alloc(key, block.bytes, block.tag(), number, thread);
                if self.common.alloc_like_newest(key, block.bytes, block.tag(), number, thread) {
                    self.alike += 1;
                } else {
                    self.common.alloc(key, block.bytes, block.tag(), number, thread);
                }
            }
            EventKind::Free { key, block } => {
                let answer = self.general.free(key, block.as_ref(), thread);
                if self.common.free_like_newest(key, thread) {
                    self.alike += 1;
                    assert_eq!(answer, Answer::Applied);
                } else {
                    assert_eq!(answer, self.common.free(key, block.as_ref(), thread));
                }
            }
            _ => assert_eq!(self.common.apply(&event), self.general.apply(&event)),
        }
        assert_eq!(self.common.last_trace(), self.general.last_trace(), "event {number}");
    }

    fn compare<T: PartialEq + std::fmt::Debug>(&mut self, read: impl Fn(&mut Ledger) -> T) {
        assert_eq!(read(&mut self.common), read(&mut self.general), "event {}", self.number);
    }

    fn compare_all(&mut self) {
        self.compare(|ledger| (ledger.counts(), ledger.stats()));
        self.compare(Ledger::nodes);
        self.compare(Ledger::groups);
        self.compare(|ledger| {
            let mut blocks: Vec<_> = (0..PARTS).flat_map(|part| ledger.blocks(part, None)).collect();
            blocks.sort_by_key(|held| (held.number, held.key.get()));
            blocks
        });
    }

    fn compare_peak(&mut self, kept: ScopeId) {
        self.compare(|ledger| ledger.kept_peak(kept));
        self.compare(|ledger| (0..).map_while(|part| ledger.peak_part(kept, part)).collect::<Vec<_>>());
        self.compare(|ledger| ledger.release_peak(kept));
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "it is a list of what may happen")]
fn the_common_way_comes_to_what_the_general_one_comes_to() {
    for seed in 1..if cfg!(miri) { 2 } else { 24_u64 } {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        let mut twins = Twins::default();
        let (mut thread, mut of) =
            (ThreadId(1), Block::new(Device { family: Family::Cuda, ordinal: 0 }, Bytes::ZERO, MemKind::Pool));
        // Where some histories have no scope of one thread, and no loss, almost all goes the common way.
        let (has_locals, has_losses) = (seed % 3 == 0, seed % 2 == 0);
        let mut scopes: Vec<(ScopeId, bool)> = Vec::new();
        for step in 0..if cfg!(miri) { 300 } else { 3000_u64 } {
            if random(12) == 0 {
                thread = ThreadId(1 + u32::try_from(random(3)).unwrap());
                let device = Device { family: Family::Cuda, ordinal: u32::from(random(8) == 0) };
                let kind = [MemKind::Pool, MemKind::Device, MemKind::PinnedHost][random(3)];
                let context = u8::from(kind == MemKind::Device);
                let stack = StackId(u32::try_from(random(2)).unwrap());
                of = Block { context, stack, ..Block::new(device, Bytes::ZERO, kind) };
            }
            // Some of them want the same place in the front cache.
            let key = Key::new(Space::Address, 512 * (1 + random(400) as u64));
            let scope = scopes.get(random(scopes.len().max(1))).copied();
            let id = ScopeId(step);
            match random(200) {
                0..90 => {
                    let block = Block { bytes: Bytes::new(random(1000) as u64), ..of };
                    twins.post(&EventKind::Alloc { key, block }, thread);
                }
                90..170 => {
                    let older = (random(40) == 0).then_some(Block { bytes: Bytes::new(7), ..of });
                    twins.post(&EventKind::Free { key, block: older }, thread);
                }
                170..175 => twins.post(&EventKind::FreeFailed, thread),
                175 => twins.post(&EventKind::Untracked, thread),
                176 => twins.post(&EventKind::Shrink { key, bytes: Bytes::new(1) }, thread),
                177 if random(4) == 0 => twins.post(&EventKind::ContextDestroyed { context: 1 }, thread),
                178 if has_losses => twins.post(&EventKind::Lost { count: 1 }, thread),
                179 if has_losses => {
                    let now = random(2) as u64;
                    twins.post(&EventKind::Displaced { now, more: now }, thread);
                }
                180..184 => {
                    let spec = ScopeSpec {
                        device: of.device,
                        gauge: Gauge::Exact,
                        every: Duration::ZERO,
                        thread: (has_locals && random(3) == 0).then_some(thread),
                        callsite: CallsiteId(2 + u32::try_from(random(3)).unwrap()),
                        source: crate::model::Source::Dispatch,
                        at_peak: random(2) == 0,
                    };
                    twins.post(&EventKind::Open { scope: id, spec }, thread);
                    scopes.push((id, spec.at_peak));
                }
                184 => {
                    twins.common.begin_thread(thread);
                    twins.general.begin_thread(thread);
                }
                185..194 => {
                    let Some((scope, at_peak)) = scope else { continue };
                    match random(7) {
                        0 => twins.post(&EventKind::Enter { scope }, thread),
                        1 => twins.post(&EventKind::Leave { scope }, thread),
                        2 => twins.post(&EventKind::Read { scope }, thread),
                        3 => twins.post(&EventKind::Reset { scope }, thread),
                        4 => twins.post(&EventKind::ResetKeepingPeak { scope }, thread),
                        5 => {
                            twins.compare(|ledger| ledger.keep_peak(scope, id));
                            twins.compare_peak(id);
                        }
                        _ => {
                            twins.post(&EventKind::Close { scope }, thread);
                            scopes.retain(|(open, _)| *open != scope);
                            if at_peak {
                                twins.compare_peak(scope);
                            }
                        }
                    }
                }
                194 => {
                    twins.compare(|ledger| ledger.keep_device_peak(of.device, id));
                    twins.compare_peak(id);
                }
                195..197 => twins.compare_all(),
                _ => {}
            }
        }
        twins.compare_all();
        if !(has_locals || has_losses || cfg!(miri)) {
            assert!(twins.alike > 300, "seed {seed}: {} events", twins.alike);
        }
    }
}
