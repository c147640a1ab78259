//! The macros of [gpumem](https://docs.rs/gpumem), which exports them.

mod amount;
mod arguments;
mod assertion;
mod expand;
mod item;
mod lines;
mod options;
mod test_attribute;

use proc_macro::TokenStream;

/// Reports how much GPU memory a function used, each time the function ends: by its last line, `return`, `?` or a panic.
///
/// ```
/// use gpumem::gpu_mem_trace;
///
/// struct Model;
///
/// impl Model {
///     #[gpu_mem_trace]
///     fn forward(&self) { /* … */ }   // △Used Peaked MB:     20    256   (step > Model::forward: exit)
/// }
///
/// #[gpu_mem_trace]
/// fn step() {                         // △Used Peaked MB:     20    512 (step: exit)
///     Model.forward();
/// }
/// # step();
/// ```
///
/// The attribute changes neither what the function does nor the order in which its values are dropped.
///
/// # What is counted
///
/// The trace starts before the first statement. It ends after the variables and temporaries of the body are dropped, and before
/// the arguments are dropped. So in `used`:
///
/// - the returned value counts, because it still exists;
/// - variables and temporaries of the body do not count in any edition, because they are dropped. `peaked` includes them;
/// - an argument that the body drops or moves away lowers `used`. An argument that still exists at the end does not change
///   `used`, whether the body uses it or not.
///
/// The same holds for an `async fn`. An async block that a function returns has captured values instead of arguments.
///
/// # Where it can be used
///
/// It can be used on functions and methods of every kind: generic, `unsafe`, `extern`, with any receiver, and in traits
/// if they have a body. A `const fn` and a naked function are errors.
///
/// **`async fn`**: the trace starts at the first poll and stays open across every `.await`. It reports when the body ends or
/// the future is dropped. The same holds for a function that ends in `async { … }` or `Box::pin(async { … })`, and for a method
/// under `#[async_trait]`, in either order of the two attributes. The attribute moves the arguments of an `async fn` into a block
/// inside it, so the future is larger.
///
/// **`impl` blocks**, with and without a trait: every method is traced, except `const fn`. A method with its own
/// `#[gpu_mem_trace]`, written with this name, follows only its own attribute.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// # struct Model;
/// #[gpu_mem_trace]
/// impl Model {
///     fn forward(&self) {}            // (Model::forward: exit)
///
///     #[gpu_mem_trace(ctx = "back")]
///     fn backward(&self) {}           // (back: exit)
///
///     #[gpu_mem_trace(skip)]
///     fn name(&self) {}               // not traced
/// }
/// # Model.forward(); Model.backward(); Model.name();
/// ```
///
/// # Options
///
/// Options can be combined. Each may be given once. On an `impl` block they apply to all methods.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(ctx = "epoch", device = 1, gauge = "sampled", on_exit_report = false)]
/// fn train() {}
///
/// #[gpu_mem_trace(stats, thread_local)]
/// fn handle() {}
///
/// #[gpu_mem_trace(silent, max_peak = "512 MB", threads = "all")]
/// fn frugal() {}
/// # train(); handle(); frugal();
/// ```
///
/// ## `ctx`
///
/// The name in the report. By default, it is the name of the function, or for a method the type and the name: `Model::forward`.
/// In the default body of a trait, the type is the one for which the method runs. It is not allowed on an `impl` block.
///
/// ## `device`
///
/// The CUDA ordinal of the device to measure. By default, the current device of the calling thread, or device 0 if there is none.
///
/// ## `gauge`
///
/// The kind of measurement: `"exact"`, `"sampled"`, or `"off"` to measure nothing. By default, the best gauge that is
/// available.
///
/// ## `silent`
///
/// Prints nothing. The same as `silent = true`.
///
/// ## `on_exit_report`
///
/// Says whether a line is printed when the function ends. It is `true` by default.
///
/// ## `stats`
///
/// Prints no line at the end of each call, but at the end of the process, or where the program calls `gpumem::stats_n_reset()`, one row
/// for all calls: how many there were, the least, the median, 99 % and the most of `used` and `peaked`, and the worst call.
///
/// ## `thread_local`
///
/// Counts only what the calling thread allocates, no matter which thread frees it. Use it for functions that several threads run
/// at the same time, to count each thread from the beginning: without it, a trace counts the whole process until a trace of another
/// thread overlaps it, and then its own scope, and its line is marked.
///
/// This option needs exact figures. If they are not available, the trace is off, and one line on stderr says why. For an
/// `async fn`, the trace counts the thread of the first poll, including other tasks on that thread. It counts every other thread
/// only while that thread polls the future.
///
/// ## `lines`
///
/// Prints a table below the line of the function, with one row for each statement: its own `used` and `peaked`, and how much more
/// is in use after it than at the start of the function. A loop is one statement. The row `}` shows what is dropped at the end.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, gpu_mem_trace, sim::{SimBlock, SimGpu}};
///
/// #[gpu_mem_trace(lines)]
/// fn forward(gpu: &SimGpu) -> gpumem::Result<SimBlock> {
///     let scratch = gpu.alloc(Bytes::mib(512))?;
///     for _ in 0..3 {
///         drop(gpu.alloc(scratch.bytes())?);
///     }
///     gpu.alloc(Bytes::mib(20))
/// }
/// // △Used Peaked MB:     20  1,004 (forward: exit)
/// //  line   used MB  peaked MB  total MB  statement
/// //     5   512.000      0.000   512.000  let scratch = gpu.alloc(Bytes::mib(512))?;
/// //     6     0.000    512.000   512.000  for _ in 0..3 { … }
/// //     9    20.000      0.000   532.000  gpu.alloc(Bytes::mib(20))
/// //    10  -512.000      0.000    20.000  }
/// # forward(&gpu)?;
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Each row starts from the reading that ended the row before it. The attribute adds a statement between your statements and
/// changes none of them, so `return`, `?`, borrows and drops work as before.
///
/// ## `max_peak`
///
/// A budget: the most memory that the function may need in addition to what is in use when it starts. If the function needed more,
/// it **panics** when it ends, in debug and release builds, and the message has the numbers. It does not panic while another panic
/// unwinds.
///
/// The trace counts only what the function's own thread allocates, with exact figures. If they are not available, one line on
/// stderr says so and the program continues. For an `async fn`, threads are counted as described for `thread_local`.
///
/// If threads that are in no scope allocate on the device meanwhile, it is not known what the function needed. Then it panics too,
/// and the message says which threads these were. Threads that belong to another test do not matter. Either let such threads enter
/// a scope of the function's thread ([`GpuMemTrace::handle`](https://docs.rs/gpumem/latest/gpumem/struct.GpuMemTrace.html)), or use
/// `threads = "all"`, or say with `thread_local` that they do not concern the function.
///
/// ## `threads`
///
/// `threads = "all"`: the budget of `max_peak` counts every thread of the process. In tests, it waits until no other test with a budget
/// runs, and these wait for it. If another test allocates nevertheless, because it has no budget, the result is not known.
///
/// ## `skip`
///
/// Leaves the function unchanged. Use it for a method of a traced `impl` block that needs no report.
///
/// ## `crate`
///
/// The path of the library, if your crate does not name it `gpumem`.
///
/// ```
/// mod telemetry {
///     pub use gpumem as memory;
/// }
///
/// #[telemetry::memory::gpu_mem_trace(crate = telemetry::memory)]
/// fn forward() {}
/// # forward();
/// ```
#[proc_macro_attribute]
pub fn gpu_mem_trace(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::expand(&args.into(), &item.into()).into()
}

