//! Compares `gpumem_burn`'s values with burn's and the driver's, on a real device: `cargo test --release --features wgpu`.

use std::{
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use burn::{
    prelude::*,
    tensor::{Distribution, MemoryPoolUsage},
};
use gpumem::{GpuMemTrace, intercept::LiveMemory, scope::Threads};
use gpumem_burn::{CallMemory, Summary, scope, summary};
use tracing_subscriber::prelude::*;

/// Lets one test run at a time, because the values describe the whole device. Dropped tensors are freed when the thread of the test
/// waits for the device.
struct Test {
    device: Device,
    _one: MutexGuard<'static, ()>,
}

impl Test {
    fn start() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        static INIT: Once = Once::new();
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        INIT.call_once(|| {
            tracing_subscriber::registry().with(gpumem_burn::layer()).init();
            gpumem::preload(); // before the first page
        });
        Self { device: Device::default(), _one: one }
    }
}

impl Drop for Test {
    fn drop(&mut self) {
        self.device.sync().expect("the device computes");
    }
}

fn is_on_cuda() -> bool {
    format!("{:?}", Device::default()).contains("Cuda")
}

fn usage(device: &Device) -> MemoryPoolUsage {
    device.sync().unwrap();
    device.memory_pool_usage().unwrap()
}

fn now(device: &Device) -> Summary {
    summary(device).unwrap()
}

fn last(device: &Device, name: &str) -> CallMemory {
    *now(device).rows.iter().find(|row| row.path.last().unwrap() == name).unwrap().calls.last().unwrap()
}

fn signed(bytes: u64) -> i64 {
    bytes.try_into().unwrap()
}

fn tensor(device: &Device, mib: usize) -> Tensor<1> {
    Tensor::zeros([mib << 18], device) // of 4 bytes each
}

fn matmuls(device: &Device, size: usize) -> Tensor<2> {
    let x = Tensor::<2>::random([size, size], Distribution::Default, device);
    let y = x.clone().matmul(x.clone()).exp();
    let z = y.clone().matmul(x.clone()) + y;
    z.matmul(x)
}

#[test]
fn used_is_what_burn_says_and_all_adds_up() {
    let test = Test::start();
    let device = test.device.clone();
    let mut kept = Vec::new();
    for size in [64, 256, 300, 64] {
        let before = usage(&device);
        kept.push(scope(&device, "outer", || scope(&device, "inner", || matmuls(&device, size))));
        if size == 300 {
            kept.remove(0);
        }
        let freed = if size == 300 { 4 * 64 * 64 } else { 0 };
        let after = usage(&device);
        let used = last(&device, "outer").used;
        assert_eq!(signed(after.bytes_in_use) - signed(before.bytes_in_use), used - freed, "{size}");
        assert_eq!(last(&device, "inner").used, used);
        // In the meantime, cubecl may free some bytes of an earlier launch.
        assert!(used + 1024 >= signed(4 * size as u64 * size as u64), "{size}: {used}");

        let summary = now(&device);
        assert_eq!(summary.in_use, after.bytes_in_use);
        let outermost = summary.rows.iter().filter(|row| row.path.len() == 1).map(|row| row.calls.used());
        assert_eq!(outermost.sum::<i64>() + summary.outside(), signed(summary.in_use));
        assert_eq!(summary.in_use + summary.cache(), after.bytes_reserved);
        if is_on_cuda() {
            let on_device = |kind: &LiveMemory| kind.kind.is_on_device().then_some(kind.bytes.get());
            let driver: u64 = gpumem::status().live.iter().filter_map(on_device).sum();
            println!("driver {driver}, burn's pages {}", after.bytes_reserved);
            assert_eq!(driver, after.bytes_reserved, "what the driver handed out");
        }
    }
    print!("{}", now(&device));
}

#[test]
fn a_peak_is_exact_if_nothing_is_freed_and_between_its_bounds_otherwise() {
    let test = Test::start();
    let device = test.device.clone();
    let start = usage(&device).bytes_in_use;
    let kept = scope(&device, "keeps", || [tensor(&device, 3), tensor(&device, 5)]);
    let call = last(&device, "keeps");
    assert_eq!(call.used, 8 << 20);
    assert_eq!(call.peak.at_least, start + (8 << 20));
    println!("keeps: {call:?}");
    assert_eq!(call.largest, 5 << 20);
    drop(kept);

    let start = usage(&device).bytes_in_use;
    scope(&device, "frees", || {
        let first = tensor(&device, 8);
        device.sync().unwrap();
        drop(first);
        device.sync().unwrap();
        let _second = tensor(&device, 4);
        device.sync().unwrap();
    });
    let call = last(&device, "frees");
    println!("frees: {call:?}");
    assert_eq!(call.used, 0);
    let most = call.peak.at_most.expect("the layer is installed");
    assert!((start + (8 << 20)..=start + (12 << 20) + (1 << 16)).contains(&most), "{start} {call:?}");
    assert_eq!(call.peak.at_least, start);
}

/// Autotune tries several kernels, and allocates its own memory for that.
#[test]
fn no_reading_is_above_the_bound() {
    let test = Test::start();
    let device = test.device.clone();
    let is_over = AtomicBool::new(false);
    let highest = thread::scope(|threads| {
        let reader = threads.spawn(|| {
            let mut highest = 0;
            while !is_over.load(Ordering::Relaxed) {
                highest = highest.max(device.memory_pool_usage().unwrap().bytes_in_use);
                thread::sleep(Duration::from_micros(100));
            }
            highest
        });
        scope(&device, "tuned", || matmuls(&device, 192));
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    let call = last(&device, "tuned");
    println!("tuned: read {highest}, {call:?}");
    assert!(call.reservations > 4, "{call:?}");
    assert!(call.peak.at_most.is_some_and(|most| highest <= most), "{highest} {call:?}");
}

#[test]
fn a_second_thread_is_not_measured_while_the_first_has_a_scope() {
    let test = Test::start();
    let device = test.device.clone();
    let unmeasured = now(&device).unmeasured;
    let kept = scope(&device, "first", || {
        let on_second = || scope(&device, "second", || (tensor(&device, 6), device.sync().unwrap()).0);
        thread::scope(|threads| threads.spawn(on_second).join().unwrap())
    });
    let summary = now(&device);
    assert_eq!(summary.unmeasured, unmeasured + 1);
    assert!(summary.rows.iter().all(|row| row.path.last().unwrap() != "second"));
    assert_eq!(last(&device, "first").used, 6 << 20, "what the second thread allocated counts for the device");
    drop(kept);

    let kept =
        thread::scope(|threads| threads.spawn(|| scope(&device, "alone", || tensor(&device, 2))).join().unwrap());
    assert_eq!(last(&device, "alone").used, 2 << 20);
    drop(kept);
}

#[test]
fn pages_of_the_driver_count_for_the_scope() {
    let test = Test::start();
    let device = test.device.clone();
    if !is_on_cuda() {
        println!("skipped: wgpu's pages are not seen");
        return;
    }
    let trace = GpuMemTrace::builder().device(0).silent(true).adopt(Threads::named("DSD-")).start().unwrap();
    let kept = scope(&device, "large", || tensor(&device, 700));
    let pages = trace.data().used.get();
    assert!(pages >= 700 << 20, "{pages}");
    let summary = gpumem::summary().to_string();
    println!("{summary}");
    assert!(summary.contains("large"), "{summary}");
    drop(kept);
}
