//! Compares the values of spans with the values that the tests expect, on the simulated device.

mod common;

use std::{
    cell::RefCell,
    io::{self, Write},
    mem,
    sync::{Arc, Mutex},
    thread,
};

use common::{Closed, Closings, gpu};
use gpumem::{
    Bytes, GpuMemTrace,
    sim::{SimBlock, SimGpu},
};
use gpumem_tracing::GpuMemLayer;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider};
use tracing::{
    Dispatch, Instrument, Level, Span, dispatcher::with_default, field::Empty, info_span, instrument::WithSubscriber,
};
use tracing_subscriber::{
    Layer,
    filter::LevelFilter,
    fmt::{self, format::FmtSpan},
    layer::SubscriberExt,
    registry,
};

fn alloc(mib: i64) -> SimBlock {
    gpu().alloc(Bytes::mib(mib.unsigned_abs())).expect("there is enough")
}

/// Creates a span with gpumem's fields.
macro_rules! span {
    ($(parent: $parent:expr,)? $name:literal $(, $number:ident $(= $value:expr)?)?) => {
        info_span!(
            $(parent: $parent,)? $name, gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty $(, $number $(= $value)?)?
        )
    };
}

/// Returns a layer, and makes sure that a simulated device exists.
fn layer() -> GpuMemLayer {
    gpu();
    GpuMemLayer::new()
}

fn measured(closings: &Closings) -> Dispatch {
    Dispatch::new(registry().with(layer()).with(closings.clone()))
}

/// Returns a closed span with these values, which are given in MiB.
fn closed_with(name: &'static str, number: u64, used: i64, peaked: u64) -> Closed {
    Closed { name, number, used: Some(used << 20), peaked: Some(peaked << 20), note: None }
}

/// The values of a span, as a test computes them.
#[derive(Clone, Copy, Default)]
struct Log {
    in_use: i64,
    peak: i64,
}

impl Log {
    fn change(&mut self, by: i64) {
        self.in_use += by;
        self.peak = self.peak.max(self.in_use);
    }

    fn closed(self, name: &'static str, number: u64) -> Closed {
        closed_with(name, number, self.in_use, (self.peak - self.in_use.max(0)).unsigned_abs())
    }
}

fn change<const SPANS: usize>(logs: [&mut Log; SPANS], by: i64) {
    for log in logs {
        log.change(by);
    }
}

/// Frees the block on a thread that is in no span.
async fn free_elsewhere(block: SimBlock) {
    tokio::task::spawn_blocking(move || drop(block)).await.expect("it does not panic");
}

/// Allocates around and in nested spans, waits in between, and frees here and on other threads.
async fn request(number: u64) -> (Vec<Closed>, Vec<SimBlock>) {
    let size = i64::try_from(1 + number % 7).expect("it is small");
    let [mut whole, mut step, mut last] = [Log::default(); 3];
    let mut kept = Vec::new();
    let first = alloc(size);
    whole.change(size);
    tokio::task::yield_now().await;
    async {
        let (large, small) = (alloc(10 * size), alloc(2));
        change([&mut whole, &mut step], 10 * size + 2);
        tokio::task::yield_now().await;
        // This block was not allocated in this span.
        free_elsewhere(first).await;
        whole.change(-size);
        async {
            let block = alloc(3 * size);
            change([&mut whole, &mut step, &mut last], 3 * size);
            tokio::task::yield_now().await;
            drop(block);
            change([&mut whole, &mut step, &mut last], -3 * size);
            if number.is_multiple_of(2) {
                free_elsewhere(large).await;
            } else {
                drop(large);
                last.change(-10 * size);
            }
            change([&mut whole, &mut step], -10 * size);
        }
        .instrument(span!("last", number))
        .await;
        kept.push(small);
    }
    .instrument(span!("step", number))
    .await;
    tokio::task::yield_now().await;
    if number.is_multiple_of(3) {
        free_elsewhere(kept.remove(0)).await;
        whole.change(-2);
    }
    (vec![last.closed("last", number), step.closed("step", number), whole.closed("request", number)], kept)
}