/// Asserts how much GPU memory a block uses. The macro returns the value of the block.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, assert_gpu_mem};
///
/// let kept = assert_gpu_mem!(peak < "2 GiB", used == kept_bytes(), {
///     let _scratch = gpu.alloc(Bytes::gib(1))?;
///     gpu.alloc(Bytes::mib(20))?
/// });
/// # fn kept_bytes() -> u64 { 20 << 20 }
/// # drop(kept);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// A condition begins with one of three figures:
///
/// - `peak`: the most memory in use during the block, in addition to what was in use at its start;
/// - `used`: how much more memory is in use at the end, including the value of the block;
/// - `leaks`: the number of blocks of memory that were allocated inside and still exist.
///
/// It is followed by `<`, `<=`, `==`, `!=`, `>=` or `>`, and an amount: a text such as `"20 MB"` (MB means MiB), or any integer, in
/// bytes.
///
/// ```
/// # use gpumem::assert_gpu_mem;
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// assert_gpu_mem!(leaks == 0, peak >= 4096, {
///     drop(gpu.alloc(gpumem::Bytes::kib(4))?);
/// });
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// The macro counts only what the calling thread allocates, with exact figures. It panics with the numbers if a condition is false,
/// however the block is left, except by another panic. It also panics, with the reason, if the memory cannot be measured, or if
/// threads in no scope allocate on the device meanwhile, unless `GPUMEM_BUDGETS=skip` is set.
///
/// `threads = "all"` before the conditions counts every thread. Other tests with a budget wait meanwhile.
///
/// ```
/// # use gpumem::assert_gpu_mem;
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let device = gpu.clone();
/// assert_gpu_mem!(threads = "all", peak == "1 MiB", {
///     std::thread::spawn(move || drop(device.alloc(gpumem::Bytes::mib(1)))).join().unwrap();
/// });
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// `crate = path` before the conditions is the path of the library, if your crate does not name it `gpumem`.
///
/// ```
/// # mod telemetry { pub use gpumem; }
/// # let _gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// let sum = telemetry::gpumem::assert_gpu_mem!(crate = telemetry::gpumem, used == 0, { 1 + 2 });
/// assert_eq!(sum, 3);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[proc_macro]
pub fn assert_gpu_mem(input: TokenStream) -> TokenStream {
    assertion::expand(input.into()).into()
}

