//! A scope without reports.

use std::borrow::Cow;

use super::builder::GpuMemTraceBuilder;
use crate::model::Trace;
use crate::session::{
    ScopeHandle, current,
    events::{CodeLine, OpenScope, ScopeRequest},
};

/// The scope of a trace that is not [`entered`](GpuMemTraceBuilder::entered) and prints nothing. `gpumem-tracing` opens one for each span:
/// it takes less time than a [`GpuMemTrace`](crate::GpuMemTrace), because it keeps no settings.
#[doc(hidden)]
#[must_use = "dropping it closes the scope"]
pub struct SilentScope(Option<OpenScope>);

impl SilentScope {
    /// Opens a scope inside that of the calling thread. `None` if traces are off.
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

    /// A handle to enter the scope.
    pub fn handle(&self) -> ScopeHandle {
        ScopeHandle::of(self.0.as_ref().map(|scope| (scope.session, scope.id)))
    }

    /// Closes the scope. Returns its figures.
    pub fn close(mut self) -> Trace {
        self.0.take().map_or_else(|| Trace::off(0), |scope| scope.close().0)
    }
}

impl Drop for SilentScope {
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
                let scope = SilentScope::open("span", None, file!(), line!()).unwrap();
                let handle = scope.handle();
                assert_eq!((path(), handle.in_scope(path)), (vec![], vec!["span".to_owned()]), "{gauge}");
                let block = handle.in_scope(|| gpu.alloc(Bytes::mib(4)).unwrap());
                assert_eq!(scope.close().used, ByteDelta::new(4 << 20), "{gauge}");
                drop(block);
                let unclosed = SilentScope::open("span", None, file!(), line!()).unwrap().handle();
                assert_eq!((path(), unclosed.in_scope(path)), (vec![], vec![]), "{gauge}: a drop closes it");
            });
        }
    }
}
