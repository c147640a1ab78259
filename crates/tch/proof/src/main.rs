//! Compares gpumem's values for tensors with PyTorch's: used and peak of each scope, to the byte.
//!
//! `gpumem-tch-proof NAME` runs one test, and prints PASS or FAIL and the differences. `run.sh` runs all of them.

use std::{
    env,
    ffi::c_void,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Instant,
};

use gpumem::GpuMemTrace;
use tch::{
    Device, Kind, Reduction, Tensor,
    nn::{self, Module, OptimizerConfig},
};

unsafe extern "C" {
    fn proof_stats(device: i32, to: *mut i64);
    fn proof_reset_peak(device: i32);
    fn proof_alloc(bytes: usize, on_other_stream: bool) -> *mut c_void;
    fn proof_free(memory: *mut c_void);
    fn proof_use_elsewhere(memory: *mut c_void, bytes: usize);
    fn proof_begin_pool(device: i32, number: u64);
    fn proof_end_pool(device: i32, number: u64);
    fn proof_release_pool(device: i32, number: u64);
}

const MIB: usize = 1 << 20;

/// PyTorch's statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stats {
    allocated: i64,
    peak: i64,
    reserved: i64,
}

fn stats() -> Stats {
    let mut to = [0; 3];
    // SAFETY: the function writes three numbers.
    unsafe { proof_stats(0, to.as_mut_ptr()) };
    Stats { allocated: to[0], peak: to[1], reserved: to[2] }
}

fn reset_peak() {
    // SAFETY: device 0 exists.
    unsafe { proof_reset_peak(0) }
}

/// The memory of a tensor.
struct TensorMemory {
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: PyTorch's memory may be freed on any thread.
unsafe impl Send for TensorMemory {}

impl TensorMemory {
    fn new(bytes: usize, on_other_stream: bool) -> Self {
        // SAFETY: any size may be requested.
        Self { pointer: unsafe { proof_alloc(bytes, on_other_stream) }, bytes }
    }

    fn use_elsewhere(&self) {
        // SAFETY: the memory is live and has this number of bytes.
        unsafe { proof_use_elsewhere(self.pointer, self.bytes) }
    }
}

impl Drop for TensorMemory {
    fn drop(&mut self) {
        // SAFETY: `proof_alloc` returned the pointer, and it is freed once.
        unsafe { proof_free(self.pointer) }
    }
}

/// A random generator that returns the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// Returns a small or large size. Many are just below the size of a segment, so that PyTorch does not split off the rest.
    fn size(&mut self) -> usize {
        let bytes = match self.below(4) {
            0 => self.below(2 * MIB as u64),
            1 => self.below(24 * MIB as u64),
            2 => (2 + 2 * self.below(16)) * MIB as u64 - self.below(MIB as u64 + 512),
            _ => self.below(4096),
        };
        bytes as usize + 1
    }
}

/// The differences between gpumem and PyTorch, and the number of comparisons.
#[derive(Default)]
struct Verdict {
    compared: u64,
    wrong: Vec<String>,
}

impl Verdict {
    fn equal(&mut self, what: &str, gpumem: i64, pytorch: i64) {
        self.compared += 1;
        if gpumem != pytorch {
            self.wrong.push(format!("{what}: gpumem {gpumem}, PyTorch {pytorch}"));
        }
    }

    /// Runs `code` in a scope, and compares used and peak of the scope with PyTorch's.
    fn scope<R>(&mut self, name: &str, code: impl FnOnce(&mut Self) -> R) -> R {
        reset_peak();
        let trace = GpuMemTrace::builder().ctx(name).silent(true).start().expect("the trace starts");
        let before = stats();
        let result = code(self);
        let (data, after) = (trace.data(), stats());
        self.equal(&format!("{name}: used"), data.used.get(), after.allocated - before.allocated);
        self.equal(&format!("{name}: peak"), data.peak_over_start().get().cast_signed(), after.peak - before.allocated);
        self.equal(&format!("{name}: lost"), data.lost.cast_signed(), 0);
        drop(trace);
        result
    }

