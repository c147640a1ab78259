//! Carries a scope to other threads and tasks.

use std::{
    fmt,
    future::Future,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

use crate::model::{EventKind, ScopeId};
use crate::session::Session;

/// A handle to enter a scope on other threads and in tasks, from [`GpuMemTrace::handle`](crate::GpuMemTrace::handle). It is
/// cheap to clone.
///
/// A thread that has entered the scope allocates in it: reports count its blocks in the scope. A trace with
/// [`thread_local_only`](crate::session::GpuMemTraceBuilder::thread_local_only) counts them if the trace owns the scope, or if the
/// thread that entered opened the trace. Entering a scope that is closed, or whose trace is off, does nothing.
#[derive(Clone)]
pub struct ScopeHandle {
    scope: Option<(&'static Session, ScopeId)>,
}

impl fmt::Debug for ScopeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ScopeHandle").field(&self.scope.map(|(_, scope)| scope)).finish()
    }
}

impl ScopeHandle {
    pub(in crate::session) fn of(scope: Option<(&'static Session, ScopeId)>) -> Self {
        Self { scope }
    }

    /// Leaves the scope on the calling thread.
    pub(in crate::session) fn leave(&self) {
        if let Some((session, scope)) = self.scope {
            session.inbox.post(&EventKind::Leave { scope });
        }
    }

    /// Enters the scope on the calling thread. Dropping the guard leaves it.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let trace = GpuMemTrace::with_ctx("load");
    /// # let handle = trace.handle();
    /// let worker = || {
    ///     let _entered = handle.enter();
    ///     gpu.alloc(Bytes::mib(10))
    /// };
    /// let block = std::thread::scope(|threads| threads.spawn(worker).join().unwrap())?;
    /// assert_eq!(trace.live()[0].path, ["load"]);
    /// # drop(block);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn enter(&self) -> Entered {
        if let Some((session, scope)) = self.scope {
            session.inbox.post(&EventKind::Enter { scope });
        }
        Entered { scope: self.clone(), of_this_thread: PhantomData }
    }

    /// Runs `code` in the scope.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let trace = GpuMemTrace::with_ctx("load");
    /// # let handle = trace.handle();
    /// let worker = || handle.in_scope(|| gpu.alloc(Bytes::mib(10)));
    /// let block = std::thread::scope(|threads| threads.spawn(worker).join().unwrap())?;
    /// assert_eq!(trace.live()[0].path, ["load"]);
    /// # drop(block);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn in_scope<R>(&self, code: impl FnOnce() -> R) -> R {
        let _entered = self.enter();
        code()
    }

    /// Returns a future that enters the scope for each poll, and for its drop.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::with_ctx("request");
    /// let task = trace.handle().wrap(async { gpu.alloc(Bytes::mib(1)) }); // to be spawned
    /// # drop(task);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn wrap<F: Future>(&self, future: F) -> InScope<F> {
        InScope { handle: self.clone(), future: Some(future) }
    }
}

/// Keeps the thread in the scope until dropped.
///
/// Example: see [`ScopeHandle::enter`].
#[must_use = "dropping it leaves the scope at once; bind it to a name"]
pub struct Entered {
    scope: ScopeHandle,
    /// The guard is not `Send`: the thread that entered must be the one that leaves.
    of_this_thread: PhantomData<*const ()>,
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entered").field(&self.scope.scope.map(|(_, scope)| scope)).finish()
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.scope.leave();
    }
}

pin_project! {
    /// The future of [`ScopeHandle::wrap`].
    #[derive(Debug)]
    pub struct InScope<F> {
        handle: ScopeHandle,
        #[pin]
        future: Option<F>,
    }

    impl<F> PinnedDrop for InScope<F> {
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            if this.future.is_some() {
                let _entered = this.handle.enter();
                this.future.set(None);
            }
        }
    }
}

impl<F> InScope<F> {
    /// Creates a future that is in no scope until [`set_scope`](Self::set_scope).
    pub(in crate::session) fn without_scope(future: F) -> Self {
        Self { handle: ScopeHandle::of(None), future: Some(future) }
    }

    pub(in crate::session) fn set_scope(self: Pin<&mut Self>, handle: ScopeHandle) {
        *self.project().handle = handle;
    }
}

impl<F: Future> Future for InScope<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let _entered = this.handle.enter();
        let future = this.future.as_mut().as_pin_mut().expect("gpumem: a future is not polled after it has ended");
        let polled = future.poll(context);
        if polled.is_ready() {
            this.future.set(None);
        }
        polled
    }
}
