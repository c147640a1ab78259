//! The future of a traced function.

use std::{
    fmt, mem,
    pin::Pin,
    sync::PoisonError,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

use crate::session::{BodyGuard, GpuMemTraceBuilder, InScope, TraceSpec};

pin_project! {
    /// The future of [`GpuMemTraceBuilder::wrap`] and of traced async functions. Its trace starts at the first poll, and reports when
    /// the inner future has ended or is dropped, after everything it owns is dropped.
    #[must_use = "futures do nothing unless polled"]
    pub struct Traced<F> {
        // The future is declared before the trace, so it is dropped before the trace.
        #[pin]
        future: InScope<F>,
        trace: Task,
    }
}

enum Task {
    Waiting(TraceSpec),
    /// The guard is held for its drop.
    Running(#[expect(dead_code)] BodyGuard),
    /// Also used if the future ends the measurement itself.
    Ended,
}

impl GpuMemTraceBuilder {
    /// Traces a future. The trace starts at the first poll. The polling thread is in its scope during each poll, and exact results count
    /// allocations in the scope, wherever they are freed. The trace reports when the future has ended or is dropped, after everything
    /// that the future owns is dropped. Use this for tasks that share a thread: a guard that is held across `.await` would be the scope
    /// of all of them.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let id = 7;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let request = GpuMemTrace::builder().ctx(format!("request {id}")).wrap(async move {
    ///     gpu.alloc(Bytes::mib(1)) // and so on, with `.await`
    /// }); // to be spawned
    /// # drop(request);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[track_caller]
    pub fn wrap<F: Future>(self, future: F) -> Traced<F> {
        Traced::new(TraceSpec::new(self), future)
    }
}

/// Shows whether the trace has started. Does not read the device.
impl<F> fmt::Debug for Traced<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_started = !matches!(self.trace, Task::Waiting(_));
        f.debug_struct("Traced").field("is_started", &is_started).finish_non_exhaustive()
    }
}

impl<F: Future> Traced<F> {
    /// Creates the future. The trace starts at the first poll.
    #[doc(hidden)]
    pub fn new(body: TraceSpec, future: F) -> Self {
        // Each poll enters the scope.
        Self { future: InScope::without_scope(future), trace: Task::Waiting(body.unentered()) }
    }
}

impl<F: Future> Future for Traced<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        *this.trace = match mem::replace(this.trace, Task::Ended) {
            Task::Waiting(body) => {
                let (body, end) = body.start_shared();
                this.future.as_mut().set_scope(body.handle());
                match end {
                    None => Task::Running(body),
                    Some(end) => {
                        *end.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
                        Task::Ended
                    }
                }
            }
            started => started,
        };
        let polled = this.future.poll(context);
        if polled.is_ready() {
            *this.trace = Task::Ended;
        }
        polled
    }
}
