//! A library with guards and attributes in each form that `docs/book/src/zero-cost.md` describes.
//!
//! The test removes each line that contains `gpumem` or `gpu_mem`, so such a line must be a whole statement, field or attribute.

#[macro_use]
mod gpu_mem;

use std::{
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    thread,
};

gpu_mem! { use gpumem::GpuMemTrace; }

pub struct Trainer {
    pub loss: u64,
    #[cfg(feature = "gpumem")]
    pub gpu_mem: GpuMemTrace,
}

#[cfg_attr(feature = "gpumem", gpumem::gpu_mem_trace)]
impl Trainer {
    // A constructor is not worth a line.
    #[cfg_attr(feature = "gpumem", gpumem::gpu_mem_trace(skip))]
    #[inline(never)]
    pub fn new() -> Self {
        Trainer {
            loss: 7,
            #[cfg(feature = "gpumem")]
            gpu_mem: GpuMemTrace::with_ctx("trainer"),
        }
    }

    #[inline(never)]
    pub fn train(&mut self, input: &[u64]) {
        for (number, value) in input.chunks(8).enumerate() {
            self.loss += step(value).unwrap_or(number as u64);
            gpu_mem! { self.gpu_mem.report_n_reset_with(format!("step {number}")); }
        }
    }
}

#[cfg_attr(feature = "gpumem", gpumem::gpu_mem_trace(ctx = "step"))]
#[inline(never)]
pub fn step(input: &[u64]) -> Option<u64> {
    gpu_mem! { let mut sum_mem = gpumem::GpuMemTrace::with_ctx("sum"); }
    let sum: u64 = input.iter().map(|value| value.wrapping_mul(31)).sum();
    gpu_mem! { sum_mem.report_n_reset(); }
    let last = input.get(7)?;
    gpu_mem! { sum_mem.report_with("last"); }
    Some(sum + shared(input) + last)
}

/// Starts a thread that works for the guard of its parent.
#[inline(never)]
pub fn shared(input: &[u64]) -> u64 {
    gpu_mem! { let shared_mem = GpuMemTrace::with_ctx("shared"); }
    gpu_mem! { let scope = shared_mem.handle(); }
    thread::scope(|threads| {
        let thread = threads.spawn(|| {
            gpu_mem! { let _inside_gpu_mem = scope.enter(); }
            input.iter().max().copied().unwrap_or(0)
        });
        thread.join().unwrap_or(0)
    })
}

#[cfg_attr(feature = "gpumem", gpumem::gpu_mem_trace(ctx = "later"))]
async fn later(input: Vec<u64>) -> u64 {
    step(&input).unwrap_or(0)
}

pub fn step_later(input: Vec<u64>) -> Pin<Box<dyn Future<Output = u64> + Send>> {
    let future = later(input);
    gpu_mem! { let future = GpuMemTrace::builder().ctx("task").wrap(future); }
    Box::pin(future)
}

pub fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}
