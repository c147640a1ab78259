//! Tests that `main.rs` runs in other processes, one module at a time. In a process that was not started for a [`part`], they do
//! nothing.

use std::sync::{Barrier, LazyLock, Mutex, mpsc};
use std::thread;

use gpumem::sim::{SimBlock, SimGpu};
use gpumem::{Bytes, GpuMemTrace, assert_gpu_mem, gpu_mem_test, gpu_mem_trace};
use gpumem_tests::part;

fn take(mib: u64) -> SimBlock {
    gpumem::__private::simulated_gpu().alloc(Bytes::mib(mib)).expect("there is room")
}

/// Calls `run` only if the process was started for a part of a test.
fn in_part(run: impl FnOnce()) {
    if part().is_some() {
        // A budget of a block of code needs a device when it starts.
        gpumem::__private::simulated_gpu();
        run();
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads without names that take jobs, like rayon's.
struct ThreadPool {
    jobs: Mutex<mpsc::Sender<Job>>,
}

impl ThreadPool {
    fn new(threads: usize) -> Self {
        let (jobs, taken) = mpsc::channel::<Job>();
        let taken = std::sync::Arc::new(Mutex::new(taken));
        for _ in 0..threads {
            let taken = std::sync::Arc::clone(&taken);
            thread::spawn(move || {
                loop {
                    let job = taken.lock().expect("no job panics with it").recv();
                    let Ok(job) = job else { return };
                    job();
                }
            });
        }
        Self { jobs: Mutex::new(jobs) }
    }

    /// Runs the job `count` times, on all threads at the same time.
    fn run(&self, count: usize, job: fn()) {
        let (done, all) = mpsc::channel();
        for _ in 0..count {
            let done = done.clone();
            let job = move || {
                job();
                _ = done.send(());
            };
            self.jobs.lock().expect("nothing panics with it").send(Box::new(job)).expect("the threads live on");
        }
        drop(done);
        assert_eq!(all.iter().count(), count);
    }
}

/// Each of the four threads takes two of eight jobs.
fn in_a_pool() {
    static FOUR: LazyLock<Barrier> = LazyLock::new(|| Barrier::new(4));
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    ThreadPool::new(4).run(8, || {
        let block = take(256);
        FOUR.wait();
        drop(block);
        // No thread allocates another block before all threads have dropped this one.
        FOUR.wait();
    });
}

mod pool {
    use super::*;

    #[gpu_mem_test(max_peak = "1 MB")]
    fn of_a_test() {
        in_part(in_a_pool);
    }

    #[gpu_mem_trace(max_peak = "1 MB", silent)]
    fn spawns() {
        thread::spawn(|| drop(take(1024))).join().expect("it runs");
    }

    #[test]
    fn of_a_function() {
        in_part(spawns);
    }

    #[gpu_mem_trace(max_peak = "1 MB", thread_local, silent)]
    fn counts_one() {
        in_a_pool();
    }

    #[test]
    fn of_one_thread_only() {
        in_part(counts_one);
    }

    #[gpu_mem_test]
    fn without_a_limit() {
        in_part(in_a_pool);
    }

    #[gpu_mem_test(max_peak = "1 MB")]
    fn over_the_limit() {
        in_part(|| {
            let _own = take(2);
            in_a_pool();
        });
    }

    #[gpu_mem_test(max_peak = "1 MB")]
    fn that_panics() {
        in_part(|| {
            in_a_pool();
            panic!("its own panic");
        });
    }
}

mod named {
    use super::*;

    #[gpu_mem_test(max_peak = "1 MB")]
    fn a_loader() {
        in_part(|| {
            let load = || drop(take(1024));
            thread::Builder::new().name("loader".to_owned()).spawn(load).expect("a thread").join().expect("it runs");
        });
    }

    #[test]
    fn a_framework() {
        in_part(|| {
            let (jobs, taken) = mpsc::channel::<mpsc::Sender<()>>();
            let serve = move || {
                for done in taken {
                    drop(take(64));
                    _ = done.send(());
                }
            };
            thread::Builder::new().name("DSD-0-0".to_owned()).spawn(serve).expect("a thread");
            assert_gpu_mem!(peak == 0, {
                let (done, is_done) = mpsc::channel();
                jobs.send(done).expect("it listens");
                is_done.recv().expect("it answers");
            });
        });
    }
}

/// A barrier at which two tests of a process wait for each other.
static BOTH: LazyLock<Barrier> = LazyLock::new(|| Barrier::new(2));

mod beside {
    use super::*;

    #[gpu_mem_trace(silent)]
    fn traced() {
        drop(take(512));
        let trace = GpuMemTrace::builder().silent(true).start().expect("a simulated device");
        let handle = trace.handle();
        let in_scope = move || handle.in_scope(|| drop(take(512)));
        thread::Builder::new().name("worker".to_owned()).spawn(in_scope).expect("a thread").join().expect("it runs");
    }

    #[gpu_mem_test(max_peak = "1 MB", leaks = 0)]
    fn with_a_budget() {
        in_part(|| {
            BOTH.wait();
            BOTH.wait();
            drop(take(1));
        });
    }

    #[test]
    fn without_a_budget() {
        in_part(|| {
            BOTH.wait();
            drop(take(512));
            thread::spawn(|| drop(take(512))).join().expect("it runs");
            thread::scope(|threads| {
                threads.spawn(|| drop(take(512)));
            });
            traced();
            BOTH.wait();
        });
    }
}

mod pool_of_another {
    use super::*;

    static POOL: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::new(1));

    fn work() {
        drop(take(64));
    }

    #[test]
    fn begins_the_pool() {
        in_part(|| {
            POOL.run(1, work);
            BOTH.wait();
            BOTH.wait();
        });
    }

    #[gpu_mem_test(max_peak = "1 MB")]
    fn uses_the_pool() {
        in_part(|| {
            BOTH.wait();
            POOL.run(1, work);
            BOTH.wait();
        });
    }
}

mod traced_worker {
    use super::*;

    #[gpu_mem_trace(silent)]
    fn traced() {
        drop(take(64));
    }

    #[gpu_mem_test(max_peak = "1 MB")]
    fn with_a_trace() {
        in_part(|| {
            thread::spawn(|| {
                traced();
            })
            .join()
            .expect("it runs");
        });
    }
}

/// The tests of this module run at the same time, but a test whose budget counts all threads waits until no other test with a
/// budget runs.
mod all {
    use super::*;

    #[gpu_mem_test(max_peak = "2 GB", max_used = 0, leaks = 0, threads = "all")]
    fn kept() {
        in_part(|| assert_gpu_mem!(peak == "1 GiB", threads = "all", { in_a_pool() }));
    }

    #[gpu_mem_test(max_peak = "100 MB", threads = "all")]
    fn broken() {
        in_part(|| {
            let _one = take(1024);
            in_a_pool();
        });
    }

    #[gpu_mem_test(leaks = 0, threads = "all")]
    fn leaks() {
        in_part(|| thread::spawn(|| std::mem::forget(take(1))).join().expect("it runs"));
    }

    #[test]
    fn of_an_assertion() {
        in_part(|| {
            let kept = assert_gpu_mem!(threads = "all", peak == "1 GiB", used == "3 MiB", leaks == 1, {
                in_a_pool();
                thread::spawn(|| take(3)).join().expect("it runs")
            });
            // The block is freed inside a budget, because another test that counts all threads would notice the free otherwise.
            assert_gpu_mem!(threads = "all", used == "-3 MiB", { drop(kept) });
        });
    }

    /// A trace of another thread does not change the numbers of this budget.
    #[gpu_mem_test(max_peak = "1 GB", threads = "all")]
    fn beside_a_trace() {
        in_part(|| {
            let traced = || {
                let _trace = GpuMemTrace::builder().silent(true).start().expect("a simulated device");
                drop(take(7));
            };
            assert_gpu_mem!(threads = "all", peak == "7 MiB", { thread::spawn(traced).join().expect("it runs") });
        });
    }

    /// The budget of this test makes it wait, because another test would count the memory that it uses.
    #[gpu_mem_test(max_peak = "512 MB", leaks = 0)]
    fn waits() {
        in_part(|| {
            for _ in 0..100 {
                drop(take(512));
            }
        });
    }

    /// The budget of the test counts one thread. The budget inside it counts all threads.
    #[gpu_mem_test(max_peak = "5 MB")]
    fn nested() {
        in_part(|| {
            for _ in 0..10 {
                assert_gpu_mem!(threads = "all", peak == "5 MiB", { drop(take(5)) });
            }
        });
    }
}

mod all_disturbed {
    use super::*;

    #[gpu_mem_test(max_peak = "1 GB", threads = "all")]
    fn counts_all() {
        in_part(|| {
            BOTH.wait();
            BOTH.wait();
        });
    }

    #[test]
    fn without_a_budget() {
        in_part(|| {
            BOTH.wait();
            drop(take(3));
            BOTH.wait();
        });
    }
}

mod devices {
    use super::*;

    fn second() -> SimGpu {
        static SECOND: LazyLock<SimGpu> = LazyLock::new(|| {
            gpumem::__private::simulated_gpu();
            SimGpu::install(Bytes::gib(1)).expect("GPUMEM_SIM is not set")
        });
        SECOND.make_current();
        SECOND.clone()
    }

    #[gpu_mem_test(max_peak = "1 MB")]
    fn of_the_first() {
        in_part(|| drop(second().alloc(Bytes::mib(512))));
    }

    #[gpu_mem_trace(max_peak = "512 MB", device = 1, silent)]
    fn on_the_second() {
        drop(second().alloc(Bytes::mib(512)));
    }

    #[test]
    fn named() {
        in_part(|| {
            _ = second();
            gpumem::__private::simulated_gpu();
            on_the_second();
        });
    }
}
