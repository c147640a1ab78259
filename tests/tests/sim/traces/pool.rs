//! The pool's own high-water mark.

use gpumem_tests::Random;

use super::*;

fn start(gpu: &SimGpu) -> GpuMemTrace {
    quiet().device(gpu.ordinal()).gauge(Gauge::Pool).start().expect("the device has a pool")
}

fn pooled(gpu: &SimGpu, mib: u64) -> SimBlock {
    gpu.alloc_async(Bytes::mib(mib)).expect("the device has room")
}

#[test]
fn nested_and_overlapping_traces_each_keep_their_own_peak() {
    let gpu = simulated_gpu();
    let _older = pooled(&gpu, 7);
    drop(pooled(&gpu, 1000));
    let outer = start(&gpu);
    let kept = pooled(&gpu, 10);
    let mut inner = start(&gpu);
    drop(pooled(&gpu, 50));
    check(&inner, 0, 50);
    inner.reset();
    drop(pooled(&gpu, 30));
    let after = start(&gpu);
    check(&after, 0, 0);
    check(&inner, 0, 30);
    drop(inner);
    drop(pooled(&gpu, 20));
    drop(kept);
    check(&after, -10, 20);
    check(&outer, 0, 60);
    let data = outer.data();
    assert_eq!((data.gauge.name(), data.sampling, data.lost, data.stale), ("pool", None, 0, false));
}

#[test]
fn what_is_in_no_pool_is_not_counted() {
    let (gpu, other) = (simulated_gpu(), simulated_gpu());
    let trace = start(&gpu);
    let _others = (mib(&gpu, 100), pooled(&other, 50));
    check(&trace, 0, 0);
}

#[test]
fn a_stopped_trace_is_frozen_and_one_that_starts_again_begins_anew() {
    let gpu = simulated_gpu();
    let mut trace = start(&gpu);
    drop(pooled(&gpu, 5));
    trace.stop();
    let _kept = pooled(&gpu, 9);
    check(&trace, 0, 5);
    trace.start();
    check(&trace, 0, 0);
}

#[test]
fn a_pool_that_cannot_be_read_is_no_number() {
    let gpu = simulated_gpu();
    let mut trace = quiet().device(gpu.ordinal()).gauge(Gauge::Pool).ctx("t").start().unwrap();
    let kept = pooled(&gpu, 10);
    check(&trace, 10, 0);
    gpu.set_lost(true);
    drop(pooled(&gpu, 20));
    assert!(trace.data().stale && !trace.data().is_measured());
    assert_eq!(trace.data().used.mb(), 10, "the last good reading");
    trace.report();
    check_lines(&["△Used Peaked MB:      ?      ? (t)"]);
    assert!(quiet().device(gpu.ordinal()).gauge(Gauge::Pool).start().is_err());
    gpu.set_lost(false);
    check(&trace, 10, 20);
    gpu.set_lost(true);
    trace.reset();
    gpu.set_lost(false);
    drop(kept);
    assert!(trace.data().stale, "nobody knows what it began with");
    trace.reset();
    check(&trace, 0, 0);
}

#[test]
fn one_thread_alone_is_not_to_be_had() {
    let gpu = simulated_gpu();
    let refused = quiet().device(gpu.ordinal()).gauge(Gauge::Pool).thread_local_only().start();
    let error = refused.expect_err("the mark is the whole pool's");
    assert!(error.is_invalid_setting() && error.to_string().contains("the gauge `pool`"), "{error}");
}

#[test]
fn no_device_no_trace() {
    let _gpu = simulated_gpu();
    let error = quiet().device(9999).gauge(Gauge::Pool).start().expect_err("there is no such device");
    assert!(error.is_unknown_device(), "{error}");
}

/// In every order of opening, resetting and closing, the high-water mark has the same peaks as exact traces.
#[test]
fn traces_agree_with_exact_ones() {
    let gpu = simulated_gpu();
    for seed in 1..60_u64 {
        let mut random = Random::new(seed);
        let mut random = |below: usize| random.below(below);
        let (mut traces, mut blocks) = (Vec::new(), Vec::new());
        for _ in 0..200 {
            match random(8) {
                0 => traces.push((start(&gpu), quiet().device(gpu.ordinal()).start().unwrap())),
                1 if !traces.is_empty() => drop(traces.swap_remove(random(traces.len()))),
                2 if !traces.is_empty() => {
                    let at = random(traces.len());
                    traces[at].0.reset();
                    traces[at].1.reset();
                }
                3 if !traces.is_empty() => {
                    let (pool, exact) = &traces[random(traces.len())];
                    let (pool, exact) = (pool.data(), exact.data());
                    assert_eq!((pool.used, pool.peaked, pool.lost), (exact.used, exact.peaked, 0), "seed {seed}");
                }
                4 | 5 if !blocks.is_empty() => drop(blocks.swap_remove(random(blocks.len()))),
                _ => blocks.push(gpu.alloc_async(Bytes::new(1 + random(1 << 20) as u64)).unwrap()),
            }
        }
    }
}

/// Traces of other threads do not lower a peak, and their resets do not count as resets by others.
#[test]
fn threads_do_not_disturb_each_other() {
    let gpu = simulated_gpu();
    let outer = start(&gpu);
    thread::scope(|threads| {
        let others = [(); 4].map(|()| {
            threads.spawn(|| {
                let mut trace = start(&gpu);
                for _ in 0..5000 {
                    assert_eq!((trace.data().lost, start(&gpu).data().lost), (0, 0));
                    trace.reset();
                }
            })
        });
        for round in (1..5000).cycle().take_while(|_| others.iter().any(|other| !other.is_finished())) {
            let inner = start(&gpu);
            drop(pooled(&gpu, round));
            check(&inner, 0, round);
        }
    });
    drop(pooled(&gpu, 6000));
    check(&outer, 0, 6000);
    assert_eq!(outer.data().lost, 0);
}
