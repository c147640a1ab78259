//! `assert_gpu_mem!` and `#[gpu_mem_test]`.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, FnArg, Lit, Path, Result, Token, Type, braced, parse2, token};

use crate::amount;
use crate::args::{self, AMOUNT, ORDINAL, comma, option, value};
use crate::expand::{Trace, function_name, guarded, library, traced_after};
use crate::item::{Function, Item};

/// `.limit(Figure::Peak, Relation::AtMost, 1024)`
pub(crate) fn limit(gpumem: &TokenStream, figure: &str, relation: &str, amount: &TokenStream) -> TokenStream {
    let (figure, relation) = (format_ident!("{figure}"), format_ident!("{relation}"));
    quote_spanned! {Span::mixed_site()=>
        .limit(#gpumem::__private::Figure::#figure, #gpumem::__private::Relation::#relation, #amount)
    }
}

/// `assert_gpu_mem!(peak < "2 GiB", used == 0, { … })`
pub(crate) fn assertion(input: TokenStream) -> TokenStream {
    let Assertion { gpumem, conditions, brace, block } = match parse2(input) {
        Ok(assertion) => assertion,
        Err(error) => return error.into_compile_error(),
    };
    let here = Span::mixed_site();
    let gpumem = library(gpumem.as_ref());
    let limits =
        conditions.iter().map(|Condition { figure, relation, amount }| limit(&gpumem, figure, relation, amount));
    // A temporary that lives as long as a variable, and needs no name.
    let guard = quote_spanned! {here=>
        let _ = &#gpumem::__private::TraceSpec::new(
            #gpumem::__private::GpuMemTrace::builder().silent(true).on_exit_report(false),
        )
        .budget(
            #gpumem::__private::Budget::of_assertion(
                ::core::concat!(::core::file!(), ":", ::core::line!()),
                |__gpumem_text| #gpumem::__private::fail(__gpumem_text),
            )#(#limits)*,
        )
        .start();
    };
    guarded(&guard, brace, &block)
}

struct Assertion {
    gpumem: Option<Path>,
    conditions: Vec<Condition>,
    brace: token::Brace,
    /// What is between the braces.
    block: TokenStream,
}

struct Condition {
    figure: &'static str,
    relation: &'static str,
    amount: TokenStream,
}

impl Parse for Assertion {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let (mut gpumem, mut conditions) = (None, Vec::new());
        loop {
            if input.is_empty() {
                let message = r#"the block to measure comes last: `assert_gpu_mem!(peak < "2 GiB", { … })`"#;
                return Err(Error::new(Span::call_site(), message));
            }
            if input.peek(token::Brace) {
                let block;
                let brace = braced!(block in input);
                let block = block.parse()?;
                input.parse::<Option<Token![,]>>()?;
                if !input.is_empty() {
                    return Err(input.error("nothing comes after the block"));
                }
                if conditions.is_empty() {
                    let message = r#"it asserts nothing; write a condition before the block, such as `peak < "2 GiB"`"#;
                    return Err(Error::new(Span::call_site(), message));
                }
                return Ok(Self { gpumem, conditions, brace, block });
            }
            if input.peek(Token![crate]) {
                let key = input.call(<Ident as syn::ext::IdentExt>::parse_any)?;
                gpumem = Some(args::path(&key, input)?);
            } else {
                conditions.push(input.parse()?);
            }
            comma(input)?;
        }
    }
}

impl Parse for Condition {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        const FIGURES: &str = "a condition is about `peak`, `used` or `leaks`";
        let word: Ident = input.parse().map_err(|error| Error::new(error.span(), FIGURES))?;
        let figure = match word.to_string().as_str() {
            "peak" => "Peak",
            "used" => "Used",
            "leaks" => "Leaks",
            _ => return Err(Error::new(word.span(), FIGURES)),
        };
        let relation = relation(input)?;
        let expr: Expr = input.parse()?;
        let amount = match &expr {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => {
                let is_blocks = figure == "Leaks";
                let bytes = amount::bytes(&text.value()).filter(|_| !is_blocks);
                let expected = if is_blocks { "a number of blocks" } else { AMOUNT };
                let wrong = || Error::new(text.span(), format!("`{word}` is compared to {expected}"));
                bytes.ok_or_else(wrong)?.to_token_stream()
            }
            expr => expr.to_token_stream(),
        };
        Ok(Self { figure, relation, amount })
    }
}

fn relation(input: ParseStream<'_>) -> Result<&'static str> {
    let ahead = input.lookahead1();
    // The longer ones first: `<` is also the beginning of `<=`.
    if ahead.peek(Token![<=]) {
        input.parse::<Token![<=]>().map(|_| "AtMost")
    } else if ahead.peek(Token![>=]) {
        input.parse::<Token![>=]>().map(|_| "AtLeast")
    } else if ahead.peek(Token![==]) {
        input.parse::<Token![==]>().map(|_| "Equal")
    } else if ahead.peek(Token![!=]) {
        input.parse::<Token![!=]>().map(|_| "Unequal")
    } else if ahead.peek(Token![<]) {
        input.parse::<Token![<]>().map(|_| "Less")
    } else if ahead.peek(Token![>]) {
        input.parse::<Token![>]>().map(|_| "More")
    } else {
        Err(ahead.error())
    }
}

/// `#[gpu_mem_test(max_peak = "512 MB")]`. A mistake becomes one error, followed by the test as it was.
pub(crate) fn test(args: TokenStream, item: &TokenStream) -> TokenStream {
    tested(args, item).unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #item)
    })
}

