//! The macros of [gpumem](https://docs.rs/gpumem), which re-exports them.

mod amount;
mod arguments;
mod assertion;
mod expand;
mod item;
mod lines;
mod options;
mod test_attribute;

use proc_macro::TokenStream;

// The examples are tested by `tests/book`. If this package depended on gpumem, Cargo would build gpumem a second time for the compiler.
#[cfg_attr(not(doctest), doc = include_str!("../docs/gpu_mem_trace.md"))]
#[proc_macro_attribute]
pub fn gpu_mem_trace(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::expand(&args.into(), &item.into()).into()
}

#[cfg_attr(not(doctest), doc = include_str!("../docs/assert_gpu_mem.md"))]
#[proc_macro]
pub fn assert_gpu_mem(input: TokenStream) -> TokenStream {
    assertion::expand(input.into()).into()
}

#[cfg_attr(not(doctest), doc = include_str!("../docs/gpu_mem_test.md"))]
#[proc_macro_attribute]
pub fn gpu_mem_test(args: TokenStream, item: TokenStream) -> TokenStream {
    test_attribute::expand(args.into(), &item.into()).into()
}
