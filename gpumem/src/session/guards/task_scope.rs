//! Scopes of tasks, without reports.

use std::{borrow::Cow, fmt};

use super::builder::GpuMemTraceBuilder;
use crate::model::Trace;
use crate::session::{
    ScopeHandle, current,
    events::{CodeLine, OpenScope, ScopeRequest},
};

/// A scope for a task, for libraries that measure the tasks of a program. Like a [`GpuMemTrace`](crate::GpuMemTrace) that is not
/// [`entered`](GpuMemTraceBuilder::entered), it counts the allocations of threads that have entered it through its handle. It is cheaper,
/// because it has no settings and no reports. `gpumem-tracing` opens one for each span.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, scope::TaskScope};
///
/// let task = TaskScope::open("request", Some(module_path!()), file!(), line!()).expect("traces are on");
/// let other = gpu.alloc(Bytes::mib(1))?;
/// let own = task.handle().in_scope(|| gpu.alloc(Bytes::mib(10)))?;
/// assert_eq!(task.close().used.mb(), 10);
/// # drop((other, own));
/// # Ok::<(), gpumem::Error>(())
/// ```
#[must_use = "dropping it closes the scope"]
pub struct TaskScope(Option<OpenScope>);

impl TaskScope {
    /// Opens a scope inside the calling thread's scope, on its current device. `module`, `file` and `line` are its place in the program.
    /// `None` if traces are off; a notice on stderr gives the reason.
    pub fn open(name: &'static str, module: Option<&'static str>, file: &'static str, line: u32) -> Option<Self> {
        let trace = GpuMemTraceBuilder {
            ctx: Some(Cow::Borrowed(name)),
            request: ScopeRequest { of_task: true, module, ..ScopeRequest::default() },
            entered: false,
            ..GpuMemTraceBuilder::new()
        };
        if trace.is_off() {
            return None;
        }
        trace.open_or_off(current(), CodeLine { file, line, column: 1 }).map(|scope| Self(Some(scope)))
    }

    /// Returns a handle to enter the scope.
    pub fn handle(&self) -> ScopeHandle {
        ScopeHandle::of(self.0.as_ref().map(|scope| (scope.session, scope.id)))
    }

    /// Closes the scope and returns its trace.
    pub fn close(mut self) -> Trace {
        self.0.take().map_or_else(|| Trace::off(0), |scope| scope.close().0)
    }
}

impl fmt::Debug for TaskScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TaskScope").field(&self.0.as_ref().map(|scope| scope.id)).finish()
    }
}

impl Drop for TaskScope {
    fn drop(&mut self) {
        if let Some(scope) = self.0.take() {
            scope.close_unread();
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::{
        model::{ByteDelta, Bytes},
        session::{TestSession, views::path_of_this_thread},
    };

    #[test]
    fn a_thread_is_in_the_scope_only_while_it_has_entered() {
        for gauge in ["exact", "sampled"] {
            let session = TestSession::new(&[("GPUMEM_REPORT", "off"), ("GPUMEM_GAUGE", gauge)]).unwrap();
            let gpu = session.add(Bytes::gib(16)).unwrap();
            session.run(|| {
                let path = || path_of_this_thread(current());
                let scope = TaskScope::open("span", None, file!(), line!()).unwrap();
                let handle = scope.handle();
                assert_eq!((path(), handle.in_scope(path)), (vec![], vec!["span".to_owned()]), "{gauge}");
                let block = handle.in_scope(|| gpu.alloc(Bytes::mib(4)).unwrap());
                assert_eq!(scope.close().used, ByteDelta::new(4 << 20), "{gauge}");
                drop(block);
                let unclosed = TaskScope::open("span", None, file!(), line!()).unwrap().handle();
                assert_eq!((path(), unclosed.in_scope(path)), (vec![], vec![]), "{gauge}: a drop closes it");
            });
        }
    }
}
