//! Measures gpumem's costs. Each measurement has its baseline in the same run. The group `device` needs a GPU; it is left
//! out if there is none.
//!
//! `cargo bench -p gpumem-tests`

use std::{
    collections::HashMap,
    env,
    ffi::OsStr,
    hint::black_box,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group, criterion_main};
use gpumem::{Bytes, Gauge, GpuHandle, GpuMemTrace, gpu_mem_get, gpu_mem_get_used_fast, gpu_mem_trace, sim::SimGpu};
use gpumem_core::model::StackId;
use gpumem_driver::source;
use gpumem_tests::{bare_inbox::BareInbox, with_nested_calls};
use nvml_wrapper::Nvml;

fn trace(gauge: Gauge) -> GpuMemTrace {
    GpuMemTrace::builder().gauge(gauge).on_exit_report(false).start().expect("the device can be read")
}

fn create_and_stop(gauge: Gauge) {
    let mut trace = trace(gauge);
    trace.stop();
    black_box(trace.data());
}

/// Compares the queries with the bare NVML call, and measures a sampled trace, which takes two readings.
fn device(criterion: &mut Criterion) {
    if !gpumem::is_available() {
        gpumem_tests::skipped("no GPU");
        return;
    }
    let nvml = Nvml::builder().lib_path(OsStr::new("libnvidia-ml.so.1")).init().expect("NVML is there");
    let bare = nvml.device_by_index(0).expect("device 0 is there");
    let handle = GpuHandle::new(0).expect("device 0 is there");
    let mut group = criterion.benchmark_group("device");
    group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(2));
    // The measurements alternate, because clock frequencies drift by more than the difference between the measurements.
    for round in 1..=5 {
        group.bench_function(format!("baseline: nvmlDeviceGetMemoryInfo_v2, cached handle ({round})"), |bench| {
            bench.iter(|| bare.memory_info());
        });
        group.bench_function(format!("gpu_mem_get(0) ({round})"), |bench| bench.iter(|| gpu_mem_get(0)));
        group.bench_function(format!("gpu_mem_get(None) ({round})"), |bench| bench.iter(|| gpu_mem_get(None)));
        group.bench_function(format!("gpu_mem_get_used_fast ({round})"), |bench| {
            bench.iter(|| gpu_mem_get_used_fast(&handle));
        });
    }
    group.bench_function("sampled trace: create, stop, read", |bench| bench.iter(|| create_and_stop(Gauge::Sampled)));
    let live: Vec<_> = (0..1000).map(|_| trace(Gauge::Sampled)).collect();
    group.bench_function("sampled trace beside 1,000 live ones", |bench| {
        bench.iter(|| create_and_stop(Gauge::Sampled));
    });
    drop(live);
    group.finish();
}

/// Returns the addresses of 1024 blocks again and again, as if a program freed and allocated them in turn.
fn addresses() -> impl Iterator<Item = u64> {
    (0..1024_u64).map(|block| 0x7f00_0000_0000 + block * 4096).cycle()
}

