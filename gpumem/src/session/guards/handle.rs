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

/// A scope to be entered elsewhere: the answer of [`GpuMemTrace::handle`](crate::session::GpuMemTrace::handle). Cheap to clone.
///
/// A thread that has entered allocates in the scope: its blocks are the scope's in every report of where memory is, and a
/// trace that is [`thread_local_only`](crate::session::GpuMemTraceBuilder::thread_local_only) counts them as its own thread's. So does
/// one that the thread which entered opens.
/// When the scope is closed, or was off, entering it does nothing.
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

    /// The calling thread is in the scope no longer.
    pub(in crate::session) fn leave(&self) {
        if let Some((session, scope)) = self.scope {
            session.inbox.post(&EventKind::Leave { scope });
        }
    }

    /// Enters the scope on the calling thread, until what this returns is dropped.
    pub fn enter(&self) -> Entered {
        if let Some((session, scope)) = self.scope {
            session.inbox.post(&EventKind::Enter { scope });
        }
        Entered { scope: self.clone(), of_this_thread: PhantomData }
    }

    /// Runs `code` in the scope.
    pub fn in_scope<R>(&self, code: impl FnOnce() -> R) -> R {
        let _entered = self.enter();
        code()
    }

    /// A future that is in the scope while it is polled, and while it is dropped.
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

/// This thread is in a scope until this is dropped.
#[must_use = "dropping it leaves the scope at once; bind it to a name"]
pub struct Entered {
    scope: ScopeHandle,
    /// Leaving is the same thread's.
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
    /// In no scope until it is given one.
    pub(in crate::session) fn yet_to_enter(future: F) -> Self {
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