#[test]
fn each_of_many_concurrent_tasks_has_its_own_numbers() {
    let closings = Closings::default();
    let dispatch = measured(&closings);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let of_thread = dispatch.clone();
    let runtime = runtime
        .worker_threads(8)
        // The guard is forgotten, so that the subscriber stays the default of this thread.
        .on_thread_start(move || mem::forget(tracing::dispatcher::set_default(&of_thread)))
        .build()
        .expect("threads can be started");
    let mut expected = with_default(&dispatch, || {
        runtime.block_on(async {
            let tasks: Vec<_> =
                (0..200).map(|number| tokio::spawn(request(number).instrument(span!("request", number)))).collect();
            let mut expected = Vec::new();
            for task in tasks {
                expected.extend(task.await.expect("it does not panic").0);
            }
            expected
        })
    });
    drop(runtime);
    let mut closed = closings.take();
    closed.sort();
    expected.sort();
    assert_eq!(closed.len(), 600);
    assert_eq!(closed, expected);
}

#[derive(Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Text {
    fn read(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

macro_rules! formatter {
    ($text:expr) => {{
        let text = $text.clone();
        fmt::layer().with_span_events(FmtSpan::CLOSE).with_ansi(false).with_writer(move || text.clone())
    }};
}

#[test]
fn a_formatter_that_is_added_after_the_layer_prints_the_numbers() {
    let run = |dispatch: &Dispatch| {
        with_default(dispatch, || {
            let _weights = span!("load").in_scope(|| {
                drop(alloc(5));
                alloc(20)
            });
            info_span!("plain").in_scope(|| drop(alloc(7)));
        });
    };
    let text = Text::default();
    run(&Dispatch::new(registry().with(layer()).with(formatter!(text))));
    let printed = text.read();
    assert!(printed.contains("load{gpu_used=20971520 gpu_peaked=0}: spans: close"), "{printed}");
    assert!(printed.contains("DEBUG plain: gpumem: GPU memory gpu_used=0 gpu_peaked=7340032"), "{printed}");
    assert!(printed.find("gpumem: GPU memory") < printed.find("plain: spans: close"), "{printed}");
    // The book says that the order of the layers matters.
    let text = Text::default();
    run(&Dispatch::new(registry().with(formatter!(text)).with(layer())));
    assert!(text.read().contains("load: spans: close"), "{}", text.read());
}

/// The exporter gets a span when it closes, with the attributes that it has at that time.
#[test]
fn exported_spans_have_the_numbers() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let otel = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    with_default(&Dispatch::new(registry().with(layer()).with(otel)), || {
        let _weights = span!("load").in_scope(|| {
            drop(alloc(5));
            alloc(20)
        });
    });
    let spans = exporter.get_finished_spans().unwrap();
    let attributes = spans[0].attributes.iter().map(|pair| (pair.key.as_str(), pair.value.as_str().into_owned()));
    let values: Vec<_> = attributes.filter(|(name, _)| name.starts_with("gpu_")).collect();
    let expected = [("gpu_used", "20971520"), ("gpu_peaked", "0")].map(|(name, value)| (name, value.to_owned()));
    assert_eq!((spans.len(), &*spans[0].name, &values[..]), (1, "load", &expected[..]));
}

#[test]
fn spans_without_the_fields_get_an_event() {
    let event = |level: Option<Level>, mib: i64| {
        let text = Text::default();
        let dispatch = Dispatch::new(registry().with(layer().event_level(level)).with(formatter!(text)));
        with_default(&dispatch, || info_span!("plain").in_scope(|| drop((mib > 0).then(|| alloc(mib)))));
        let text = text.read();
        text.lines().find(|line| line.contains("GPU memory")).map(str::to_owned)
    };
    assert!(event(Some(Level::WARN), 1).is_some_and(|line| line.contains(" WARN plain: gpumem: GPU memory")));
    assert_eq!((event(Some(Level::WARN), 0), event(None, 1)), (None, None));
}

#[test]
fn a_span_is_opened_in_its_explicit_parent() {
    let closings = Closings::default();
    with_default(&measured(&closings), || {
        let (one, other) = (span!("one"), span!("other"));
        one.in_scope(|| {
            span!(parent: &other, "of other").in_scope(|| drop(alloc(1)));
            span!(parent: None, "of none").in_scope(|| drop(alloc(16)));
            drop(alloc(4));
        });
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        thread::scope(|threads| {
            let open = || with_default(&dispatch, || span!(parent: &one, "elsewhere").in_scope(|| drop(alloc(8))));
            threads.spawn(open);
        });
    });
    let mut closed = closings.take();
    closed.sort();
    // The thread was in `one` during all spans except `elsewhere`, which ran on another thread with `one` as its parent.
    let expected = [("elsewhere", 8), ("of none", 16), ("of other", 1), ("one", 16), ("other", 1)];
    assert_eq!(closed, expected.map(|(name, peaked)| closed_with(name, 0, 0, peaked)));
}