/// A `#[test]` with a budget of GPU memory. The test fails if it needs more.
///
/// ```
/// # use gpumem::gpu_mem_test;
/// use gpumem::{Bytes, sim::SimGpu};
///
/// #[gpu_mem_test(max_peak = "512 MB", max_used = 0, leaks = 0)]
/// fn forward_is_frugal(gpu: &SimGpu) -> gpumem::Result<()> {
///     let _scratch = gpu.alloc(Bytes::mib(256))?;
///     Ok(())
/// }
/// ```
///
/// The test counts only what its own thread allocates, with exact figures, so tests that run in parallel in one process do not
/// disturb each other. If the memory cannot be measured, the test fails. It also fails if threads that are in no scope allocate on the
/// device meanwhile, unless they belong to another test: the message says which threads these were, and what to do. With
/// `GPUMEM_BUDGETS=skip`, the test runs without its budget instead, and a line on stderr says so.
///
/// A test that takes a `&SimGpu` (or a `SimGpu`) always runs on a simulated device, and needs the feature `sim`. All such tests of
/// a process share one device of 16 GiB, or the first device of `GPUMEM_SIM`. A test without arguments runs on the GPU, or on the
/// simulated device if there is no GPU.
///
/// For an async test, put this attribute above the attribute of a runtime, such as `#[tokio::test]`.
///
/// # Options
///
/// Options can be combined. Each may be given once.
///
/// ## `max_peak`
///
/// The most memory that may be in use at any moment, in addition to what is in use when the test starts.
///
/// ## `max_used`
///
/// The most memory that may still be in use after the test has ended and dropped its variables, in addition to what is in use when it
/// starts.
///
/// ## `leaks`
///
/// The number of blocks of the test that may still exist at its end.
///
/// ## `baseline`
///
/// A file with the peaks of earlier runs, by the names of the tests. The test fails if its peak is higher than the peak in the file.
/// By default, the file that `GPUMEM_BASELINE` names, if it is set. A relative path starts at the folder in which the test runs,
/// which under Cargo is the folder of the package. `GPUMEM_BASELINE_UPDATE=1` writes the file instead; tests and processes may do that
/// at the same time. It needs the feature `baseline`.
///
/// ## `fail_on_increase`
///
/// The allowed excess of the peak over the baseline. It is 0 by default.
///
/// ```
/// # use gpumem::gpu_mem_test;
/// #[gpu_mem_test(baseline = "gpumem-baseline.json", fail_on_increase = "5%")]
/// fn forward() {}
/// ```
///
/// ## `device`, `threads` and `crate`
///
/// These are the same as for [`gpu_mem_trace`](macro@gpu_mem_trace): the device to measure, whether every thread counts, and the path
/// of the library. With `threads = "all"`, the test runs when no other test with a budget does.
///
/// ```
/// # mod telemetry { pub use gpumem; }
/// #[telemetry::gpumem::gpu_mem_test(max_peak = "512 MB", device = 1, threads = "all", crate = telemetry::gpumem)]
/// fn in_parallel() {}
/// ```
#[proc_macro_attribute]
pub fn gpu_mem_test(args: TokenStream, item: TokenStream) -> TokenStream {
    test_attribute::expand(args.into(), &item.into()).into()
}
