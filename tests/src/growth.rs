//! Measures the memory that a process keeps for threads that have ended, names of scopes, and events. It must not grow beyond documented
//! limits.

use std::{cell::Cell, fs, thread};

use gpumem::{
    Bytes, GpuMemTrace,
    sim::{SimBlock, SimGpu},
};

use crate::{Random, bare_inbox::BareInbox};

/// Returns the memory of the process.
fn resident() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("this is Linux");
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("the second figure is a number of pages") * 4096
}

/// Returns the growth of the process in bytes while `work` runs `times` times, after `before` runs that do not count.
fn growth(before: u64, times: u64, mut work: impl FnMut(u64)) -> u64 {
    (0..before).for_each(&mut work);
    let had = resident();
    (before..before + times).for_each(&mut work);
    resident().saturating_sub(had)
}

fn trace(name: impl Into<String>) -> GpuMemTrace {
    GpuMemTrace::builder().ctx(name).thread_local_only().on_exit_report(false).start().expect("the device is there")
}

thread_local! {
    /// A block that is freed when its thread ends, as in a cache.
    static CACHED: Cell<Option<SimBlock>> = const { Cell::new(None) };
}

/// Returns the growth over this number of threads that open a scope, allocate and end. Some leave their scope and their
/// block to the next, and half have a block until their end.
///
/// # Panics
/// Panics if there is no `/proc`.
pub fn of_threads(gpu: &SimGpu, threads: u64) -> u64 {
    growth(threads / 10, threads, |number| {
        let works = move |gpu: &SimGpu| {
            let block = || gpu.alloc(Bytes::kib(4)).expect("there is room");
            // This variable is used before gpumem's, so that its block is freed after they are gone.
            CACHED.with(|cached| cached.set((number % 2 == 1).then(block)));
            let left = (trace("thread"), block());
            number.is_multiple_of(10).then_some(left)
        };
        drop(thread::scope(|scope| scope.spawn(|| works(gpu)).join().expect("it does not panic")));
    })
}

/// Returns the growth over this number of scopes, each with a different path and name, after there are as many paths as gpumem
/// distinguishes.
///
/// # Panics
/// Panics if there is no `/proc`.
pub fn of_names(gpu: &SimGpu, names: u64) -> u64 {
    growth(70_000, names, |number| {
        let outer = trace(format!("outer {}", number / 1000 % 1000));
        let inner = trace(format!("inner {}", number % 1000));
        let own = trace(format!("own {number}"));
        drop(gpu.alloc(Bytes::kib(4)).expect("there is room"));
        drop((own, inner, outer));
    })
}

/// Returns the growth over this number of requests of a service, each with a different name, that are counted for statistics.
///
/// # Panics
/// Panics if there is no `/proc`.
pub fn of_requests(gpu: &SimGpu, requests: u64) -> u64 {
    let grown = growth(2_000, requests, |number| {
        let request =
            GpuMemTrace::builder().ctx(format!("request {number}")).stats().start().expect("the device is there");
        drop(gpu.alloc(Bytes::kib(4 + number % 1000)).expect("there is room"));
        drop(request);
    });
    let calls: Vec<_> = gpumem::stats_n_reset().names.into_iter().map(|name| (name.name, name.calls)).collect();
    assert_eq!(calls, [("request #".to_owned(), 2_000 + requests)]);
    grown
}

/// Returns the growth over this many live parts of a pool.
///
/// # Panics
/// Panics if there is no `/proc`.
pub fn of_parts(parts: u64) -> u64 {
    let inbox = BareInbox::default();
    inbox.register_pool(1 << 40);
    let grown = growth(0, parts, |number| inbox.part((1 << 40) + number * 512, 512));
    std::hint::black_box(&inbox);
    grown
}

/// Returns the growth over this number of allocations and frees, of 10,000 blocks at random addresses. Some are at an address that is in
/// use, as if a free had been missed. Sometimes a lost event is recorded.
///
/// # Panics
/// Panics if there is no `/proc`.
pub fn of_events(pairs: u64) -> u64 {
    const LIVE: usize = 10_000;
    let inbox = BareInbox::default();
    inbox.open(1);
    let (mut live, mut random) = (vec![0; LIVE], Random::new(1));
    growth(10 * LIVE as u64, pairs, |number| {
        let address = 0x7f00_0000_0000 + random.below(1 << 20) * 512;
        inbox.free(std::mem::replace(&mut live[random.below(LIVE)], address));
        inbox.alloc(address, 512);
        if number.is_multiple_of(1 << 16) {
            inbox.lose();
        }
    })
}
