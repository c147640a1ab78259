//! The macros of [gpumem](https://docs.rs/gpumem), which exports them.

mod amount;
mod args;
mod arguments;
mod budget;
mod expand;
mod item;
mod lines;

use proc_macro::TokenStream;

/// Reports how much GPU memory a function used, each time that it ends: by its last line, by `return` or `?`, by a panic.
///
/// ```
/// use gpumem::gpu_mem_trace;
///
/// struct Model;
///
/// impl Model {
///     #[gpu_mem_trace]
///     fn forward(&self) { /* … */ }   // △Used Peaked MB:     20    256 (Model::forward: exit)
/// }
///
/// #[gpu_mem_trace]
/// fn step() {                         // △Used Peaked MB:     20    512 (step: exit)
///     Model.forward();
/// }
/// # step();
/// ```
///
/// The function does what it did without the attribute, and drops everything in the same order.
///
/// # What is counted
///
/// The trace starts before the first statement and ends when the variables and temporaries of the body are dropped, and before
/// the arguments are. So in `used`:
///
/// - what the function returns counts: it still exists;
/// - variables and temporaries of the body do not count, in any edition: they are dropped. At their worst moment they show in
///   `peaked`;
/// - an argument that the body drops or moves away lowers `used`. An argument that still exists at the end does not change it,
///   whether the body uses it or not.
///
/// The same holds for an `async fn`. An async block that a function returns has captured values instead of arguments.
///
/// # Where it can stand
///
/// On functions and methods of every kind: generic, `unsafe`, `extern`, with any receiver, and in traits where they have
/// a body. Only a `const fn` and a naked function are refused.
///
/// **`async fn`**: the trace starts at the first poll, lives across every `.await`, and reports when the body has ended or the
/// future is dropped. So do a function that ends in `async { … }` or `Box::pin(async { … })`, and a method under
/// `#[async_trait]`, whichever of the two attributes comes first. The attribute moves the arguments of an `async fn` into a
/// block inside it, so that the future takes more bytes.
///
/// **`impl` blocks**, of a type or of a trait for it: every method in it is traced, but for a `const fn`. A method that
/// has a `#[gpu_mem_trace]` of its own, known by this name, follows that one alone.
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
/// They can be combined, each given once. On an `impl` block they hold for all its methods.
///
/// ## `ctx`
///
/// The name in the report. Without it, that is the function's own, after its type's if it is a method: `Model::forward`.
/// The type is the one that the method runs for, also in a trait's default body. Not on an `impl` block.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(ctx = "epoch")]
/// fn train() {}                       // (epoch: exit)
/// # train();
/// ```
///
/// ## `device`
///
/// The CUDA ordinal of the device to watch. Without it, that is the calling thread's current device, else device 0.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(device = 1)]
/// fn on_the_second_card() {}
/// # on_the_second_card();
/// ```
///
/// ## `gauge`
///
/// How the memory is measured: `"exact"`, `"pool"`, `"sampled"`, or `"off"` to measure nothing. Without it, the best that there is.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(gauge = "sampled")]
/// fn beside_a_profiler() {}
/// # beside_a_profiler();
/// ```
///
/// ## `silent`
///
/// Prints nothing. The same as `silent = true`.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(silent)]
/// fn quiet() {}
/// # quiet();
/// ```
///
/// ## `on_exit_report`
///
/// Whether the line at the end is printed; it is, without this option.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(on_exit_report = false)]
/// fn no_line_at_the_end() {}
/// # no_line_at_the_end();
/// ```
///
/// ## `thread_local`
///
/// Counts only what the calling thread allocates, wherever it is freed, instead of the whole process: for functions that several
/// threads run at one time, whose reports would otherwise include each other's memory and end in `[overlaps other threads]`.
/// It needs exact figures. If there are none, the trace is off, and one line on stderr says why. For an `async fn`, it counts the
/// thread of the first poll, including other tasks on that thread, and each other thread while it polls the future.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(thread_local)]
/// fn handle() {}
/// # handle();
/// ```
///
/// ## `lines`
///
/// Tells each statement of the body under the line of the function: what it used and peaked, and what is more in use after
/// it than at the start of the function. A loop is one statement. What is dropped at the end has a row of its own, `}`.
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
/// Each row begins at the very reading that ended the one before. The body is not changed but for a statement between two
/// of its own, so that `return`, `?`, borrows and drops are what they were.
///
/// ## `max_peak`
///
/// A budget: the most that the function may need on top of what is in use when it starts. A function that needed more
/// **panics** when it ends, in every build, with the numbers; not while another panic unwinds. The trace counts what the
/// function's own thread allocates, exactly; where that cannot be measured, one line on stderr says so and the program
/// goes on. Of an `async fn`, that is the thread of its first poll, other tasks on it included, and every other one while
/// it polls the future.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// #[gpu_mem_trace(max_peak = "512 MB")]
/// fn frugal() {}
/// # frugal();
/// ```
///
/// ## `skip`
///
/// Leaves the function as it is: for the one method of a traced `impl` block that is not worth a line.
///
/// ```
/// # use gpumem::gpu_mem_trace;
/// # struct Model;
/// #[gpu_mem_trace]
/// impl Model {
///     #[gpu_mem_trace(skip)]
///     fn name(&self) {}
/// }
/// # Model.name();
/// ```
///
/// ## `crate`
///
/// Where the library is, when your crate does not know it as `gpumem`.
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
    expand::expand(args.into(), &item.into()).into()
}

