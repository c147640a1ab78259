//! Expands `#[gpu_mem_test(max_peak = "512 MB")]`.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Error, FnArg, Lit, Path, Result, Type, parse2};

use crate::amount;
use crate::expand::{Trace, builder_in_function, counted, library, limit, traced_function};
use crate::item::{Function, Item};
use crate::options::{self, AMOUNT, ORDINAL, parse_comma, parse_key, parse_path, parse_value};

/// Returns the traced test. After a mistake, returns one error and the unchanged function.
pub(crate) fn expand(options: TokenStream, item: &TokenStream) -> TokenStream {
    traced_test(options, item).unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #item)
    })
}

#[derive(Default)]
struct TestOptions {
    /// The limit in bytes.
    max_peak: Option<i128>,
    /// The limit in bytes.
    max_used: Option<i128>,
    leaks: Option<u64>,
    baseline: Option<String>,
    /// The option `fail_on_increase`, in hundredths of a per cent.
    increase: u32,
    device: Option<u32>,
    /// The option `threads = "all"`.
    all_threads: bool,
    /// The option `crate`: the path of the library.
    library: Option<Path>,
}

const KEYS: [&str; 8] = ["max_peak", "max_used", "leaks", "baseline", "fail_on_increase", "device", "threads", "crate"];

impl Parse for TestOptions {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        const BLOCKS: &str = "a number of blocks: `leaks = 0`";
        const FILE: &str = r#"a file: `baseline = "gpumem.json"`"#;
        const INCREASE: &str = r#"a percentage: `fail_on_increase = "5%"`"#;
        let mut options = Self::default();
        let mut seen = Vec::new();
        while !input.is_empty() {
            let key = parse_key(input, &mut seen, &KEYS)?;
            match key.to_string().as_str() {
                "max_peak" => options.max_peak = Some(parse_value(&key, input, AMOUNT, options::amount)?),
                "max_used" => options.max_used = Some(parse_value(&key, input, AMOUNT, options::amount)?),
                "leaks" => options.leaks = Some(parse_value(&key, input, BLOCKS, blocks)?),
                "baseline" => options.baseline = Some(parse_value(&key, input, FILE, options::string)?),
                "fail_on_increase" => options.increase = parse_value(&key, input, INCREASE, increase)?,
                "device" => options.device = Some(parse_value(&key, input, ORDINAL, options::ordinal)?),
                "threads" => {
                    options.all_threads = parse_value(&key, input, options::THREADS, options::all_threads)?;
                }
                _ => options.library = Some(parse_path(&key, input)?),
            }
            parse_comma(input)?;
        }
        Ok(options)
    }
}

fn blocks(lit: &Lit) -> Option<u64> {
    match lit {
        Lit::Int(number) => number.base10_parse().ok(),
        _ => None,
    }
}

fn increase(lit: &Lit) -> Option<u32> {
    amount::percent(&options::string(lit)?)
}

fn traced_test(options: TokenStream, item: &TokenStream) -> Result<TokenStream> {
    let not_a_function = || Error::new(item.span(), "`#[gpu_mem_test]` works on functions");
    let Item::Function(mut function) = parse2::<Item>(item.clone()).map_err(|_| not_a_function())? else {
        return Err(not_a_function());
    };
    let options = parse2::<TestOptions>(options)?;
    if let Some(error) = function.unsupported() {
        return Err(error);
    }
    let has_test_attribute =
        function.attrs.iter().any(|attr| attr.path().segments.last().is_some_and(|name| name.ident == "test"));
    if let (Some(word), false) = (function.sig.asyncness, has_test_attribute) {
        let message = "an async test needs a runtime: put its attribute, such as #[tokio::test], below this one";
        return Err(Error::new(word.span, message));
    }
    let gpumem = library(options.library.as_ref());
    let simulated_gpu = declare_simulated_gpu(&function, &gpumem)?;
    function.sig.inputs.clear();
    let trace = trace(&function, &options, &gpumem, simulated_gpu.is_some());
    if !has_test_attribute {
        function.attrs.push(syn::parse_quote!(#[::core::prelude::v1::test]));
    }
    Ok(traced_function(&simulated_gpu.unwrap_or_default(), &function, &trace))
}

/// Returns the trace of the test, with its budget.
fn trace(function: &Function, options: &TestOptions, gpumem: &TokenStream, is_simulated: bool) -> Trace {
    let here = Span::mixed_site();
    let name = &function.sig.ident;
    let name = quote_spanned!(here=> ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)));
    let baseline = options.baseline.as_ref().map_or_else(
        || quote_spanned!(here=> ::core::option::Option::None),
        |file| quote_spanned!(here=> ::core::option::Option::Some(#file)),
    );
    let increase = options.increase;
    let mut budget = quote_spanned! {here=>
        #gpumem::__private::Budget::of_test(
            #name,
            ::core::option_env!("CARGO_BIN_NAME"),
            #baseline,
            #increase,
            #is_simulated,
            |__gpumem_text| #gpumem::__private::fail(__gpumem_text),
        )
    };
    budget.extend(counted(options.all_threads));
    let bytes = |bytes: Option<i128>| bytes.map(|bytes| bytes.to_token_stream());
    for (quantity, most) in [
        ("Peak", bytes(options.max_peak)),
        ("Used", bytes(options.max_used)),
        ("Leaks", options.leaks.map(|blocks| blocks.to_token_stream())),
    ] {
        budget.extend(most.map(|most| limit(gpumem, quantity, "AtMost", &most)));
    }
    let mut builder = builder_in_function(gpumem);
    if let Some(device) = options.device {
        builder.extend(quote_spanned!(here=> .device(#device)));
    }
    Trace { gpumem: gpumem.clone(), builder, lines: false, budget: Some(budget) }
}

/// Returns the statement that declares the test's argument, a simulated device, or `None` if the test takes no argument.
fn declare_simulated_gpu(function: &Function, gpumem: &TokenStream) -> Result<Option<TokenStream>> {
    const ARGUMENTS: &str = "a test takes no argument, or one `&SimGpu`";
    let inputs = &function.sig.inputs;
    if let Some(second) = inputs.get(1) {
        return Err(Error::new(second.span(), ARGUMENTS));
    }
    let argument = match inputs.first() {
        None => return Ok(None),
        Some(FnArg::Receiver(receiver)) => return Err(Error::new(receiver.span(), ARGUMENTS)),
        Some(FnArg::Typed(argument)) => argument,
    };
    let (pat, ty) = (&argument.pat, &argument.ty);
    let borrow = matches!(**ty, Type::Reference(_)).then(|| quote!(&));
    let device = quote_spanned!(Span::mixed_site()=> #gpumem::__private::simulated_gpu());
    Ok(Some(quote!(let #pat: #ty = #borrow #device;)))
}