    /// Checks that the pool has the same memory as PyTorch now.
    fn now(&mut self, name: &str) {
        let stats = stats();
        // A pool without memory is not listed.
        let pool = gpumem::summary().pools.into_iter().find(|pool| pool.device == 0);
        let of = |bytes: Option<gpumem::Bytes>| bytes.map_or(0, |bytes| bytes.get().cast_signed());
        self.equal(&format!("{name}: live"), of(pool.as_ref().map(|pool| pool.used)), stats.allocated);
        self.equal(&format!("{name}: reserved"), of(pool.as_ref().map(|pool| pool.reported)), stats.reserved);
        let wrong = pool.map_or(0, |pool| pool.wrong_calls());
        self.equal(&format!("{name}: wrong calls"), wrong.cast_signed(), 0);
    }
}

/// Allocates and frees memory of all sizes.
fn play(random: &mut Random, held: &mut Vec<TensorMemory>, steps: usize, has_streams: bool) {
    for _ in 0..steps {
        if held.len() > 40 || (!held.is_empty() && random.below(2) == 0) {
            let at = random.below(held.len() as u64) as usize;
            let memory = held.swap_remove(at);
            if has_streams && random.below(3) == 0 {
                memory.use_elsewhere();
            }
        } else {
            held.push(TensorMemory::new(random.size(), has_streams && random.below(3) == 0));
        }
        if random.below(500) == 0 {
            gpumem_tch::empty_cache().expect("the cache is emptied");
        }
    }
}

fn random(verdict: &mut Verdict, has_streams: bool) {
    let (mut random, mut held) = (Random(1), Vec::new());
    for round in 0..200 {
        verdict.scope(&format!("round {round}"), |_| play(&mut random, &mut held, 50, has_streams));
        verdict.now(&format!("round {round}"));
    }
    drop(held);
    gpumem_tch::empty_cache().expect("the cache is emptied");
    verdict.now("after empty_cache");
}

fn train(verdict: &mut Verdict) {
    let variables = nn::VarStore::new(Device::Cuda(0));
    let mut model = nn::seq();
    for (at, pair) in [512, 4096, 4096, 4096, 4096, 512].windows(2).enumerate() {
        if at > 0 {
            model = model.add_fn(Tensor::relu);
        }
        model = model.add(nn::linear(variables.root() / at, pair[0], pair[1], Default::default()));
    }
    let mut optimizer = nn::AdamW::default().build(&variables, 1e-4).expect("the optimizer is built");
    let mut random = Random(7);
    for step in 0..102 {
        let batch = if step % 2 == 0 { 256 } else { 100 + random.below(400).cast_signed() };
        let x = Tensor::randn([batch, 512], (Kind::Float, Device::Cuda(0)));
        let mut ignored = Verdict::default();
        // In the first steps, the libraries allocate their own memory from the driver, which PyTorch does not count.
        let verdict = if step < 2 { &mut ignored } else { &mut *verdict };
        let loss = verdict.scope("forward", |_| model.forward(&x).mse_loss(&x, Reduction::Mean));
        verdict.scope("backward", |_| {
            optimizer.zero_grad();
            loss.backward();
        });
        verdict.scope("optimizer", |_| optimizer.step());
        verdict.now("step");
    }
    // The memory of the autograd thread counts for the scope that waits for it.
    let backward = gpumem::summary().scopes.iter().any(|scope| scope.path == ["backward"]);
    verdict.equal("backward is a scope", backward.into(), 1);
}

/// Uses private pools, as CUDA graphs and `MemPool` do.
fn pools(verdict: &mut Verdict) {
    let (mut random, mut held) = (Random(3), Vec::new());
    for number in 1..=20 {
        verdict.scope(&format!("pool {number}"), |verdict| {
            // SAFETY: `proof_end_pool` and `proof_release_pool` are called for this pool below.
            unsafe { proof_begin_pool(0, number) };
            for _ in 0..30 {
                held.push(TensorMemory::new(random.size(), false));
                if random.below(2) == 0 {
                    held.swap_remove(random.below(held.len() as u64) as usize);
                }
            }
            // SAFETY: `proof_begin_pool` was called for this pool.
            unsafe { proof_end_pool(0, number) };
            verdict.now("in a pool");
            if number % 2 == 0 {
                held.clear();
            }
            // SAFETY: `proof_end_pool` was called for this pool.
            unsafe { proof_release_pool(0, number) };
        });
        gpumem_tch::empty_cache().expect("the cache is emptied");
        verdict.now("after a pool");
    }
}

