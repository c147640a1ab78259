//! Tests who holds memory: scopes across threads and tasks, the summary, the breakdown, live blocks, and the report when memory
//! runs out. A test that changes the whole process runs in a separate process.

mod leaks;
mod live;
mod nesting;
mod oom;
mod peaks;

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    mem,
    panic::{AssertUnwindSafe, catch_unwind, panic_any},
    pin::{Pin, pin},
    process::{Command, Stdio},
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
};

use gpumem::{
    Bytes, Error, GpuMemTrace, breakdown, gpu_mem_trace,
    oom::{on_oom, retry_after_trim},
    report::{LiveBlock, OutOfMemory, ScopeSummary},
    sim::{SimBlock, SimGpu},
};
use gpumem_tests::{Ended, OwnProcess, Yield, part, simulated_gpu};
use unicode_width::UnicodeWidthStr;

const MIB: u64 = 1 << 20;

fn take(gpu: &SimGpu, bytes: u64) -> SimBlock {
    gpu.alloc(Bytes::new(bytes)).expect("the device has room")
}

/// Returns the rows of the summary for a device, by path.
fn scopes(gpu: &SimGpu) -> BTreeMap<String, ScopeSummary> {
    let all = gpumem::summary().scopes.into_iter().filter(|scope| scope.device == gpu.ordinal());
    all.map(|scope| (scope.path.join("/"), scope)).collect()
}

/// Checks the allocated bytes and the bytes in use of each path of a device. Both include the scopes inside the path.
#[track_caller]
fn check_scopes(gpu: &SimGpu, expected: &[(&str, u64, u64)]) {
    let reported: Vec<_> =
        scopes(gpu).into_iter().map(|(path, scope)| (path, scope.allocated.get(), scope.used.get())).collect();
    let reported: Vec<_> = reported.iter().map(|(path, allocated, used)| (path.as_str(), *allocated, *used)).collect();
    assert_eq!(reported, expected);
}

fn sizes(blocks: &[LiveBlock]) -> Vec<u64> {
    blocks.iter().map(|block| block.bytes.get()).collect()
}

/// Polls both futures in turn on one thread, as `join!` does.
async fn join<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut of_a, mut of_b) = (Poll::Pending, Poll::Pending);
    poll_fn(|context| {
        if of_a.is_pending() {
            of_a = a.as_mut().poll(context);
        }
        if of_b.is_pending() {
            of_b = b.as_mut().poll(context);
        }
        if of_a.is_ready() && of_b.is_ready() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let (Poll::Ready(a), Poll::Ready(b)) = (of_a, of_b) else { unreachable!("both have ended") };
    (a, b)
}

#[test]
fn a_scope_on_a_device_that_it_was_not_opened_for() {
    let other = simulated_gpu();
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("here");
    let block = take(&other, 5);
    let reported = &scopes(&other)["here"];
    let values = [reported.calls, reported.used.get(), reported.peak.get(), reported.device_peak.get()];
    assert_eq!(values, [0, 5, 5, 5], "no less in use on the device than in the scope");
    assert_eq!(scopes(&gpu)["here"].device_peak, Bytes::ZERO);
    assert_eq!(sizes(&trace.live()), [5]);
    drop(block);
}

#[test]
fn blocks_below_the_deepest_path_are_in_all_scopes_around_it() {
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
    let reported = scopes(&gpu);
    assert!(
        reported.len() == 2 + 64 && reported.values().all(|scope| scope.used == 7 && scope.allocations == 1),
        "{reported:#?}"
    );
    let calls: u64 = reported.values().map(|scope| scope.calls).sum();
    assert_eq!(calls, 1 + 1_001);
}

fn own_process(part: &str, variables: &[(&str, &str)]) -> OwnProcess {
    OwnProcess::new("places::child").part(part).envs(variables)
}

/// Runs one of [`CHILDREN`] in a separate process with these environment variables.
#[track_caller]
fn run(part: &str, variables: &[(&str, &str)]) -> Ended {
    own_process(part, variables).run()
}

/// Like [`run`], but the process must succeed.
#[track_caller]
fn passes(part: &str, variables: &[(&str, &str)]) -> Ended {
    own_process(part, variables).passes()
}

/// Runs the part that the process was started for.
#[test]
fn child() {
    let Some(part) = part() else { return };
    // The test runner has printed the start of a line.
    println!();
    let (_, run) = CHILDREN.iter().find(|(name, _)| *name == part).expect("it is on the list");
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
    ("peak and refused", peaks::peak_and_rejected),
    ("refused", oom::rejected),
    ("refused often", oom::rejected_often),
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
    for row in summary.to_string().lines().filter(|row| row.contains("step #")) {
        println!("> {}", row.split_whitespace().collect::<Vec<_>>().join(" "));
    }
}

#[test]
fn names_beyond_the_limit_share_one_row() {
    let said = passes("many names", &[]);
    let [scopes, rest, path, calls, more, first] = said.answers()[..] else { panic!("{}", said.stdout) };
    let apart = 1 << 10;
    assert_eq!(scopes, format!("{} scopes, 20000 in all", apart + 2));
    assert_eq!(rest, format!("{0} calls of 1 paths, {0} used", 20_000 - apart));
    assert_eq!(path, "(more names like step #)");
    assert_eq!(calls, "20000 calls");
    // The peak of a row that stands for many names is at least their memory in use now, although each name had only 1 byte.
    assert!(more.contains(" names like step #) 18.53 "), "{more}");
    assert!(first.starts_with("step # 1.00 1.00 1.00 "), "{first}");
}
