//! The future of a traced function.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

use super::{GpuMemTrace, GpuMemTraceBuilder};

pin_project! {
    /// Runs a future under a trace. The trace starts at the first poll and reports when the future has ended or is
    /// dropped, after all that it held.
    #[must_use = "futures do nothing unless polled"]
    pub struct Traced<F> {
        // Declared, and so dropped, before the trace.
        #[pin]
        future: Option<F>,
        trace: Task,
    }
}

enum Task {
    Waiting(GpuMemTraceBuilder),
    Running(GpuMemTrace),
    Ended,
}

impl<F: Future> Traced<F> {
    /// Nothing starts before the first poll.
    pub fn new(trace: GpuMemTraceBuilder, future: F) -> Self {
        Self { future: Some(future), trace: Task::Waiting(trace) }
    }
}

impl Task {
    /// The trace, started if it has not been.
    fn running(&mut self) -> Option<&GpuMemTrace> {
        *self = match mem::replace(self, Self::Ended) {
            Self::Waiting(trace) => Self::Running(trace.start_or_off()),
            begun => begun,
        };
        match self {
            Self::Running(trace) => Some(trace),
            _ => None,
        }
    }
}

impl<F: Future> Future for Traced<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let entered = this.trace.running().map(Entered::new);
        let future = this.future.as_mut().as_pin_mut().expect("gpumem: a future is not polled after it has ended");
        let polled = future.poll(context);
        drop(entered);
        if polled.is_ready() {
            this.future.set(None);
            *this.trace = Task::Ended;
        }
        polled
    }
}

/// While it lives, the scope of the trace is one that the calling thread is in.
struct Entered<'a>(&'a GpuMemTrace);

impl<'a> Entered<'a> {
    fn new(trace: &'a GpuMemTrace) -> Self {
        enter(trace);
        Self(trace)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        leave(self.0);
    }
}

/// The calling thread begins to run what the trace measures.
fn enter(_trace: &GpuMemTrace) {}

/// It goes on to something else.
fn leave(_trace: &GpuMemTrace) {}