/// Asserts what the memory of a block comes to, and gives the block's value.
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
/// `peak` is the most that was in use on top of the start, `used` what is more in use at the end, the block's value
/// included, and `leaks` the number of blocks that were allocated inside and are still there. They are compared by `<`,
/// `<=`, `==`, `!=`, `>=` or `>` to an amount as a text (MB are MiB), or to any integer in bytes. `crate = path` before them
/// says where the library is, if not at `::gpumem`.
///
/// It counts what the calling thread allocates, exactly. It panics with the numbers when a condition does not hold, however
/// the block is left but by a panic, and with the reason when it cannot be measured, unless `GPUMEM_BUDGETS=skip`.
#[proc_macro]
pub fn assert_gpu_mem(input: TokenStream) -> TokenStream {
    budget::assertion(input.into()).into()
}

/// A test with a budget of GPU memory: `#[test]`, and it fails when it comes to more.
///
/// ```
/// # #[cfg(any())]
/// mod tests {
///     use gpumem::{Bytes, gpu_mem_test, sim::SimGpu};
///
///     #[gpu_mem_test(max_peak = "512 MB", max_used = 0, leaks = 0)]
///     fn forward_is_frugal(gpu: &SimGpu) -> gpumem::Result<()> {
///         let _scratch = gpu.alloc(Bytes::mib(256))?;
///         Ok(())
///     }
/// }
/// ```
///
/// It counts what the test's own thread allocates, exactly, so that tests that run in parallel in one process are each
/// right. What could not be measured fails, unless `GPUMEM_BUDGETS=skip`, and a line on stderr says that it was skipped.
///
/// A test that takes a `&SimGpu` (or a `SimGpu`) runs on a simulated device (feature `sim`), with a GPU and without: 16 GiB,
/// or the first of `GPUMEM_SIM`, which all such tests of a process share. One that takes nothing runs on the GPU that is
/// there, and on the simulated device where there is none.
///
/// Above the attribute of a runtime, such as `#[tokio::test]`, it stands on async tests.
///
/// # Options
///
/// - `max_peak = "512 MB"`: the most in use on top of the start, at any moment.
/// - `max_used = "20 MB"`: the most in use on top of the start when the test has ended and dropped its variables.
/// - `leaks = 0`: the most blocks that may be left of those that the test allocated.
/// - `baseline = "gpumem-baseline.json"`: the peak may not be more than in an earlier run, which this file holds by the name
///   of the test. Without the option, the file is `GPUMEM_BASELINE`'s, if that is set. Its path counts from the folder that
///   the test runs in: under Cargo, the package's. `GPUMEM_BASELINE_UPDATE=1` writes the file instead, also from concurrent
///   tests and processes. Needs the feature `baseline`.
/// - `fail_on_increase = "5%"`: how much more than the baseline is let pass; nothing, without this option.
/// - `device = 1`: the CUDA ordinal of the device to watch.
/// - `crate = path`: where the library is, if not at `::gpumem`.
#[proc_macro_attribute]
pub fn gpu_mem_test(args: TokenStream, item: TokenStream) -> TokenStream {
    budget::test(args.into(), &item.into()).into()
}
