//! Tests gpumem's output as events, and spans of a process in which the values are not exact.

mod common;

use std::{
    env,
    fmt::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    process::{Command, Output},
    sync::{Arc, Mutex},
};

use common::{Closed, Closings, gpu};
use gpumem::{Bytes, GpuMemTrace, sink::set_sink, tracker::MemTracker};
use gpumem_tracing::{GpuMemLayer, sink};
use tracing::{
    Dispatch, Event, Span, Subscriber,
    dispatcher::with_default,
    field::{Empty, Field, Visit},
    info_span,
    span::{Id, Record},
};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
    registry,
    registry::LookupSpan,
};

/// A layer that stores the target, level and fields of each event as text.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<String>>>);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl<S: Subscriber> Layer<S> for Events {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = format!("{} {}", event.metadata().target(), event.metadata().level());
        event.record(&mut Fields(&mut text));
        self.0.lock().unwrap().push(text);
    }
}

/// Runs the code and returns its output as events.
fn events(code: impl FnOnce()) -> Vec<String> {
    let events = Events::default();
    with_default(&Dispatch::new(registry().with(events.clone())), code);
    let events = events.0.lock().unwrap();
    events.clone()
}

#[test]
fn all_output_becomes_events() {
    let gpu = gpu();
    set_sink(sink());
    let printed = events(|| {
        let trace = GpuMemTrace::builder().ctx("epoch").thread_local_only().start().unwrap();
        let block = gpu.alloc(Bytes::mib(2)).unwrap();
        drop(trace);
        MemTracker::new().track();
        drop(block);
    });
    let find = |kind: &str| {
        let kind = format!(" kind=\"{kind}\"");
        printed.iter().find(|event| event.contains(&kind)).unwrap_or_else(|| panic!("no {kind} in {printed:#?}"))
    };
    let trace = find("trace");
    let line = "message=△Used Peaked MB:      2      0 (epoch: exit)";
    assert!(
        trace.starts_with(&format!(
            "gpumem INFO {line} kind=\"trace\" device=0 ctx=\"epoch\" gpu_used=2097152 gpu_peaked=0"
        )),
        "{trace}"
    );
    assert!(trace.contains(concat!(" at=", file!(), ":")), "{trace}");
    assert!(find("tracked").starts_with("gpumem INFO "));
}

/// A layer that panics when a value is recorded, at each event, and when the span `entered` is entered.
struct Panicking;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Panicking {
    fn on_record(&self, _: &Id, _: &Record<'_>, _: Context<'_, S>) {
        panic!("a value was recorded");
    }

    fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
        panic!("there was an event");
    }

    fn on_enter(&self, span: &Id, context: Context<'_, S>) {
        assert_ne!(context.metadata(span).unwrap().name(), "entered");
    }
}

#[test]
fn after_the_panic_of_another_layer_output_is_still_an_event() {
    gpu();
    set_sink(sink());
    let declared = || info_span!("declared", gpu_used = Empty);
    for open in [declared as fn() -> Span, || info_span!("plain"), || info_span!("entered")] {
        let span = || open().in_scope(|| drop(gpu().alloc(Bytes::mib(1)).unwrap()));
        let subscriber = Dispatch::new(registry().with(GpuMemLayer::new()).with(Panicking));
        let unwound = catch_unwind(AssertUnwindSafe(|| with_default(&subscriber, span)));
        assert!(unwound.is_err());
        let printed = events(|| drop(GpuMemTrace::builder().ctx("after").thread_local_only().start().unwrap()));
        assert!(printed.iter().any(|event| event.contains(" (after: exit)")), "{printed:?}");
    }
}

/// Runs only the test with this name, in a new process in which this variable is set. Returns `None` in that process.
fn alone(name: &str, variable: &str, value: &str) -> Option<Output> {
    if env::var(variable).is_ok_and(|set| set == value) {
        return None;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", name, "--nocapture"]).env(variable, value).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(output)
}

/// Measures two spans and returns them with the events, in a process in which nothing was measured before.
fn spans() -> (Vec<Closed>, Vec<String>) {
    let gpu = gpu();
    set_sink(sink());
    let (closings, printed) = (Closings::default(), Events::default());
    let subscriber = registry().with(GpuMemLayer::new()).with(closings.clone()).with(printed.clone());
    with_default(&Dispatch::new(subscriber), || {
        let span = info_span!("span", gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty);
        drop(span.in_scope(|| gpu.alloc(Bytes::mib(3)).unwrap()));
        drop(span);
        info_span!("plain").in_scope(|| drop(gpu.alloc(Bytes::mib(3)).unwrap()));
    });
    let printed = printed.0.lock().unwrap().clone();
    (closings.take(), printed)
}

#[test]
fn sampled_figures_have_a_note() {
    if alone("sampled_figures_have_a_note", "GPUMEM_GAUGE", "sampled").is_none() {
        let (closed, _) = spans();
        assert_eq!((closed[0].used, closed[0].peaked.is_some()), (Some(0), true));
        assert_eq!(closed[0].note.as_deref(), Some("sampled every 1ms, all processes on the device"));
        let closings = Closings::default();
        with_default(&Dispatch::new(registry().with(GpuMemLayer::new()).with(closings.clone())), || {
            let span = info_span!("unread", gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty);
            gpu().set_lost(true);
            drop(span);
        });
        let note = Some("could not be read".to_owned());
        assert_eq!(closings.take(), [Closed { name: "unread", note, ..Closed::default() }]);
    }
}

#[test]
fn without_measurement_there_are_no_figures() {
    if alone("without_measurement_there_are_no_figures", "GPUMEM_GAUGE", "off").is_none() {
        let (closed, printed) = spans();
        let nothing = |name| Closed { name, ..Closed::default() };
        assert_eq!((closed, printed.len()), (vec![nothing("span"), nothing("plain")], 0), "{printed:?}");
    }
}

/// An event inside the layer's functions would confuse the filters of other layers.
#[test]
fn what_is_printed_while_a_span_opens_goes_to_stderr() {
    const NOTICE: &str = "the numbers come from a simulated GPU";
    match alone("what_is_printed_while_a_span_opens_goes_to_stderr", "GPUMEM_STACKS", "off") {
        None => {
            let (closed, printed) = spans();
            assert_eq!((closed[0].used, closed[0].peaked), (Some(0), Some(3 << 20)));
            assert_eq!(printed.len(), 1, "{printed:?}");
            assert!(
                printed[0].starts_with("gpumem DEBUG message=GPU memory gpu_used=0 gpu_peaked=3145728"),
                "{printed:?}"
            );
        }
        Some(output) => assert!(String::from_utf8_lossy(&output.stderr).contains(NOTICE), "{output:?}"),
    }
}
