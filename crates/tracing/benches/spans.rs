//! Measures the cost of a measured span, compared to the same span without the layer.
//!
//! `cargo bench -p gpumem-tracing`

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use gpumem::{Bytes, sim::SimGpu};
use gpumem_tracing::GpuMemLayer;
use tracing::{Dispatch, dispatcher::with_default, field::Empty, info_span};
use tracing_subscriber::{layer::SubscriberExt, registry};

fn spans(criterion: &mut Criterion) {
    let _gpu = SimGpu::install(Bytes::gib(16)).expect("nothing else is installed");
    let plain = || info_span!("plain").in_scope(|| black_box(()));
    let fields = || {
        info_span!("fields", gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty).in_scope(|| black_box(()));
    };
    let baseline = Dispatch::new(registry());
    let measured = Dispatch::new(registry().with(GpuMemLayer::new()));
    let mut group = criterion.benchmark_group("spans");
    group.sample_size(50);
    // The measurements alternate, because clocks drift.
    for round in 1..=3 {
        for (name, dispatch) in [("baseline", &baseline), ("measured", &measured)] {
            with_default(dispatch, || {
                group.bench_function(format!("{name}: a span ({round})"), |bench| bench.iter(plain));
                group.bench_function(format!("{name}: a span with the fields ({round})"), |bench| bench.iter(fields));
            });
        }
    }
    with_default(&measured, || {
        let open: Vec<_> = (0..1000).map(|_| info_span!("open")).collect();
        group.bench_function("measured: a span beside 1,000 open ones", |bench| bench.iter(plain));
        let span = info_span!("poll");
        group.bench_function("measured: enter and exit", |bench| bench.iter(|| span.in_scope(|| black_box(()))));
        drop(open);
    });
    group.finish();
}

criterion_group!(benches, spans);
criterion_main!(benches);