/// Compares the inbox and the ledger with a map behind a lock that does nothing else.
fn events(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("events");
    let map = Mutex::new(HashMap::<u64, u64>::new());
    // This is the simplest way to remember live blocks.
    let insert_and_remove = |address| {
        map.lock().unwrap().insert(address, 4096);
        map.lock().unwrap().remove(&address);
    };
    let inbox = BareInbox::default();
    let alloc_and_free = |address| {
        inbox.alloc(address, 4096);
        inbox.free(address);
    };
    for address in addresses().take(1024).step_by(2) {
        map.lock().unwrap().insert(address + 1, 4096);
        inbox.alloc(address + 1, 4096);
    }
    let mut next = addresses();
    for round in ["", " (second time)"] {
        group.bench_function(format!("baseline: Mutex<HashMap> insert+remove{round}"), |bench| {
            bench.iter(|| insert_and_remove(next.next().unwrap()));
        });
        group.bench_function(format!("alloc+free, no scope{round}"), |bench| {
            bench.iter(|| alloc_and_free(next.next().unwrap()));
        });
    }
    for scopes in [1_u64, 10_000] {
        for scope in 1..=scopes {
            // The scopes have different levels, so that the segments do not merge.
            inbox.open(scope);
            inbox.alloc(scope * 8192 + 1, 1 << 20);
        }
        for scope in (1..=scopes).rev() {
            inbox.free(scope * 8192 + 1);
        }
        group.bench_function(format!("alloc+free, {scopes} open scopes"), |bench| {
            bench.iter(|| alloc_and_free(next.next().unwrap()));
        });
        for scope in 1..=scopes {
            inbox.close(scope);
        }
    }
    group.bench_function("open+close a scope", |bench| {
        bench.iter(|| {
            inbox.open(1);
            inbox.close(1);
        });
    });
    // Two threads do the same work: one of them works in the background as fast as it can.
    for (name, work) in [
        ("baseline: Mutex<HashMap> insert+remove", &insert_and_remove as &(dyn Fn(u64) + Sync)),
        ("alloc+free", &alloc_and_free),
    ] {
        let over = AtomicBool::new(false);
        thread::scope(|threads| {
            threads.spawn(|| {
                for address in addresses() {
                    work(address + (1 << 32));
                    if over.load(Relaxed) {
                        break;
                    }
                }
            });
            group.bench_function(format!("{name}, two threads"), |bench| {
                bench.iter(|| work(next.next().unwrap()));
            });
            over.store(true, Relaxed);
        });
    }
    group.finish();
}

/// Measures the cost of recording the allocations of a peak: compares events in a scope with this option and events in a scope
/// without it. In each turn, a block is allocated in one of two inner scopes, and a block of the other inner scope is freed.
fn peaks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("peaks");
    let address = |turn: u64| 0x7f00_0000_0000 + turn * 4096;
    for (grows, what) in [(0, "below the peak"), (1, "each a new peak")] {
        for (of_this_thread, whose) in [(false, "of all threads"), (true, "of one thread")] {
            for (at_peak, name) in [(false, "baseline: not asked"), (true, "asked")] {
                let inbox = BareInbox::default();
                inbox.open_as(1, 2, at_peak, of_this_thread);
                for scope in [3, 4] {
                    inbox.open_at(scope, u32::try_from(scope).expect("it is small"));
                    inbox.leave(scope);
                }
                inbox.enter(3);
                if grows == 0 {
                    inbox.alloc(1, 1 << 40);
                    inbox.free(1);
                }
                (0..BATCH).for_each(|block| inbox.alloc(address(block), 4096));
                let mut turn = 0_u64;
                group.bench_function(format!("alloc+free of the oldest block, {what}, {whose}, {name}"), |bench| {
                    bench.iter(|| {
                        if turn.is_multiple_of(BATCH) {
                            let is_even = (turn / BATCH).is_multiple_of(2);
                            let (old, new) = if is_even { (3, 4) } else { (4, 3) };
                            inbox.leave(old);
                            inbox.enter(new);
                        }
                        inbox.alloc(address((turn + BATCH) % (2 * BATCH)), 4096 + grows * turn);
                        inbox.free(address(turn % (2 * BATCH)));
                        turn += 1;
                    });
                });
            }
        }
    }
    group.finish();
}

#[inline(never)]
fn remembered() -> u32 {
    source::current_stack().0
}

#[inline(never)]
fn walked() -> u32 {
    source::forget_stacks();
    source::current_stack().0
}

#[inline(never)]
fn by_the_system() -> u32 {
    // Any id will do, because only the walk is measured.
    source::uncached_stack(|addresses| StackId(u32::try_from(addresses.len()).unwrap_or(0))).0
}

/// Measures how long it takes to find the stack of one block: a remembered stack, a new stack through known functions, and a
/// stack that the system's unwinder walks.
fn stack(criterion: &mut Criterion) {
    // Stacks have ids only after the session has started.
    SimGpu::install(Bytes::gib(16)).expect("there is no other device");
    drop(trace(Gauge::Exact));
    let mut group = criterion.benchmark_group("stack");
    for depth in [10, 30, 60] {
        for (name, way) in [
            ("baseline: the system's unwinder, 32 functions at most", by_the_system as fn() -> u32),
            ("walked", walked),
            ("remembered", remembered),
        ] {
            group.bench_function(format!("{name}, {depth} calls deep"), |bench| {
                with_nested_calls(depth, &mut || bench.iter(way));
            });
        }
    }
    group.finish();
}

