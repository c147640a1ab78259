use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

use super::{LedgerView, NoTap, Std, run_rare};
use crate::{
    ledger::{NodeId, PART_LEN},
    model::{Answer, Block, Bytes, CallsiteId, Device, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, Space},
};

type TestInbox = super::Inbox<NoTap, Std>;

const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

fn open(scope: u64) -> EventKind {
    let spec = ScopeSpec::exact(DEVICE);
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

fn open_at(scope: u64, callsite: u32) -> EventKind {
    let EventKind::Open { scope, spec } = open(scope) else { unreachable!() };
    EventKind::Open { scope, spec: ScopeSpec { callsite: CallsiteId(callsite), ..spec } }
}

/// The blocks need more than one part.
const MANY: u64 = 3 * PART_LEN as u64 + 7;

#[test]
fn many_paths_and_groups_are_read_in_parts() {
    let inbox = TestInbox::new();
    for scope in 1..=MANY {
        inbox.post(&open_at(scope, 1 + u32::try_from(scope).unwrap()));
        inbox.post(&alloc(scope * 512, scope));
        if scope % 2 == 0 {
            inbox.ask(None, &close(scope));
        }
        // Each scope is left immediately, so that the scopes are not nested.
        inbox.post(&EventKind::Leave { scope: ScopeId(scope) });
    }
    let (nodes, total) = (inbox.nodes(), MANY * (MANY + 1) / 2);
    let [none, root, scopes @ ..] = nodes.as_slice() else { panic!("there is a root") };
    assert_eq!((none.0, root.1.in_use.unsigned_abs(), scopes.len() as u64), (None, total, MANY));
    for (at, (_, node)) in scopes.iter().enumerate() {
        let number = at as u64 + 1;
        assert_eq!((node.parent, node.in_use.unsigned_abs(), node.calls), (NodeId(1), number, 1));
        let until = if number.is_multiple_of(2) { number } else { MANY };
        assert_eq!(node.device_peak.unsigned_abs(), until * (until + 1) / 2, "an open scope has the latest level");
    }
    let groups = inbox.groups();
    assert_eq!(groups.len() as u64, MANY);
    assert_eq!(groups.iter().map(|live| live.bytes.get()).sum::<u64>(), total);
    // A destroyed context removes all its blocks.
    let of_context = |address, context| {
        let EventKind::Alloc { key, block } = alloc(address, 1) else { unreachable!() };
        EventKind::Alloc { key, block: Block { context, ..block } }
    };
    (1..=MANY).for_each(|block| _ = inbox.post(&of_context(block << 32, 7)));
    let before = inbox.lock().number;
    inbox.post(&EventKind::ContextDestroyed { context: 7 });
    assert_eq!((inbox.counts().removed_with_context, inbox.lock().number), (MANY, before + 1));
    assert_eq!(inbox.groups().iter().map(|live| live.bytes.get()).sum::<u64>(), total);
}

/// The values of a path are at least those of its inner paths, although another thread allocates while they are read.
#[test]
fn paths_agree_with_those_inside_them() {
    let inbox = TestInbox::new();
    inbox.post(&open_at(0, 2));
    for scope in 1..=MANY {
        inbox.post(&open_at(scope, 2 + u32::try_from(scope).unwrap()));
        inbox.post(&EventKind::Leave { scope: ScopeId(scope) });
    }
    let is_over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            for block in (1..).take_while(|_| !is_over.load(std::sync::atomic::Ordering::Relaxed)) {
                // Each block lives for a while, in the last scope or in another one.
                inbox.post(&EventKind::Enter { scope: ScopeId(if block % 3 == 0 { 1 } else { MANY }) });
                inbox.post(&alloc(block << 20, block % 1000));
                inbox.post(&EventKind::Leave { scope: ScopeId(if block % 3 == 0 { 1 } else { MANY }) });
                if block > 20 {
                    inbox.post(&free((block - 20) << 20));
                }
            }
        });
        let results: Vec<_> = (0..50).map(|_| inbox.nodes()).collect();
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        for nodes in results {
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

#[test]
fn an_event_that_makes_the_ledger_panic_is_lost_and_blocks_no_thread() {
    let inbox = TestInbox::new();
    inbox.post(&open(1));
    assert!(
        inbox
            .enter(0, |_, _| run_rare::<Std, _>(|| panic!("in a hook")))
            .is_some_and(|done: Option<()>| done.is_none())
    );
    let panics = AssertUnwindSafe(|| inbox.enter(0, |_, _| panic!("elsewhere")));
    assert!(catch_unwind(panics).is_err_and(|_| true));
    inbox.post(&alloc(1, 10));
    let trace = inbox.ask(None, &close(1)).expect("the scope is open");
    assert_eq!((trace.lost, trace.used.get()), (2, 10));
}

#[test]
fn an_event_of_a_thread_that_is_inside_already_is_lost_and_reported() {
    let inbox = TestInbox::new();
    inbox.post(&open(1));
    inbox.enter(0, |_, _| {
        assert_eq!(inbox.post(&alloc(1, 10)), Answer::Applied);
        assert_eq!(inbox.ask(None, &close(1)), None);
    });
    let trace = inbox.ask(None, &close(1)).expect("the scope is open");
    assert_eq!((trace.lost, trace.used.get()), (2, 0));
}
