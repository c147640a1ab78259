//! The cases whose instructions `.ci/counts` counts. Each runs in its own process, on the stand-in driver.

use std::{env, fs, hint::black_box, path::Path};

use cudarc::driver::{CudaContext, result};
use gpumem::{
    Bytes, GpuMemTrace,
    pool::Pool,
    recording::{self, Keep},
};
use gpumem_tracing::GpuMemLayer;
use tracing::{Dispatch, dispatcher::with_default, info_span};
use tracing_subscriber::{layer::SubscriberExt, registry};

/// How often each case runs. `.ci/counts` divides the sum of instructions by the same number.
const TIMES: u32 = 1000;

/// The name of a case, and its function, whose argument is a folder that it may write to.
type Case = (&'static str, fn(&Path));

const CASES: [Case; 11] = [
    ("pair_without_hooks", pair_without_hooks),
    ("pair_untraced", pair_untraced),
    ("pair_traced", pair_traced),
    ("pair_recorded", pair_recorded),
    ("pair_on_stream", pair_on_stream),
    ("launch_without_hooks", launch_without_hooks),
    ("launch", launch),
    ("guard", guard),
    ("part", part),
    ("span", span),
    ("filtered_line", filtered_line),
];

/// Runs the named case. Without arguments, prints the names of all cases.
fn main() {
    let mut arguments = env::args_os().skip(1);
    let (Some(name), Some(folder)) = (arguments.next(), arguments.next()) else {
        for (name, _) in CASES {
            println!("{name}");
        }
        return;
    };
    let (_, case) = CASES.iter().find(|(case, _)| name == *case).expect("there is such a case");
    let _context = CudaContext::new(0).expect("the stand-in driver has a GPU");
    case(Path::new(&folder));
}

/// Runs the case. Callgrind finds this function by its name, and counts only the instructions in it.
#[inline(never)]
fn counted(case: &dyn Fn()) {
    (0..TIMES).for_each(|_| case());
}

/// Runs the case twice as often as it is counted. The first runs fill tables and caches of names, so they are not counted.
fn count(case: &dyn Fn()) {
    (0..TIMES).for_each(|_| case());
    counted(case);
}

fn pair() {
    // SAFETY: a context is current.
    let address = unsafe { result::malloc_sync(4096) }.expect("the GPU has memory");
    // SAFETY: nothing uses the memory.
    unsafe { result::free_sync(black_box(address)) }.expect("it is allocated");
}

fn trace() -> GpuMemTrace {
    let trace = GpuMemTrace::builder().silent(true).on_exit_report(false).start();
    trace.expect("allocations can be intercepted")
}

fn pair_without_hooks(_: &Path) {
    count(&pair);
}

fn pair_untraced(_: &Path) {
    drop(trace());
    count(&pair);
}

fn pair_traced(_: &Path) {
    let trace = trace();
    count(&pair);
    assert_eq!(trace.data().peaked, Bytes::kib(4), "the pairs are traced");
}

fn pair_recorded(folder: &Path) {
    let file = folder.join("recording.gpumem");
    recording::start(&file, Keep::All).expect("the file can be written");
    count(&pair);
    recording::end();
    assert!(fs::metadata(&file).is_ok_and(|file| file.len() > u64::from(TIMES)), "the pairs are recorded");
}

/// The hooks of these two calls are the fastest, because programs make them most often.
fn pair_on_stream(_: &Path) {
    let trace = trace();
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).expect("a context is current");
    count(&|| {
        // SAFETY: the stream exists.
        let address = unsafe { result::malloc_async(stream, 4096) }.expect("the GPU has memory");
        // SAFETY: nothing uses the memory.
        unsafe { result::free_async(black_box(address), stream) }.expect("it is allocated");
    });
    assert_eq!(trace.data().peaked, Bytes::kib(4), "the pairs are traced");
}

/// Returns a launch of a kernel. The stand-in driver reads the image, which is a text.
fn kernel() -> impl Fn() {
    // SAFETY: a context is current, and the image ends with a zero.
    let module = unsafe { result::module::load_data(c"module:2097152/add:0:0".as_ptr().cast()) };
    let module = module.expect("the image is valid");
    // SAFETY: the module is loaded.
    let function = unsafe { result::module::get_function(module, c"add".to_owned()) }.expect("it is in the module");
    move || {
        // SAFETY: the function has no arguments, and 0 is a stream.
        let launched = unsafe {
            result::launch_kernel(black_box(function), (1, 1, 1), (32, 1, 1), 0, std::ptr::null_mut(), &mut [])
        };
        launched.expect("the kernel is launched");
    }
}

fn launch_without_hooks(_: &Path) {
    count(&kernel());
}

/// Only the first launch of a kernel is looked at.
fn launch(_: &Path) {
    let _trace = trace();
    count(&kernel());
    assert!(gpumem::status().intercepted_by.is_some(), "the driver's functions have hooks");
}

fn guard(_: &Path) {
    count(&|| {
        black_box(trace().data());
    });
}

fn part(_: &Path) {
    let pool = Pool::register("pool", None).expect("allocations can be intercepted");
    let trace = trace();
    count(&|| {
        pool.allocated(black_box(4096), Bytes::kib(4));
        pool.freed(black_box(4096));
    });
    assert_eq!(trace.data().peaked, Bytes::kib(4), "the parts are traced");
}

fn span(_: &Path) {
    let dispatch = Dispatch::new(registry().with(GpuMemLayer::new()));
    with_default(&dispatch, || count(&|| info_span!("span").in_scope(|| black_box(()))));
}

/// `.ci/counts` sets `GPUMEM` so that no line is printed.
fn filtered_line(_: &Path) {
    count(&|| drop(GpuMemTrace::with_ctx("filtered")));
}
