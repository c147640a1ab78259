//! Code that the tests share.

use std::{
    mem,
    sync::{Arc, Mutex, OnceLock},
};

use gpumem::{Bytes, sim::SimGpu};
use tracing::{
    Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

pub(crate) fn gpu() -> &'static SimGpu {
    static GPU: OnceLock<SimGpu> = OnceLock::new();
    GPU.get_or_init(|| SimGpu::install(Bytes::gib(64)).expect("nothing else is installed"))
}

/// A span that has closed, and its fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Closed {
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) used: Option<i64>,
    pub(crate) peaked: Option<u64>,
    pub(crate) note: Option<String>,
}

impl Visit for Closed {
    fn record_i64(&mut self, field: &Field, value: i64) {
        if field.name() == "gpu_used" {
            self.used = Some(value);
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "gpu_peaked" => self.peaked = Some(value),
            "number" => self.number = value,
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "gpu_note" {
            self.note = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// A layer that stores the fields of each span when the span closes.
#[derive(Clone, Default)]
pub(crate) struct Closings(Arc<Mutex<Vec<Closed>>>);

impl Closings {
    pub(crate) fn take(&self) -> Vec<Closed> {
        mem::take(&mut self.0.lock().unwrap())
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Closings {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut closed = Closed { name: attributes.metadata().name(), ..Closed::default() };
        attributes.record(&mut closed);
        context.span(id).unwrap().extensions_mut().insert(closed);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        values.record(context.span(id).unwrap().extensions_mut().get_mut::<Closed>().unwrap());
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let closed = context.span(&id).unwrap().extensions_mut().remove::<Closed>();
        self.0.lock().unwrap().extend(closed);
    }
}
