//! The pages of `docs/book`, so that `cargo test` compiles and runs the code in them. `tests/pages.rs` compares this list with
//! the folder.

macro_rules! pages {
    ($($name:ident $file:literal)*) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!(concat!("../../../docs/book/src/", $file))]
            mod $name {}
        )*

        /// The pages in the list.
        pub const PAGES: &[&str] = &[$($file),*];
    };
}

pages! {
    introduction "introduction.md"
    numbers "numbers.md"
    where_it_is "where.md"
    output "output.md"
    recordings "recordings.md"
    command "command.md"
    python "python.md"
    metrics "metrics.md"
    environment "environment.md"
    platforms "platforms.md"
    off "off.md"
    zero_cost "zero-cost.md"
    async_code "async.md"
    tracing_spans "tracing.md"
    gauges "gauges.md"
    tests "tests.md"
    ci "ci.md"
    dry "dry.md"
    estimates "estimates.md"
    troubleshooting "troubleshooting.md"
    cudarc "frameworks/cudarc.md"
    candle "frameworks/candle.md"
    burn "frameworks/burn.md"
    tch "frameworks/tch.md"
    ort "frameworks/ort.md"
    pools "frameworks/pools.md"
    coming_from "coming-from.md"
    fastai "migration/fastai.md"
    pytorch "migration/pytorch.md"
    memory_utils "migration/memory-utils.md"
    costs "costs.md"
    limits "limits.md"
    internals "internals.md"
    predictions "predictions.md"
}

/// The documentation of the macros.
#[cfg(doctest)]
mod macros {
    #[doc = include_str!("../../../gpumem-macros/docs/assert_gpu_mem.md")]
    mod assert_gpu_mem {}

    #[doc = include_str!("../../../gpumem-macros/docs/gpu_mem_test.md")]
    mod gpu_mem_test {}

    #[doc = include_str!("../../../gpumem-macros/docs/gpu_mem_trace.md")]
    mod gpu_mem_trace {}
}

/// The examples in the documentation of the crates below `gpumem`: see `build.rs`.
#[cfg(doctest)]
mod below {
    include!(concat!(env!("OUT_DIR"), "/examples.rs"));
}