#[test]
fn a_span_is_entered_again_and_closed_on_another_thread() {
    let closings = Closings::default();
    let dispatch = measured(&closings);
    let span = with_default(&dispatch, || span!("job"));
    let blocks: Vec<_> = (1..=3).map(|mib| span.in_scope(|| span.in_scope(|| alloc(mib)))).collect();
    let other = alloc(100);
    thread::spawn(move || {
        let last = span.in_scope(|| alloc(8));
        drop((blocks, other));
        drop(span);
        drop(last);
    })
    .join()
    .unwrap();
    assert_eq!(closings.take(), [closed_with("job", 0, 8, 6)]);
}

/// The spans of both subscribers have the same ids.
#[test]
fn two_subscribers_on_one_thread_do_not_mix_their_spans() {
    let all = [Closings::default(), Closings::default()];
    let [first, second] = all.each_ref().map(measured);
    let of_first = with_default(&first, || span!("first"));
    let of_second = with_default(&second, || span!("second"));
    assert_eq!(of_first.id(), of_second.id());
    let (in_first, in_second) = (of_first.enter(), of_second.enter());
    let both = alloc(1);
    drop(in_first);
    let second = alloc(2);
    drop(in_second);
    let none = alloc(4);
    drop((of_first, of_second, both, second, none));
    assert_eq!(
        all.map(|closings| closings.take()),
        [[closed_with("first", 0, 1, 0)], [closed_with("second", 0, 3, 0)]]
    );
}

/// The span is opened before the task that it is entered in, on this thread or on another one. It is also entered inside another span.
#[test]
fn a_span_that_was_opened_elsewhere_counts_for_the_task_around_it_as_well() {
    async fn work() -> SimBlock {
        let kept = alloc(2);
        drop(alloc(8));
        tokio::task::yield_now().await;
        kept
    }
    let closings = Closings::default();
    let dispatch = measured(&closings);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let task = || GpuMemTrace::builder().silent(true).entered(false).start().unwrap();
    let values_of = |trace: &GpuMemTrace| (trace.data().used.mb(), trace.data().peaked.mb(), trace.live().len());
    with_default(&dispatch, || {
        let elsewhere =
            || thread::scope(|threads| threads.spawn(|| with_default(&dispatch, || span!("s"))).join().unwrap());
        for (at, open) in [&elsewhere as &dyn Fn() -> Span, &|| span!("s")].into_iter().enumerate() {
            for is_spawned in [false, true] {
                let (span, outer, inner) = (open(), open(), task());
                let run = inner.handle().wrap(work().instrument(span.clone())).instrument(outer.clone());
                let run = run.with_subscriber(dispatch.clone());
                let kept =
                    if is_spawned { runtime.block_on(runtime.spawn(run)).unwrap() } else { runtime.block_on(run) };
                assert_eq!(values_of(&inner), (2, 8, 1), "{at}, spawned: {is_spawned}");
                drop((span, outer));
                assert_eq!(
                    closings.take(),
                    [closed_with("s", 0, 2, 8), closed_with("s", 0, 2, 8)],
                    "{at}, spawned: {is_spawned}"
                );
                drop(kept);
            }
        }
    });
}

#[test]
fn a_span_that_allocates_on_another_device_has_a_note() {
    gpu();
    let closings = Closings::default();
    let text = Text::default();
    let subscriber = registry().with(layer()).with(closings.clone()).with(formatter!(text));
    thread::scope(|threads| {
        threads.spawn(|| {
            let other = SimGpu::install(Bytes::gib(1)).unwrap();
            let opened_on = gpu();
            with_default(&Dispatch::new(subscriber), || {
                opened_on.make_current();
                let (span, plain) = (span!("elsewhere"), info_span!("plain"));
                other.make_current();
                drop(span.in_scope(|| other.alloc(Bytes::mib(4)).unwrap()));
                drop(plain.in_scope(|| other.alloc(Bytes::mib(4)).unwrap()));
                drop((span, plain));
                span!("here").in_scope(|| drop(other.alloc(Bytes::mib(4)).unwrap()));
            });
        });
    });
    let [elsewhere, plain, here] = &closings.take()[..] else { panic!("there are three") };
    let note = elsewhere.note.as_deref().expect("it has a note");
    assert!(note.starts_with("of device 0; allocated on device "), "{note}");
    assert_eq!((plain.note.as_deref(), here), (None, &closed_with("here", 0, 0, 4)));
    assert!(
        text.read().contains(&format!("GPU memory gpu_used=0 gpu_peaked=0 gpu_note=\"{note}\"")),
        "{}",
        text.read()
    );
}

