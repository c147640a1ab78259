//! Tests which memory counts in the numbers of a function.

use super::*;

fn take(gpu: usize, mib: u64) -> SimBlock {
    gpus()[gpu].alloc(Bytes::mib(mib)).expect("there is room")
}

#[gpu_mem_trace]
fn forward(input: SimBlock) -> SimBlock {
    let _scratch = take(1, 512);
    drop(input);
    take(1, 20)
}

#[gpu_mem_trace(device = 1)]
fn on_device_1() -> [SimBlock; 2] {
    drop(take(1, 7));
    [take(0, 100), take(1, 3)]
}

#[gpu_mem_trace]
async fn across_await() -> SimBlock {
    let scratch = take(1, 30);
    Yield::default().await;
    drop(scratch);
    take(1, 10)
}

#[gpu_mem_trace]
fn by_hand(input: SimBlock) -> impl Future<Output = Bytes> {
    async move { input.bytes() }
}

#[gpu_mem_trace]
async fn moves(input: SimBlock) {
    drop(input);
    Yield::default().await;
}

#[test]
fn are_those_of_the_function() {
    // Only this test uses device 1, so no other test sees the memory that is kept between two of these reports.
    gpus()[1].make_current();
    let input = take(1, 10);
    assert_eq!(lines(|| forward(input)), ["△Used Peaked MB:     10    512 (forward: exit)"]);
    assert_eq!(lines(on_device_1), ["△Used Peaked MB:      3      4 (on_device_1: exit)"]);
    assert_eq!(lines(|| block_on(across_await())), ["△Used Peaked MB:     10     20 (across_await: exit)"]);

    // An argument that the body does not move is dropped after the report. `tests/shapes` has functions and `async fn`.
    let input = take(1, 10);
    assert_eq!(lines(|| block_on(by_hand(input))), ["△Used Peaked MB:      0      0 (by_hand: exit)"]);
    // The free of older memory counts for the task that frees it.
    let input = take(1, 10);
    assert_eq!(lines(|| block_on(moves(input))), ["△Used Peaked MB:    -10      0 (moves: exit)"]);

    let mut context = Context::from_waker(Waker::noop());
    let mut cancelled = Box::pin(across_await());
    let started = lines(|| assert!(cancelled.as_mut().poll(&mut context).is_pending()));
    assert!(started.is_empty());
    assert_eq!(lines(|| drop(cancelled)), ["△Used Peaked MB:      0     30 (across_await: exit)"]);

    let mut ended = Box::pin(across_await());
    let reported = lines(|| while ended.as_mut().poll(&mut context).is_pending() {});
    assert_eq!(reported, ["△Used Peaked MB:     10     20 (across_await: exit)"], "reported at its end");
    assert!(lines(|| drop(ended)).is_empty(), "and not again");
}
