//! Scratch.
use gpumem::{Bytes, GpuMemTrace, gpu_mem_trace, sim::SimGpu};
use gpumem_tracing::GpuMemLayer;
use std::hint::black_box;
use tracing::{Dispatch, dispatcher::with_default, field::Empty, info_span};
use tracing_subscriber::{layer::SubscriberExt, registry};

#[gpu_mem_trace(stats)]
fn counted() {}

#[inline(never)]
fn run(times: u64, mode: &str) {
    let plain = || info_span!("plain").in_scope(|| black_box(()));
    let fields =
        || info_span!("fields", gpu_used = Empty, gpu_peaked = Empty, gpu_note = Empty).in_scope(|| black_box(()));
    let base = Dispatch::new(registry());
    let measured = Dispatch::new(registry().with(GpuMemLayer::new()));
    let begin = std::time::Instant::now();
    match mode {
        "base" => with_default(&base, || (0..times).for_each(|_| plain())),
        "span" => with_default(&measured, || (0..times).for_each(|_| plain())),
        "fields" => with_default(&measured, || (0..times).for_each(|_| fields())),
        "enter" => with_default(&measured, || {
            let s = info_span!("x");
            (0..times).for_each(|_| s.in_scope(|| black_box(())))
        }),
        "silent" => (0..times).for_each(|_| drop(GpuMemTrace::builder().ctx("silent").silent(true).start_or_off())),
        "stats" => (0..times).for_each(|_| drop(GpuMemTrace::builder().ctx("counted").stats().start_or_off())),
        "attr" => (0..times).for_each(|_| counted()),
        "request" => {
            (0..times).for_each(|n| drop(GpuMemTrace::builder().ctx(format!("request {n}")).stats().start_or_off()))
        }
        _ => panic!(),
    }
    if times > 100_000 {
        eprintln!("{mode}: {:.1} ns", begin.elapsed().as_secs_f64() * 1e9 / times as f64);
    }
}

fn main() {
    let _gpu = SimGpu::install(Bytes::gib(16)).unwrap();
    let mut args = std::env::args().skip(1);
    let times: u64 = args.next().unwrap().parse().unwrap();
    for mode in args {
        run(times, &mode);
    }
    std::process::exit(0);
}