#[test]
fn a_span_of_two_layers_is_measured_once() {
    let calls = |subscriber: Dispatch, name: &str, open: fn() -> Span| {
        with_default(&subscriber, || open().in_scope(|| drop(alloc(1))));
        let scopes = gpumem::summary().scopes;
        scopes
            .iter()
            // Another test may install a device while the span is open. The scope has a row for that device, too.
            .filter(|scope| scope.device == gpu().ordinal() && scope.path.last().is_some_and(|last| last == name))
            .map(|scope| scope.calls)
            .sum::<u64>()
    };
    let closings = Closings::default();
    let both = registry().with(layer()).with(layer()).with(closings.clone());
    assert_eq!(calls(Dispatch::new(both), "both", || span!("both")), 1);
    let filtered = registry().with(layer().with_filter(LevelFilter::WARN)).with(layer()).with(closings.clone());
    assert_eq!(calls(Dispatch::new(filtered), "second", || span!("second")), 1);
    assert_eq!(closings.take(), [closed_with("both", 0, 0, 1), closed_with("second", 0, 0, 1)]);
}

#[test]
fn spans_that_a_filter_leaves_out_are_no_scopes() {
    let closings = Closings::default();
    let layer = layer().with_filter(LevelFilter::INFO);
    with_default(&Dispatch::new(registry().with(layer).with(closings.clone())), || {
        span!("outer").in_scope(|| {
            let inner = tracing::debug_span!("inner", gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty);
            inner.in_scope(|| drop(alloc(5)));
        });
    });
    let inner = Closed { name: "inner", number: 0, used: None, peaked: None, note: None };
    assert_eq!(closings.take(), [inner, closed_with("outer", 0, 0, 5)]);
}

/// The inner trace counts all threads, and other tests allocate on the shared device. Therefore this test uses its own device.
#[test]
fn a_span_is_a_scope_and_changes_no_trace_of_another_thread() {
    let closings = Closings::default();
    let dispatch = measured(&closings);
    let own = SimGpu::install(Bytes::gib(1)).unwrap();
    own.make_current();
    let trace = GpuMemTrace::builder().silent(true).thread_local_only().start().unwrap();
    with_default(&dispatch, || {
        span!("scope").in_scope(|| {
            let _block = own.alloc(Bytes::mib(1)).unwrap();
            assert_eq!(trace.live()[0].path[1..], ["scope"]);
            let inner = GpuMemTrace::builder().silent(true).start().unwrap();
            thread::scope(|threads| {
                threads.spawn(|| {
                    own.make_current();
                    let allocates = || drop(own.alloc(Bytes::mib(2)).unwrap());
                    with_default(&dispatch, || span!("elsewhere").in_scope(allocates));
                });
            });
            assert_eq!((inner.data().peaked.get(), inner.data().shared.get()), (0, 0));
        });
    });
}

/// The thread's list of spans is dropped before other values of the thread.
#[test]
fn a_thread_may_end_in_a_span() {
    struct EnteredInDrop(Span);
    impl Drop for EnteredInDrop {
        fn drop(&mut self) {
            self.0.in_scope(|| drop(alloc(3)));
        }
    }
    thread_local! {
        static FIRST: RefCell<Option<EnteredInDrop>> = const { RefCell::new(None) };
    }
    let closings = Closings::default();
    let dispatch = measured(&closings);
    thread::spawn(move || {
        // The registry also keeps a value for each thread, and panics if a span is entered without it. This line creates that value first,
        // so it is dropped last.
        with_default(&Dispatch::new(registry()), || info_span!("none").in_scope(|| {}));
        with_default(&dispatch, || {
            FIRST.set(Some(EnteredInDrop(span!("first"))));
            mem::forget(span!("left").entered());
        });
    })
    .join()
    .unwrap();
    assert_eq!(closings.take(), [closed_with("first", 0, 0, 0)]);
}