/// The options of a test.
#[derive(Default)]
struct TestArgs {
    max_peak: Option<i128>,
    max_used: Option<i128>,
    leaks: Option<u64>,
    baseline: Option<String>,
    /// In hundredths of a per cent.
    growth: u32,
    device: Option<u32>,
    gpumem: Option<Path>,
}

const TEST_OPTIONS: [&str; 7] = ["max_peak", "max_used", "leaks", "baseline", "fail_on_increase", "device", "crate"];

impl Parse for TestArgs {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        const GROWTH: &str = r#"a percentage: `fail_on_increase = "5%"`"#;
        let mut args = Self::default();
        let mut seen = Vec::new();
        while !input.is_empty() {
            let key = option(input, &mut seen, &TEST_OPTIONS)?;
            match key.to_string().as_str() {
                "max_peak" => args.max_peak = Some(value(&key, input, AMOUNT, args::amount)?),
                "max_used" => args.max_used = Some(value(&key, input, AMOUNT, args::amount)?),
                "leaks" => args.leaks = Some(value(&key, input, "a number of blocks: `leaks = 0`", blocks)?),
                "baseline" => {
                    args.baseline = Some(value(&key, input, r#"a file: `baseline = "gpumem.json"`"#, args::string)?);
                }
                "fail_on_increase" => args.growth = value(&key, input, GROWTH, growth)?,
                "device" => args.device = Some(value(&key, input, ORDINAL, args::ordinal)?),
                _ => args.gpumem = Some(args::path(&key, input)?),
            }
            comma(input)?;
        }
        Ok(args)
    }
}

fn blocks(lit: &Lit) -> Option<u64> {
    match lit {
        Lit::Int(number) => number.base10_parse().ok(),
        _ => None,
    }
}

fn growth(lit: &Lit) -> Option<u32> {
    amount::percent(&args::string(lit)?)
}

fn tested(args: TokenStream, item: &TokenStream) -> Result<TokenStream> {
    let here = Span::mixed_site();
    let whole = || Error::new(item.span(), "#[gpu_mem_test] makes tests of functions");
    let Item::Function(mut function) = parse2::<Item>(item.clone()).map_err(|_| whole())? else { return Err(whole()) };
    let args = parse2::<TestArgs>(args)?;
    if let Some(error) = function.refusal() {
        return Err(error);
    }
    let is_test =
        function.attrs.iter().any(|attr| attr.path().segments.last().is_some_and(|name| name.ident == "test"));
    if let (Some(word), false) = (function.sig.asyncness, is_test) {
        let message = "an async test needs a runtime: put its attribute, such as #[tokio::test], below this one";
        return Err(Error::new(word.span, message));
    }
    let gpumem = library(args.gpumem.as_ref());
    let gpu = gpu(&function, &gpumem)?;
    function.sig.inputs.clear();

    let name = &function.sig.ident;
    let name = quote_spanned!(here=> ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)));
    let baseline = args.baseline.as_ref().map_or_else(
        || quote_spanned!(here=> ::core::option::Option::None),
        |file| quote_spanned!(here=> ::core::option::Option::Some(#file)),
    );
    let (growth, simulated) = (args.growth, gpu.is_some());
    let mut budget = quote_spanned! {here=>
        #gpumem::__private::Budget::of_test(
            #name,
            ::core::option_env!("CARGO_BIN_NAME"),
            #baseline,
            #growth,
            #simulated,
            |__gpumem_text| #gpumem::__private::fail(__gpumem_text),
        )
    };
    let bytes = |bytes: Option<i128>| bytes.map(|bytes| bytes.to_token_stream());
    for (figure, most) in [
        ("Peak", bytes(args.max_peak)),
        ("Used", bytes(args.max_used)),
        ("Leaks", args.leaks.map(|blocks| blocks.to_token_stream())),
    ] {
        budget.extend(most.map(|most| limit(&gpumem, figure, "AtMost", &most)));
    }
    let ctx = function_name(&gpumem);
    let mut builder = quote_spanned!(here=> #gpumem::__private::GpuMemTrace::builder().ctx(#ctx));
    if let Some(device) = args.device {
        builder.extend(quote_spanned!(here=> .device(#device)));
    }
    let trace = Trace { gpumem, builder, lines: false, budget: Some(budget) };
    if !is_test {
        function.attrs.push(syn::parse_quote!(#[::core::prelude::v1::test]));
    }
    Ok(traced_after(&gpu.unwrap_or_default(), &function, &trace))
}

/// The statement that makes the test's argument, a simulated device, if it has one.
fn gpu(function: &Function, gpumem: &TokenStream) -> Result<Option<TokenStream>> {
    let inputs = &function.sig.inputs;
    let (Some(first), None) = (inputs.first(), inputs.get(1)) else {
        return match inputs.get(1) {
            None => Ok(None),
            Some(second) => Err(Error::new(second.span(), "a test takes nothing, or a `&SimGpu`")),
        };
    };
    let FnArg::Typed(argument) = first else {
        return Err(Error::new(first.span(), "a test takes nothing, or a `&SimGpu`"));
    };
    let (pat, ty) = (&argument.pat, &argument.ty);
    let borrow = matches!(**ty, Type::Reference(_)).then(|| quote!(&));
    let device = quote_spanned!(Span::mixed_site()=> #gpumem::__private::simulated_gpu());
    Ok(Some(quote!(let #pat: #ty = #borrow #device;)))
}

#[cfg(test)]
mod tests {
    use syn::parse::Parser as _;

    #[test]
    fn all_relations_are_read() {
        for (text, relation) in
            [("<", "Less"), ("<=", "AtMost"), ("==", "Equal"), ("!=", "Unequal"), (">=", "AtLeast"), (">", "More")]
        {
            assert_eq!(super::relation.parse_str(text).unwrap(), relation);
        }
    }
}
