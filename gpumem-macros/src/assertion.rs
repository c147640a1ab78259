//! Expands `assert_gpu_mem!(peak < "2 GiB", used == 0, { … })`.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, ExprLit, Lit, Path, Result, Token, braced, parse2, token};

use crate::amount;
use crate::expand::{counted, guarded_block, in_code, library, limit};
use crate::options::{self, AMOUNT, THREADS, parse_comma, parse_path, parse_value};

pub(crate) fn expand(input: TokenStream) -> TokenStream {
    let Assertion { library: path, all_threads, conditions, brace, block } = match parse2(input) {
        Ok(assertion) => assertion,
        Err(error) => return error.into_compile_error(),
    };
    let here = Span::mixed_site();
    let gpumem = library(path.as_ref());
    let (in_code, counted) = (in_code(), counted(all_threads));
    let limits =
        conditions.iter().map(|Condition { quantity, relation, amount }| limit(&gpumem, quantity, relation, amount));
    // The guard is a temporary that lives as long as a variable would, so it needs no name.
    let guard = quote_spanned! {here=>
        let _ = &#gpumem::__private::TraceSpec::new(
            #gpumem::__private::GpuMemTrace::builder().silent(true).on_exit_report(false),
        )
        .budget(
            #gpumem::__private::Budget::of_assertion(
                ::core::concat!(::core::file!(), ":", ::core::line!()),
                |__gpumem_text| #gpumem::__private::fail(__gpumem_text),
            )#in_code #counted #(#limits)*,
        )
        .start();
    };
    guarded_block(&guard, brace, &block)
}

struct Assertion {
    /// The path after `crate =`.
    library: Option<Path>,
    /// The option `threads = "all"`.
    all_threads: bool,
    conditions: Vec<Condition>,
    brace: token::Brace,
    /// The tokens between the braces.
    block: TokenStream,
}

/// A condition such as `peak < "2 GiB"`.
struct Condition {
    /// A variant of `gpumem::__private::Quantity`.
    quantity: &'static str,
    /// A variant of `gpumem::__private::Relation`.
    relation: &'static str,
    amount: TokenStream,
}

impl Parse for Assertion {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let (mut library, mut all_threads, mut conditions) = (None, false, Vec::new());
        loop {
            if input.is_empty() {
                let message = r#"the block to measure is missing: `assert_gpu_mem!(peak < "2 GiB", { … })`"#;
                return Err(Error::new(Span::call_site(), message));
            }
            if input.peek(token::Brace) {
                let block;
                let brace = braced!(block in input);
                let block = block.parse()?;
                input.parse::<Option<Token![,]>>()?;
                if !input.is_empty() {
                    return Err(input.error("nothing may follow the block"));
                }
                if conditions.is_empty() {
                    let message = r#"there is no condition; write one before the block, such as `peak < "2 GiB"`"#;
                    return Err(Error::new(Span::call_site(), message));
                }
                return Ok(Self { library, all_threads, conditions, brace, block });
            }
            if input.peek(Token![crate]) {
                let key = input.call(Ident::parse_any)?;
                library = Some(parse_path(&key, input)?);
            } else if is_threads(input) {
                let key: Ident = input.parse()?;
                all_threads = parse_value(&key, input, THREADS, options::all_threads)?;
            } else {
                conditions.push(input.parse()?);
            }
            parse_comma(input)?;
        }
    }
}

/// Returns whether the option `threads` comes next. No condition starts with that word.
fn is_threads(input: ParseStream<'_>) -> bool {
    input.fork().parse::<Ident>().is_ok_and(|word| word == "threads")
}

impl Parse for Condition {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        const EXPECTED: &str = "a condition starts with `peak`, `used` or `leaks`";
        let word: Ident = input.parse().map_err(|error| Error::new(error.span(), EXPECTED))?;
        let quantity = match word.to_string().as_str() {
            "peak" => "Peak",
            "used" => "Used",
            "leaks" => "Leaks",
            _ => return Err(Error::new(word.span(), EXPECTED)),
        };
        let relation = parse_relation(input)?;
        let expr: Expr = input.parse()?;
        let amount = match &expr {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => {
                let is_number_of_blocks = quantity == "Leaks";
                let bytes = amount::bytes(&text.value()).filter(|_| !is_number_of_blocks);
                let expected = if is_number_of_blocks { "a number of blocks" } else { AMOUNT };
                let wrong = || Error::new(text.span(), format!("`{word}` is compared to {expected}"));
                bytes.ok_or_else(wrong)?.to_token_stream()
            }
            expr => expr.to_token_stream(),
        };
        Ok(Self { quantity, relation, amount })
    }
}

fn parse_relation(input: ParseStream<'_>) -> Result<&'static str> {
    let ahead = input.lookahead1();
    // The longer operators are tested first, because `<=` starts with `<`.
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
