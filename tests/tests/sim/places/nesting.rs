//! Tests scopes that tasks, threads and handles carry to other places of the program.

use super::*;

#[test]
fn a_trace_of_a_task_counts_its_own_polls() {
    let gpu = simulated_gpu();
    let task = |bytes: u64| {
        let settings = GpuMemTrace::builder().ctx("task that takes turns").device(gpu.ordinal()).stats();
        let gpu = gpu.clone();
        settings.wrap(async move {
            let kept = take(&gpu, bytes);
            Yield::default().await;
            drop(take(&gpu, 10 * bytes));
            Yield::default().await;
            kept
        })
    };
    let (small, (large, medium)) = pollster::block_on(join(task(1), join(task(100), task(10))));
    drop((small, large, medium));
    let row = gpumem::stats().names.into_iter().find(|row| row.device == gpu.ordinal()).unwrap();
    let measured = row.measured.unwrap();
    assert_eq!((row.calls, row.shared, measured.sum.get()), (3, 0, 111));
    assert_eq!((measured.used.min.get(), measured.used.max.get()), (1, 100));
    assert_eq!((measured.peaked.min.get(), measured.peaked.max.get()), (10, 1000));
}

#[test]
fn a_task_that_moves_between_threads_stays_in_its_scope() {
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("request");
    let of_task = gpu.clone();
    let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(trace.handle().wrap(async move {
        let mut kept = Vec::new();
        for size in [1, 10, 100] {
            kept.push(take(&of_task, size));
            Yield::default().await;
        }
        // The blocks are dropped here, inside the scope.
    }));
    let mut kept = Vec::new();
    loop {
        let (polled, own) = thread::scope(|threads| {
            let poll = || {
                gpu.make_current();
                let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                (polled, take(&gpu, 1000))
            };
            threads.spawn(poll).join().expect("it does not panic")
        });
        kept.push(own);
        if polled.is_ready() {
            break;
        }
    }
    let own = 1000 * kept.len() as u64;
    assert_eq!(kept.len(), 4);
    check_scopes(&gpu, &[("", own + 111, own), ("request", 111, 0)]);
}

#[gpu_mem_trace]
async fn alpha(gpu: &SimGpu) -> Vec<SimBlock> {
    let first = take(gpu, 1);
    Yield::default().await;
    vec![first, take(gpu, 2)]
}

#[gpu_mem_trace]
async fn beta(gpu: &SimGpu) -> Vec<SimBlock> {
    let first = take(gpu, 10);
    Yield::default().await;
    let inner = alpha(gpu).await;
    Yield::default().await;
    [vec![first, take(gpu, 20)], inner].into_iter().flatten().collect()
}

#[gpu_mem_trace]
async fn both(gpu: &SimGpu) -> (Vec<SimBlock>, Vec<SimBlock>) {
    join(alpha(gpu), beta(gpu)).await
}

#[test]
fn traced_async_functions_that_are_joined_have_their_own() {
    let gpu = simulated_gpu();
    let kept = pollster::block_on(both(&gpu));
    let between = take(&gpu, 1000);
    check_scopes(
        &gpu,
        &[("", 1036, 1036), ("both", 36, 36), ("both/alpha", 3, 3), ("both/beta", 33, 33), ("both/beta/alpha", 3, 3)],
    );
    // A future that is dropped before its end leaves its scope too.
    {
        let mut dropped = pin!(alpha(&gpu));
        assert!(dropped.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let after = take(&gpu, 1);
    assert_eq!((scopes(&gpu)["alpha"].calls, scopes(&gpu)["alpha"].used), (1, Bytes::ZERO));
    assert_eq!(scopes(&gpu)[""].used.get(), 1037);
    drop((kept, between, after));
}

#[test]
fn a_handle_that_outlives_its_trace() {
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("closed");
    let handle = trace.handle();
    let (before, after) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|threads| {
        let inside = threads.spawn(|| {
            gpu.make_current();
            let entered = handle.enter();
            before.wait();
            after.wait();
            // The scope is closed, but this thread stays in it until it leaves.
            let inside = take(&gpu, 1);
            drop(entered);
            (inside, take(&gpu, 10))
        });
        before.wait();
        drop(trace);
        after.wait();
        drop(inside.join().expect("it does not panic"));
    });
    check_scopes(&gpu, &[("", 11, 0), ("closed", 1, 0)]);
    // Entering a closed scope has no effect.
    let outer = GpuMemTrace::with_ctx("outer");
    let block = handle.in_scope(|| take(&gpu, 100));
    let of_task = pollster::block_on(handle.wrap(async { take(&gpu, 200) }));
    drop(outer);
    check_scopes(&gpu, &[("", 311, 300), ("closed", 1, 0), ("outer", 300, 300)]);
    drop((block, of_task));
    // The same holds for a trace that is off.
    let off = GpuMemTrace::builder().device(u32::MAX).ctx("off").start_or_off();
    drop(off.handle().in_scope(|| take(&gpu, 5)));
    assert_eq!(scopes(&gpu)[""].allocated.get(), 316);
    assert!(!scopes(&gpu).contains_key("off"));
}
