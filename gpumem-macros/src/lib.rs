//! The attribute `#[gpu_mem_trace]` of [gpumem](https://docs.rs/gpumem), which exports it.

mod args;
mod expand;
mod item;

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
/// The function stays as it was written; a `GpuMemTrace` becomes its first local variable, so it is dropped after all
/// the others. What the function returns still exists then and counts as used; its parameters are dropped later still.
///
/// # Where it can stand
///
/// On functions and methods of every kind: generic, `unsafe`, `extern`, with any receiver, and in traits where they have
/// a body. Only a `const fn` and a naked function are refused.
///
/// **`async fn`**: the trace starts at the first poll, lives across every `.await`, and reports when the future has ended
/// or is dropped, after all that it held, the parameters that its body names included. So do a function that ends in `async { … }` or `Box::pin(async { … })`, and a method under
/// `#[async_trait]`, whichever of the two attributes comes first.
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
