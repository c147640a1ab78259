//! The attribute `#[gpu_mem_trace]` of gpumem.

mod args;
mod expand;
mod item;

use proc_macro::TokenStream;

/// Traces the GPU memory of a function.
#[proc_macro_attribute]
pub fn gpu_mem_trace(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::expand(args.into(), &item.into()).into()
}