/// Runs threads that allocate at the same time. With `is_late`, the main thread calls `observe` while they run.
fn threads(verdict: &mut Verdict, is_late: bool) {
    let stop = AtomicBool::new(!is_late);
    let run = |seed: u64| {
        let (mut random, mut held) = (Random(seed), Vec::new());
        loop {
            play(&mut random, &mut held, 2000, true);
            if stop.load(Relaxed) {
                return held;
            }
        }
    };
    let run = &run;
    let all = thread::scope(|scope| {
        let threads: Vec<_> = (1..=8).map(|seed| scope.spawn(move || run(seed))).collect();
        if is_late {
            thread::sleep(std::time::Duration::from_millis(50));
            gpumem_tch::observe().expect("PyTorch is observed");
            stop.store(true, Relaxed);
        }
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect::<Vec<_>>()
    });
    verdict.now("after the threads");
    drop(all);
    gpumem_tch::empty_cache().expect("the cache is emptied");
    verdict.now("after empty_cache");
}

/// Makes PyTorch initialise its allocator.
fn init() {
    drop(Tensor::zeros([1], (Kind::Float, Device::Cuda(0))));
}

fn late(verdict: &mut Verdict) {
    gpumem::preload();
    init();
    let (mut random, mut held) = (Random(5), Vec::new());
    play(&mut random, &mut held, 2000, true);
    gpumem_tch::observe().expect("PyTorch is observed");
    gpumem_tch::observe().expect("a second call does nothing");
    verdict.now("after observe");
    verdict.scope("further", |_| play(&mut random, &mut held, 1000, true));
    verdict.scope("drop", |_| drop(held));
    verdict.now("after drop");
}

/// Returns the nanoseconds that it takes to allocate and free memory from the cache, and to create and drop a tensor.
fn cost() -> (f64, f64) {
    let time = |code: &mut dyn FnMut()| {
        let mut best = f64::MAX;
        for _ in 0..20 {
            let started = Instant::now();
            (0..10_000).for_each(|_| code());
            best = best.min(started.elapsed().as_nanos() as f64 / 10_000.0);
        }
        best
    };
    let memory = time(&mut || drop(TensorMemory::new(4 * MIB, false)));
    let tensor = time(&mut || drop(Tensor::empty([MIB as i64], (Kind::Float, Device::Cuda(0)))));
    (memory, tensor)
}

fn main() -> ExitCode {
    let name = env::args().nth(1).unwrap_or_default();
    let mut verdict = Verdict::default();
    let mut info = String::new();
    let observe = || gpumem_tch::observe().expect("PyTorch is observed");
    match name.as_str() {
        "train" => (observe(), train(&mut verdict)).1,
        "random" => (observe(), random(&mut verdict, false)).1,
        "streams" => (observe(), random(&mut verdict, true)).1,
        "pools" => (observe(), pools(&mut verdict)).1,
        "threads" => (observe(), threads(&mut verdict, false)).1,
        "late" => late(&mut verdict),
        "late-threads" => {
            gpumem::preload();
            init();
            threads(&mut verdict, true);
        }
        "too-late" => {
            init();
            let memory = TensorMemory::new(64 * MIB, false);
            info = format!("{:?}", gpumem_tch::observe());
            verdict.equal("too late", i64::from(info.contains("before the first tensor")), 1);
            drop(memory);
        }
        "other" => {
            info = format!("{:?}", gpumem_tch::observe());
            verdict.equal("another allocator", i64::from(info.contains("cudaMallocAsync")), 1);
            init();
            gpumem_tch::empty_cache().expect("the cache is emptied");
        }
        "no-cuda" => {
            info = format!("{:?}", gpumem_tch::observe());
            verdict.equal("no device", i64::from(info.contains("no CUDA device")), 1);
        }
        "cost" => {
            init();
            let before = cost();
            gpumem_tch::empty_cache().expect("the cache is emptied");
            observe();
            let after = cost();
            info = format!(
                "ns for taking and giving back: memory {:.0} before, {:.0} observed; a tensor {:.0} before, {:.0} observed",
                before.0, after.0, before.1, after.1
            );
            verdict.compared = 1;
        }
        _ => {
            eprintln!(
                "name one of train, random, streams, pools, threads, late, late-threads, too-late, other, no-cuda, cost"
            );
            return ExitCode::FAILURE;
        }
    }
    let is_right = verdict.wrong.is_empty() && verdict.compared > 0;
    println!(
        "{} {name}: {} comparisons, {} differ {info}",
        if is_right { "PASS" } else { "FAIL" },
        verdict.compared,
        verdict.wrong.len()
    );
    verdict.wrong.iter().take(10).for_each(|wrong| println!("    {wrong}"));
    if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