/// Compares a part of a pool with a block of the driver without a pool: first while no other block or part is live, then while
/// 500 are live. Then allocates and frees a million live parts, in order and at random.
fn pools(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pools");
    let (without, with) = (BareInbox::default(), BareInbox::default());
    with.register_pool(0x7f00_0000_0000);
    for live in [0, 500] {
        let driver: [&dyn Fn(u64); 2] = [&|at| without.alloc(at, 4096), &|at| without.free(at)];
        let part: [&dyn Fn(u64); 2] = [&|at| with.part(at, 4096), &|at| with.unpart(at)];
        for (what, [alloc, free]) in [("baseline: alloc+free, no pool", driver), ("part+free", part)] {
            let (mut new, mut old) = (addresses(), addresses());
            new.by_ref().take(live).for_each(alloc);
            group.bench_function(format!("{what}, {live} live"), |bench| {
                bench.iter(|| {
                    alloc(new.next().unwrap());
                    free(old.next().unwrap());
                });
            });
        }
    }
    group.finish();
    let (parts, inbox) = (1_000_000, BareInbox::default());
    inbox.register_pool(1 << 40);
    for (what, order) in [("in order", 1), ("at random", 7_368_787)] {
        let timed = |each: &dyn Fn(u64)| {
            let start = Instant::now();
            (0..parts).for_each(|part| each((1 << 40) + part * order % parts * 512));
            start.elapsed().as_nanos() / u128::from(parts)
        };
        let (grow, shrink) = (timed(&|at| inbox.part(at, 512)), timed(&|at| inbox.unpart(at)));
        println!("a million live parts, {what}: {grow} ns to allocate one, {shrink} ns to free it");
    }
}

/// The number of blocks that are allocated in one inner scope before the other inner scope is entered.
const BATCH: u64 = 1024;

#[gpu_mem_trace]
fn traced() {}

/// Measures a guard while traces are off. Run `GPUMEM_GAUGE=off cargo bench -p gpumem-tests --bench cost -- off`, or run it on a
/// machine without a GPU. This benchmark comes first, because the others install simulated devices.
fn off(criterion: &mut Criterion) {
    if GpuMemTrace::new().data().gauge != Gauge::Off {
        gpumem_tests::skipped("traces are on");
        return;
    }
    let mut group = criterion.benchmark_group("off");
    group.bench_function("new, drop", |bench| bench.iter(|| drop(GpuMemTrace::new())));
    group.bench_function("with_ctx, drop", |bench| bench.iter(|| drop(GpuMemTrace::with_ctx(black_box("x")))));
    group.bench_function("scope", |bench| bench.iter(|| GpuMemTrace::scope(black_box("x"), |_| black_box(1))));
    group.bench_function("attribute", |bench| bench.iter(traced));
    group.finish();
}

#[gpu_mem_trace(stats)]
fn counted() {}

/// Measures a trace that is silent, one that is counted for statistics, and one that is filtered out by its name. The filtered
/// trace needs `GPUMEM=filtered=off cargo bench -p gpumem-tests --bench cost -- ends`.
fn ends(criterion: &mut Criterion) {
    SimGpu::install(Bytes::gib(16)).expect("there is no other device");
    let start = |ctx| GpuMemTrace::builder().ctx(ctx);
    let mut group = criterion.benchmark_group("ends");
    for round in 1..=2 {
        group.bench_function(format!("baseline: silent ({round})"), |bench| {
            bench.iter(|| drop(start("silent").silent(true).start_or_off()));
        });
        group.bench_function(format!("stats ({round})"), |bench| {
            bench.iter(|| drop(start("counted").stats().start_or_off()));
        });
        group.bench_function(format!("attribute with stats ({round})"), |bench| bench.iter(counted));
        if env::var("GPUMEM").as_deref() == Ok("filtered=off") {
            group.bench_function(format!("filtered ({round})"), |bench| {
                bench.iter(|| drop(start("filtered").start_or_off()));
            });
        } else {
            gpumem_tests::skipped("GPUMEM does not say filtered=off");
        }
    }
    group.finish();
}

criterion_group!(benches, off, ends, device, events, peaks, stack, pools);
criterion_main!(benches);
