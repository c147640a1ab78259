//! Writes the item back: a guard is the first statement of each body that is traced, and a future is wrapped.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::Parser;
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Error, Expr, Result, ReturnType, Stmt, Type, parse_quote, parse2};

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
            None => Ok(traced_function(&function, &Trace::new(&args))),
        },
        Item::Impl(block) => match &args.ctx {
            Some(ctx) => {
                let message = "on an `impl` block each method reports under its own name";
                Err(Error::new(ctx.key.span(), message))
            }
            None => Ok(traced_impl(&block, &Trace::new(&args))),
        },
    }
}

/// Every method that has a body, but for those that say otherwise or have no room for a guard.
fn traced_impl(block: &Impl, trace: &Trace) -> TokenStream {
    let Impl { head, brace, inner_attrs, members } = block;
    let mut tokens = head.clone();
    brace.surround(&mut tokens, |tokens| {
        tokens.extend(quote!(#(#inner_attrs)*));
        for member in members {
            tokens.extend(match member {
                Member::Function(function) if !function.has_own_attribute() && function.refusal().is_none() => {
                    traced_function(function, trace)
                }
                Member::Function(function) => with_body(function, &function.body),
                Member::Other(item) => item.to_token_stream(),
            });
        }
    });
    tokens
}

fn traced_function(function: &Function, trace: &Trace) -> TokenStream {
    let here = Span::mixed_site();
    let body = &function.body;
    let stmts = Block::parse_within.parse2(body.clone()).ok(); // `None`: syntax newer than syn
    if function.sig.asyncness.is_some() {
        let (items, rest) = match &stmts {
            Some(stmts) => split_items(stmts),
            None => (TokenStream::new(), body.clone()),
        };
        let returned = returned(function, trace);
        let future = trace.future(&quote_spanned!(here=> async move { #returned #rest }));
        return with_body(function, &quote_spanned!(here=> #items #future.await));
    }
    let Some(mut stmts) = stmts else {
        let guard = trace.guard();
        return with_body(function, &quote!(#guard #body));
    };
    if let Some(future) = returned_future(&mut stmts) {
        *future = Expr::Verbatim(trace.future(&future.to_token_stream()));
        return with_body(function, &quote!(#(#stmts)*));
    }
    let (items, rest) = split_items(&stmts);
    let guard = trace.guard();
    with_body(function, &quote!(#items #guard #rest))
}

/// The items at the start, which clippy wants before all statements, and what runs.
fn split_items(stmts: &[Stmt]) -> (TokenStream, TokenStream) {
    let items = stmts.iter().take_while(|stmt| matches!(stmt, Stmt::Item(_))).count();
    let (items, rest) = stmts.split_at(items);
    (quote!(#(#items)*), quote!(#(#rest)*))
}

/// A function that ends in `async {}` or `Box::pin(async {})`, as `#[async_trait]` writes it, does its work in that block.
fn returned_future(stmts: &mut [Stmt]) -> Option<&mut Expr> {
    let Stmt::Expr(tail, None) = stmts.last_mut()? else { return None };
    match tail {
        Expr::Async(_) => Some(tail),
        Expr::Call(call) if is_box_pin(&call.func) => {
            call.args.first_mut().filter(|future| matches!(future, Expr::Async(_)))
        }
        _ => None,
    }
}

/// Tells the compiler what the body returns: an async block, unlike the function around it, cannot say so.
fn returned(function: &Function, trace: &Trace) -> TokenStream {
    let mut ty = match &function.sig.output {
        ReturnType::Default => parse_quote!(()),
        ReturnType::Type(_, ty) => (**ty).clone(),
    };
    HideOpaque.visit_type_mut(&mut ty);
    if matches!(ty, Type::Never(_) | Type::Infer(_)) {
        return TokenStream::new();
    }
    let gpumem = &trace.gpumem;
    quote_spanned! {Span::mixed_site()=>
        if false {
            return #gpumem::__private::returned::<#ty>();
        }
    }
}

/// `impl Trait` cannot be named in a body.
struct HideOpaque;

impl VisitMut for HideOpaque {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if matches!(ty, Type::ImplTrait(_)) {
            *ty = parse_quote!(_);
        } else {
            visit_mut::visit_type_mut(self, ty);
        }
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

/// What is written into a body. It carries no `#[allow]`, which a user's `#![forbid]` would refuse.
struct Trace {
    /// Where the library is.
    gpumem: TokenStream,
    /// The settings of the trace.
    builder: TokenStream,
}

impl Trace {
    fn new(args: &Args) -> Self {
        let here = Span::mixed_site();
        let gpumem = args.gpumem.as_ref().map_or_else(|| quote_spanned!(here=> ::gpumem), ToTokens::to_token_stream);
        let ctx = args.ctx.as_ref().map_or_else(
            || quote_spanned!(here=> #gpumem::__private::function_name(&|| {})),
            |ctx| ctx.value.to_token_stream(),
        );
        let mut builder = quote_spanned!(here=> #gpumem::__private::GpuMemTrace::builder().ctx(#ctx));
        if let Some(device) = args.device {
            builder.extend(quote_spanned!(here=> .device(#device)));
        }
        if let Some(gauge) = &args.gauge {
            builder.extend(quote_spanned!(here=> .gauge(#gpumem::__private::Gauge::#gauge)));
        }
        if let Some(silent) = args.silent {
            builder.extend(quote_spanned!(here=> .silent(#silent)));
        }
        if let Some(report) = args.on_exit_report {
            builder.extend(quote_spanned!(here=> .on_exit_report(#report)));
        }
        Self { gpumem, builder }
    }

    /// The statement before all others.
    fn guard(&self) -> TokenStream {
        let builder = &self.builder;
        quote_spanned!(Span::mixed_site()=> let _trace = #builder.start_or_off();)
    }

    /// The future, traced.
    fn future(&self, future: &TokenStream) -> TokenStream {
        let Self { gpumem, builder } = self;
        quote_spanned!(Span::mixed_site()=> #gpumem::__private::Traced::new(#builder, #future))
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
