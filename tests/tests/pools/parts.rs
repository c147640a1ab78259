//! Tests how reports show a pool that the program registers, on a simulated device.

use gpumem::{
    Bytes, GpuMemTrace, breakdown,
    pool::Pool,
    report::{PartKind, PeakHolders, RegisteredPool},
    sim::SimGpu,
    summary,
};
use gpumem_tests::simulated_gpu;

#[test]
fn reports_count_parts_and_show_unused_memory() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    let pool = Pool::register("cache-test", gpu.ordinal()).expect("the device exists");
    let mut trace = GpuMemTrace::builder()
        .ctx("pool-step")
        .device(gpu.ordinal())
        .at_peak(true)
        .silent(true)
        .start()
        .expect("the device exists");
    let workspace = gpu.alloc(Bytes::mib(8)).expect("there is room");
    let block = gpu.alloc(Bytes::mib(100)).expect("there is room");
    pool.allocated(block.address(), Bytes::mib(10));
    pool.allocated(block.address() + (10 << 20), Bytes::mib(20));
    pool.freed(block.address());
    let data = trace.data();
    assert_eq!((data.used.mb(), data.peaked.mb(), data.lost), (28, 10, 0));
    assert_eq!(data.driver.map(|driver| (driver.used.mb(), driver.peaked.mb())), Some((108, 0)));
    let at_peak: PeakHolders = trace.peak_holders().expect("`at_peak` is set");
    assert_eq!(at_peak.bytes, Bytes::mib(38), "{at_peak}");
    let parts = breakdown(gpu.ordinal()).expect("the device can be read");
    let row = parts.parts.iter().find(|part| part.kind == PartKind::RegisteredPool).expect("there is one");
    assert_eq!((row.name.as_str(), row.bytes), ("cache of cache-test", Bytes::mib(80)), "{parts}");
    let sum: Bytes = parts.parts.iter().map(|part| part.bytes).sum();
    assert_eq!(sum, parts.memory.used, "{parts}");
    trace.stop();
    let is_ours = |pool: &&RegisteredPool| pool.name == "cache-test";
    let now = summary();
    let scope = now.scopes.iter().find(|scope| scope.path == ["pool-step"]).expect("it was opened");
    assert_eq!((scope.used, scope.peak), (Bytes::mib(28), Bytes::mib(38)), "{now}");
    assert_eq!(now.pools.iter().find(is_ours).and_then(RegisteredPool::unused), Some(Bytes::mib(80)), "{now}");
    drop(pool);
    drop((block, workspace));
    assert!(!summary().pools.iter().any(|pool| is_ours(&pool)), "a closed pool without blocks has no row");
}

#[test]
fn the_id_of_a_closed_pool_is_reused() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    for _ in 0..200 {
        let pool = Pool::register("again", gpu.ordinal()).expect("ids of closed pools are free");
        let block = gpu.alloc(Bytes::mib(1)).expect("there is room");
        pool.allocated(block.address(), Bytes::kib(1));
        drop((block, pool));
    }
}

#[test]
fn a_pool_without_a_name_is_called_pool() {
    let _alone = crate::alone();
    let gpu = simulated_gpu();
    let pool = Pool::register("", gpu.ordinal()).expect("the device exists");
    let block = gpu.alloc(Bytes::mib(1)).expect("there is room");
    pool.allocated(block.address(), Bytes::kib(1));
    let now = summary();
    let names: Vec<_> =
        now.pools.iter().filter(|pool| pool.device == gpu.ordinal()).map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["pool"], "{now}");
}

#[test]
fn pools_with_the_same_name_get_separate_rows() {
    let _alone = crate::alone();
    let (gpu, other) = (simulated_gpu(), simulated_gpu());
    let register = |gpu: &SimGpu| {
        let pool = Pool::register("arena", gpu.ordinal()).expect("the device exists");
        let block = gpu.alloc(Bytes::mib(1)).expect("there is room");
        pool.set_reserved(Bytes::mib(1));
        (pool, block)
    };
    let (first, second, third, elsewhere) = (register(&gpu), register(&gpu), register(&gpu), register(&other));
    let names = || {
        let name_on_gpu = |pool: RegisteredPool| (pool.device == gpu.ordinal()).then_some(pool.name);
        summary().pools.into_iter().filter_map(name_on_gpu).collect::<Vec<_>>()
    };
    assert_eq!(names(), ["arena", "arena #2", "arena #3"]);
    drop(second);
    let again = register(&gpu);
    assert_eq!(names(), ["arena", "arena #2", "arena #3"]);
    let now = format!("{}\n", summary());
    for gpu in [&gpu, &other] {
        let row = format!("\ndevice {}: cache of arena: 1 MiB of 1 MiB\n", gpu.ordinal());
        assert!(now.contains(&row), "{row}{now}");
    }
    let parts = breakdown(gpu.ordinal()).expect("the device can be read").to_string();
    assert!(parts.contains("cache of arena #3"), "{parts}");
    drop((first, third, again, elsewhere));
}
