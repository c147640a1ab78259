//! The spans that the calling thread is in.

use std::{
    cell::{Cell, RefCell},
    mem,
};

use gpumem::scope::{Entered, ScopeHandle};

/// Identifies a span: the id of the layer, and the id of the span. Spans of two subscribers may have the same span id.
pub(crate) type SpanKey = (u64, u64);

struct EnteredSpan {
    span: SpanKey,
    scope: ScopeHandle,
    /// The guard, kept so that dropping it leaves the scope. `None` only while the thread is [`outside`].
    guard: Option<Entered>,
}

thread_local! {
    static ENTERED: RefCell<Vec<EnteredSpan>> = const { RefCell::new(Vec::new()) };
    /// True while the thread runs a function of the layer.
    static IS_IN_LAYER: Cell<bool> = const { Cell::new(false) };
}

/// Enters a span on this thread. While a thread ends, its list may already be dropped. Then nothing is entered.
pub(crate) fn enter(span: SpanKey, scope: ScopeHandle) {
    _ = ENTERED.try_with(|entered| {
        let guard = Some(scope.enter());
        entered.borrow_mut().push(EnteredSpan { span, scope, guard });
    });
}

pub(crate) fn leave(span: SpanKey) {
    _ = ENTERED.try_with(|entered| {
        let mut entered = entered.borrow_mut();
        entered.iter().rposition(|one| one.span == span).map(|at| entered.remove(at))
    });
}

/// Removes a span that has closed. If another layer panicked while the span was entered, the thread never left it.
pub(crate) fn closed(span: SpanKey) {
    _ = ENTERED.try_with(|entered| entered.borrow_mut().retain(|one| one.span != span));
}

/// Calls `code` after leaving all spans of this thread, and enters them again afterwards.
pub(crate) fn outside<R>(code: impl FnOnce() -> R) -> R {
    let mut left = ENTERED.try_with(RefCell::take).unwrap_or_default();
    for span in left.iter_mut().rev() {
        span.guard = None;
    }
    let result = code();
    for span in &mut left {
        span.guard = Some(span.scope.enter());
    }
    _ = ENTERED.try_with(|entered| mem::swap(&mut *entered.borrow_mut(), &mut left));
    result
}

/// Marks the thread as running a function of the layer until this guard is dropped, which also happens if another layer panics.
struct InLayer {
    outer: bool,
}

impl Drop for InLayer {
    fn drop(&mut self) {
        _ = IS_IN_LAYER.try_with(|is_in| is_in.set(self.outer));
    }
}

/// Runs `code`, a function of the layer. Until `code` returns, gpumem's output is not sent to `tracing`, which might ask its layers about
/// a span.
pub(crate) fn in_layer<R>(code: impl FnOnce() -> R) -> R {
    let _in_layer = IS_IN_LAYER.try_with(|is_in| InLayer { outer: is_in.replace(true) });
    code()
}

pub(crate) fn is_in_layer() -> bool {
    IS_IN_LAYER.try_with(Cell::get).unwrap_or(true)
}
