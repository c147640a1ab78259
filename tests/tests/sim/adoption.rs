//! Tests threads without a scope whose allocations count for a scope of another thread. A scope can adopt any thread of the
//! process. Therefore each test uses thread names that no other test uses, or runs in a separate process.

use std::{
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

use gpumem::{
    Bytes, GpuMemTrace, GpuMemTraceBuilder, assert_gpu_mem, gpu_mem_trace,
    pool::Pool,
    scope::Threads,
    sim::{SimBlock, SimGpu},
};
use gpumem_tests::{OwnProcess, part, reported_lines, simulated_gpu};

fn take(gpu: &SimGpu, mib: u64) -> SimBlock {
    gpu.alloc(Bytes::mib(mib)).expect("the device has room")
}

/// Returns the builder of a silent trace of the calling thread. The device is explicit, because the current device of a new
/// thread is device 0.
fn quiet(gpu: &SimGpu, ctx: &str) -> GpuMemTraceBuilder {
    GpuMemTrace::builder().ctx(ctx).device(gpu.ordinal()).silent(true).thread_local_only()
}

/// A thread that runs the jobs sent to it, like a thread of a pool or the device thread of a framework.
struct Worker {
    jobs: Option<mpsc::Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn new(name: &str) -> Self {
        let (jobs, received) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let run = move || received.into_iter().for_each(|job| job());
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run).unwrap();
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (done, result) = mpsc::channel();
        self.jobs.as_ref().unwrap().send(Box::new(move || _ = done.send(job()))).unwrap();
        result.recv().unwrap()
    }

    fn take(&self, gpu: &SimGpu, mib: u64) -> SimBlock {
        let gpu = gpu.clone();
        self.run(move || take(&gpu, mib))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// For a part of a pool, gpumem looks up the name of the thread as it does for an allocation of the driver.
#[test]
fn parts_of_a_pool_on_an_adopted_thread_count() {
    let gpu = simulated_gpu();
    let pool = Arc::new(Pool::register("parts", gpu.ordinal()).unwrap());
    let block = take(&gpu, 100);
    pool.set_reserved(Bytes::mib(100));
    let step = quiet(&gpu, "step").adopt(Threads::named("parts-DSD-")).start().unwrap();
    let (device, of_thread, address) = (Worker::new("parts-DSD-0"), Arc::clone(&pool), block.address());
    device.run(move || of_thread.allocated(address, Bytes::mib(20)));
    assert_eq!((step.data().used.mb(), step.data().shared), (20, Bytes::ZERO));
}

#[test]
fn two_threads_that_adopt_the_same_threads_say_so() {
    let gpu = simulated_gpu();
    let worker = Worker::new("both-0");
    let first = GpuMemTrace::builder().ctx("first").thread_local_only().adopt(Threads::named("both-")).start().unwrap();
    let _mine = worker.take(&gpu, 1);
    let others = Worker::new("opens").run({
        let worker = worker.jobs.clone().unwrap();
        let gpu = gpu.clone();
        move || {
            let second = quiet(&gpu, "second").adopt(Threads::named("both-")).start().unwrap();
            let (done, block) = mpsc::channel();
            worker.send(Box::new(move || _ = done.send(take(&gpu, 2)))).unwrap();
            (block.recv().unwrap(), second.data().used.mb(), second.data().shared.mb())
        }
    });
    assert_eq!((others.1, others.2), (2, 2));
    drop(first);
    assert_eq!(reported_lines(), ["△Used Peaked MB:      1      0 (first: exit) [2 MiB by threads in no scope]"]);
}

/// A task waits for work on tokio's blocking threads. The code of that work does not have to change.
#[test]
fn blocking_work_of_tokio_counts_for_the_task_that_waits_for_it() {
    let gpu = simulated_gpu();
    let runtime = tokio::runtime::Builder::new_current_thread().thread_name("blocking-of-it").build().unwrap();
    let load = {
        let gpu = gpu.clone();
        async move {
            let (first, second) = (gpu.clone(), gpu.clone());
            let first = tokio::task::spawn_blocking(move || take(&first, 10)).await.unwrap();
            let second = tokio::task::spawn_blocking(move || take(&second, 20)).await.unwrap();
            [first, second]
        }
    };
    let ctx = GpuMemTrace::builder().ctx("load").adopt(Threads::named("blocking-of-it")).stats();
    let blocks = runtime.block_on(ctx.wrap(load));
    let rows = gpumem::summary().scopes;
    let load = rows.iter().find(|row| row.device == gpu.ordinal() && row.path == ["load"]).unwrap();
    assert_eq!((load.used.mb(), load.allocations), (30, 2));
    let stats = gpumem::stats().names;
    let row = stats.iter().find(|row| row.device == gpu.ordinal()).expect("the trace has ended");
    assert_eq!(row.measured.as_ref().expect("it was measured").used.max.mb(), 30);
    drop(blocks);
}

#[gpu_mem_trace(thread_local)]
fn step(gpu: &SimGpu, worker: &Worker) -> SimBlock {
    worker.take(gpu, 6)
}

/// `GPUMEM_ADOPT` applies to the attribute and to budgets as well.
#[test]
fn the_variable_adopts_for_all_scopes() {
    let test = "adoption::the_variable_adopts_for_all_scopes";
    let Some(threads) = part() else {
        for (adopt, part) in [("*", "all"), ("DSD-", "all"), ("XYZ-", "none")] {
            OwnProcess::new(test).part(part).env("GPUMEM_ADOPT", adopt).passes();
        }
        return;
    };
    let gpu = simulated_gpu();
    let worker = Worker::new("DSD-0-0");
    let _kept = step(&gpu, &worker);
    let used = if threads == "all" { 6 } else { 0 };
    assert_eq!(reported_lines(), [format!("△Used Peaked MB: {used:>6}      0 (step: exit)")]);
    let budget = || {
        let _kept = worker.take(&gpu, 6);
    };
    let kept = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| assert_gpu_mem!(peak == "6MiB", { budget() })));
    assert_eq!(kept.is_ok(), threads == "all");
}
