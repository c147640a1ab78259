//! The future of a traced function.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

use super::{Body, GpuMemTraceBuilder, Measured, ScopeHandle};

pin_project! {
    /// The future of [`GpuMemTraceBuilder::wrap`] and of traced async functions: runs a future under a trace, which starts at
    /// the first poll and reports when the future has ended or is dropped, after all that it held.
    #[must_use = "futures do nothing unless polled"]
    pub struct Traced<F> {
        #[pin]
        future: Option<F>,
        trace: Task,
    }

    impl<F> PinnedDrop for Traced<F> {
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            if let (Task::Running(scope, _), true) = (&*this.trace, this.future.is_some()) {
                let _entered = scope.enter();
                this.future.set(None);
            }
        }
    }
}

enum Task {
    Waiting(Body),
    /// What is measured is kept for its drop.
    Running(ScopeHandle, #[expect(dead_code)] Measured),
    Ended,
}

impl GpuMemTraceBuilder {
    /// Runs a future under the trace: it starts at the first poll, is the scope of whoever polls while that lasts, and reports when
    /// the future has ended or is dropped, after all that it held. For tasks that run by turns on one thread, where a guard that is
    /// held across `.await` would be the scope of all of them.
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
        Traced::new(Body::new(self), future)
    }
}

impl<F: Future> Traced<F> {
    /// Nothing starts before the first poll.
    #[doc(hidden)]
    pub fn new(body: Body, future: F) -> Self {
        Self { future: Some(future), trace: Task::Waiting(body) }
    }
}

impl Task {
    /// The scope of the trace, which is started if it has not been.
    fn running(&mut self) -> Option<&ScopeHandle> {
        *self = match mem::replace(self, Self::Ended) {
            Self::Waiting(body) => {
                let body = body.start();
                let scope = body.handle();
                // Who opens a scope is in it. A task is so only while it is polled.
                scope.leave();
                Self::Running(scope, body)
            }
            begun => begun,
        };
        match self {
            Self::Running(scope, _) => Some(scope),
            _ => None,
        }
    }
}

impl<F: Future> Future for Traced<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let entered = this.trace.running().map(ScopeHandle::enter);
        let future = this.future.as_mut().as_pin_mut().expect("gpumem: a future is not polled after it has ended");
        let polled = future.poll(context);
        if polled.is_ready() {
            this.future.set(None);
        }
        drop(entered);
        if polled.is_ready() {
            *this.trace = Task::Ended;
        }
        polled
    }
}
