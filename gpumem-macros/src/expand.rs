//! Writes the item back with a guard as the first statement of each body that is traced.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::Parser;
use syn::{Block, Error, Expr, ExprAsync, Result, Stmt, parse_quote_spanned, parse2};

use crate::args::Args;
use crate::item::{Function, Impl, Item, Member};

/// A mistake becomes one error, followed by the item as it was: nothing else breaks because of it.
pub(crate) fn expand(args: TokenStream, item: &TokenStream) -> TokenStream {
    traced(args, item).unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #item)
    })
}

fn traced(args: TokenStream, item: &TokenStream) -> Result<TokenStream> {
    let parsed = parse2::<Item>(item.clone())?;
    let args = parse2::<Args>(args)?;
    if args.skip {
        return Ok(item.clone());
    }
    match parsed {
        Item::Function(function) => match function.refusal() {
            Some(error) => Err(error),
            None => Ok(traced_function(&function, &guard(&args))),
        },
        Item::Impl(block) => match &args.ctx {
            Some(ctx) => {
                let message = "on an `impl` block each method reports under its own name";
                Err(Error::new(ctx.key.span(), message))
            }
            None => Ok(traced_impl(&block, &guard(&args))),
        },
    }
}

/// Every method that has a body, but for those that say otherwise or have no room for a guard.
fn traced_impl(block: &Impl, guard: &Stmt) -> TokenStream {
    let Impl { head, brace, inner_attrs, members } = block;
    let mut tokens = head.clone();
    brace.surround(&mut tokens, |tokens| {
        tokens.extend(quote!(#(#inner_attrs)*));
        for member in members {
            tokens.extend(match member {
                Member::Function(function) if !function.has_own_attribute() && function.refusal().is_none() => {
                    traced_function(function, guard)
                }
                Member::Function(function) => with_body(function, &function.body),
                Member::Other(item) => item.to_token_stream(),
            });
        }
    });
    tokens
}

fn traced_function(function: &Function, guard: &Stmt) -> TokenStream {
    let body = &function.body;
    let Ok(mut stmts) = Block::parse_within.parse2(body.clone()) else {
        return with_body(function, &quote!(#guard #body)); // syntax newer than syn
    };
    if let Some(future) = returned_future(function, &mut stmts) {
        insert(guard, &mut future.block.stmts);
    } else {
        insert(guard, &mut stmts);
    }
    with_body(function, &quote!(#(#stmts)*))
}

/// Puts the guard before all that runs, but after items: clippy wants those first.
fn insert(guard: &Stmt, stmts: &mut Vec<Stmt>) {
    let items = stmts.iter().take_while(|stmt| matches!(stmt, Stmt::Item(_)));
    stmts.insert(items.count(), guard.clone());
}

/// A function that ends in `async {}` or `Box::pin(async {})`, as `#[async_trait]` writes it, does its work in that block.
fn returned_future<'a>(function: &Function, stmts: &'a mut [Stmt]) -> Option<&'a mut ExprAsync> {
    if function.sig.asyncness.is_some() {
        return None;
    }
    match stmts.last_mut()? {
        Stmt::Expr(Expr::Async(block), None) => Some(block),
        Stmt::Expr(Expr::Call(call), None) if is_box_pin(&call.func) => match call.args.first_mut()? {
            Expr::Async(block) => Some(block),
            _ => None,
        },
        _ => None,
    }
}

fn is_box_pin(function: &Expr) -> bool {
    let Expr::Path(path) = function else {
        return false;
    };
    let mut names = path.path.segments.iter().rev().map(|name| &name.ident);
    names.next().is_some_and(|name| name == "pin") && names.next().is_some_and(|name| name == "Box")
}

fn with_body(function: &Function, body: &TokenStream) -> TokenStream {
    let Function { attrs, vis, defaultness, sig, brace, inner_attrs, .. } = function;
    let mut tokens = quote!(#(#attrs)* #vis #defaultness #sig);
    brace.surround(&mut tokens, |tokens| {
        tokens.extend(quote!(#(#inner_attrs)* #body));
    });
    tokens
}

/// The one statement that is added. It carries no `#[allow]`, which a user's `#![forbid]` would refuse.
fn guard(args: &Args) -> Stmt {
    let here = Span::mixed_site();
    let gpumem = args.gpumem.as_ref().map_or_else(|| quote_spanned!(here=> ::gpumem), ToTokens::to_token_stream);
    let ctx = args.ctx.as_ref().map_or_else(
        || quote_spanned!(here=> #gpumem::__private::function_name(&|| {})),
        |ctx| ctx.value.to_token_stream(),
    );
    let mut options = TokenStream::new();
    if let Some(device) = args.device {
        options.extend(quote_spanned!(here=> .device(#device)));
    }
    if let Some(gauge) = &args.gauge {
        options.extend(quote_spanned!(here=> .gauge(#gpumem::__private::Gauge::#gauge)));
    }
    if let Some(silent) = args.silent {
        options.extend(quote_spanned!(here=> .silent(#silent)));
    }
    if let Some(report) = args.on_exit_report {
        options.extend(quote_spanned!(here=> .on_exit_report(#report)));
    }
    parse_quote_spanned! {here=>
        let _trace = #gpumem::__private::GpuMemTrace::builder().ctx(#ctx) #options .start_or_off();
    }
}

#[cfg(test)]
mod tests {
    use quote::quote;

    #[test]
    fn syntax_newer_than_syn_passes_through() {
        for item in [quote!(fn f() { new @ syntax }), quote!(impl T { fn f() { new @ syntax } })] {
            let written = super::expand(quote!(silent), &item).to_string();
            assert!(!written.contains("compile_error"), "{written}");
            assert!(written.contains(". start_or_off () ; new @ syntax"), "{written}");
        }
    }
}
