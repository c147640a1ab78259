//! `#[gpu_mem_trace]` on an `async fn`: the trace lives across each `.await` and reports when the future ends or is dropped.
//!
//! `cargo run --example async_attribute`

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use gpumem::{Bytes, gpu_mem_trace};
use gpumem_examples::{Block, Gpu, Result};

#[gpu_mem_trace]
async fn forward(gpu: &Gpu, size: Bytes) -> Result<Block> {
    let _activations = gpu.alloc(Bytes::mib(200))?;
    yield_now().await;
    gpu.alloc(size)
}

#[gpu_mem_trace]
async fn cancelled(gpu: &Gpu) -> Result<()> {
    let _held = gpu.alloc(Bytes::mib(70))?;
    yield_now().await;
    std::future::pending().await
}

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let kept = pollster::block_on(forward(&gpu, Bytes::mib(24)))?;

    // A future that is dropped before it ends reports too.
    {
        let mut future = pin!(cancelled(&gpu));
        for _ in 0..2 {
            assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
    }
    drop(kept);
    Ok(())
}

/// Returns `Pending` once, so that an executor can run other tasks.
async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        std::thread::sleep(Duration::from_millis(5));
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
