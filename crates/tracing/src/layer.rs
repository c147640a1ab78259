//! Measures the GPU memory of spans.

use std::{
    fmt,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gpumem::{
    Trace,
    scope::{ScopeHandle, TaskScope},
};
use tracing::{
    Dispatch, Level, Metadata, Subscriber, Value,
    dispatcher::{self, WeakDispatch},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

use crate::{
    output::{emit, note},
    stack::{closed, enter, in_layer, leave, outside},
};

/// The id of the next layer.
static LAYERS: AtomicU64 = AtomicU64::new(0);

/// The scope of a span, and the id of the layer that opened it.
struct SpanScope {
    layer: u64,
    scope: TaskScope,
}

/// Measures the GPU memory of each span that reaches this layer. If a span reaches several layers of this type, only the first one measures
/// it. See the [crate](crate).
///
/// ```
/// use gpumem_tracing::GpuMemLayer;
/// use tracing_subscriber::{Layer, filter::LevelFilter, layer::SubscriberExt, registry};
///
/// let subscriber = registry().with(GpuMemLayer::new().with_filter(LevelFilter::INFO));
/// # drop(subscriber);
/// ```
pub struct GpuMemLayer {
    number: u64,
    dispatch: OnceLock<WeakDispatch>,
    event_level: Option<Level>,
}

impl GpuMemLayer {
    /// Creates a layer that emits events at the level `DEBUG`.
    #[expect(clippy::new_without_default, reason = "two layers are not equal: each measures spans of its own")]
    pub fn new() -> Self {
        Self { number: LAYERS.fetch_add(1, Relaxed), dispatch: OnceLock::new(), event_level: Some(Level::DEBUG) }
    }

    /// Sets the level of the event that is emitted at the end of a span that does not declare the fields. With `None`, no event is emitted.
    ///
    /// ```
    /// use gpumem_tracing::GpuMemLayer;
    /// use tracing::Level;
    ///
    /// let (louder, silent) = (GpuMemLayer::new().event_level(Level::INFO), GpuMemLayer::new().event_level(None));
    /// # drop((louder, silent));
    /// ```
    #[must_use]
    pub fn event_level(mut self, level: impl Into<Option<Level>>) -> Self {
        self.event_level = level.into();
        self
    }

    fn open(span: &'static Metadata<'static>) -> Option<TaskScope> {
        let (file, line) = (span.file().unwrap_or_default(), span.line().unwrap_or_default());
        TaskScope::open(span.name(), span.module_path(), file, line)
    }

    fn write(&self, span: &Id, metadata: &'static Metadata<'static>, trace: &Trace) {
        let values = trace.is_measured().then_some((trace.used.get(), trace.peaked.get()));
        // The values do not include memory on other devices. In that case there is a note about it.
        let is_elsewhere = trace.allocated_on.is_some();
        let event_level = self.event_level.filter(|_| values.is_some_and(|values| is_elsewhere || values != (0, 0)));
        if metadata.fields().is_empty() && event_level.is_none() {
            return;
        }
        let Some(dispatch) = self.dispatch.get().and_then(WeakDispatch::upgrade) else { return };
        let note = note(trace);
        let (used, peaked) = values.unzip();
        let record = |name, value: &dyn Value| record(&dispatch, span, metadata, name, value);
        let has_used = used.is_some_and(|used| record("gpu_used", &used));
        let has_peaked = peaked.is_some_and(|peaked| record("gpu_peaked", &peaked));
        let has_note = note.as_deref().is_some_and(|note| record("gpu_note", &note));
        if let Some(level) = event_level
            && !(has_used || has_peaked || has_note)
        {
            let note = note.as_deref();
            dispatcher::with_default(&dispatch, || {
                emit!(level, [parent: span.clone(),], gpu_used = used, gpu_peaked = peaked, gpu_note = note, "GPU memory");
            });
        }
    }
}

/// Records the value if the span declares a field with this name. Returns whether it does.
fn record(dispatch: &Dispatch, span: &Id, metadata: &Metadata<'static>, name: &str, value: &dyn Value) -> bool {
    let fields = metadata.fields();
    let Some(field) = fields.field(name) else { return false };
    dispatch.record(span, &Record::new(&fields.value_set(&[(&field, Some(value))])));
    true
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for GpuMemLayer {
    fn on_register_dispatch(&self, subscriber: &Dispatch) {
        _ = self.dispatch.set(subscriber.downgrade());
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        in_layer(|| {
            let Some(span) = context.span(id) else { return };
            if span.extensions().get::<SpanScope>().is_some() {
                return;
            }
            let open = || Self::open(attributes.metadata());
            let parent = attributes.parent().and_then(|parent| scope_of(&context, parent, None));
            let scope = match parent {
                Some(parent) => parent.in_scope(open),
                None if attributes.is_contextual() => open(),
                None => outside(open),
            };
            if let Some(scope) = scope {
                span.extensions_mut().replace(SpanScope { layer: self.number, scope });
            }
        });
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        in_layer(|| {
            // The lock of the span is not held at this point.
            if let Some(scope) = scope_of(&context, id, Some(self.number)) {
                enter((self.number, id.into_u64()), scope);
            }
        });
    }

    fn on_exit(&self, id: &Id, _: Context<'_, S>) {
        in_layer(|| leave((self.number, id.into_u64())));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        in_layer(|| {
            let Some(span) = context.span(&id) else { return };
            if span.extensions().get::<SpanScope>().is_none_or(|of| of.layer != self.number) {
                return;
            }
            let Some(SpanScope { scope, .. }) = span.extensions_mut().remove() else { return };
            closed((self.number, id.into_u64()));
            self.write(&id, span.metadata(), &scope.close());
        });
    }
}

/// Returns the scope of a span if this layer opened it. With `None`, any layer may have opened it.
fn scope_of<S: Subscriber + for<'a> LookupSpan<'a>>(
    context: &Context<'_, S>,
    span: &Id,
    layer: Option<u64>,
) -> Option<ScopeHandle> {
    let span = context.span(span)?;
    let extensions = span.extensions();
    let of = extensions.get::<SpanScope>().filter(|of| layer.is_none_or(|layer| layer == of.layer))?;
    Some(of.scope.handle())
}

impl fmt::Debug for GpuMemLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuMemLayer").field("event_level", &self.event_level).finish_non_exhaustive()
    }
}
