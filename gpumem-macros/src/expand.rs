//! Writes the item back: a guard is the first statement of each body that is traced, and a future is wrapped.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::Parser;
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Error, Expr, Path, Result, ReturnType, Stmt, Type, parse_quote, parse2};

use crate::args::Args;
use crate::item::{Function, Impl, Item, Member};
use crate::{budget, lines};

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
    traced_after(&TokenStream::new(), function, trace)
}

/// `first` comes before the trace.
pub(crate) fn traced_after(first: &TokenStream, function: &Function, trace: &Trace) -> TokenStream {
    let body = &function.body;
    let Ok(mut stmts) = Block::parse_within.parse2(body.clone()) else {
        // Syntax newer than syn: its statements cannot be told apart.
        let trace = Trace { lines: false, ..trace.clone() };
        let traced = trace.around(function, body);
        return with_body(function, &quote!(#first #traced));
    };
    if function.sig.asyncness.is_none()
        && let Some(future) = returned_future(&mut stmts)
    {
        *future = Expr::Verbatim(trace.future(function, future));
        return with_body(function, &quote!(#first #(#stmts)*));
    }
    // Items at the start stay there: clippy wants them before all statements.
    let items = stmts.iter().take_while(|stmt| matches!(stmt, Stmt::Item(_))).count();
    let (items, stmts) = stmts.split_at(items);
    let stmts = trace.around(function, &trace.statements(stmts));
    with_body(function, &quote!(#(#items)* #first #stmts))
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
fn returned(function: &Function, gpumem: &TokenStream) -> TokenStream {
    let mut ty = match &function.sig.output {
        ReturnType::Default => parse_quote!(()),
        ReturnType::Type(_, ty) => (**ty).clone(),
    };
    HideOpaque.visit_type_mut(&mut ty);
    if matches!(ty, Type::Never(_) | Type::Infer(_)) {
        return TokenStream::new();
    }
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
#[derive(Clone)]
pub(crate) struct Trace {
    /// Where the library is.
    pub(crate) gpumem: TokenStream,
    /// The settings of the trace.
    pub(crate) builder: TokenStream,
    pub(crate) lines: bool,
    /// `Budget::…`
    pub(crate) budget: Option<TokenStream>,
}

impl Trace {
    fn new(args: &Args) -> Self {
        let here = Span::mixed_site();
        let gpumem = library(args.gpumem.as_ref());
        let ctx = args.ctx.as_ref().map_or_else(|| function_name(&gpumem), |ctx| ctx.value.to_token_stream());
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
        let budget = args.max_peak.map(|bytes| {
            let limit = budget::limit(&gpumem, "Peak", "AtMost", &bytes.to_token_stream());
            quote_spanned!(here=> #gpumem::__private::Budget::of_function(#ctx)#limit)
        });
        Self { gpumem, builder, lines: args.lines, budget }
    }

    fn statements(&self, stmts: &[Stmt]) -> TokenStream {
        if self.lines { lines::marked(stmts) } else { quote!(#(#stmts)*) }
    }

    /// The statements behind a guard, or in a future that is awaited.
    pub(crate) fn around(&self, function: &Function, stmts: &TokenStream) -> TokenStream {
        let here = Span::mixed_site();
        let (gpumem, lines, body) = (&self.gpumem, self.new_lines(function), self.body());
        if function.sig.asyncness.is_some() {
            let returned = returned(function, gpumem);
            return quote_spanned! {here=>
                #lines
                #gpumem::__private::Traced::new(#body, async move { #returned #stmts }).await
            };
        }
        let builder = &self.builder;
        let guard = if self.lines || self.budget.is_some() {
            quote_spanned!(here=> #body.start())
        } else {
            quote_spanned!(here=> #builder.start_or_off())
        };
        quote_spanned!(here=> #lines let _trace = #guard; #stmts)
    }

    /// The async block, traced.
    fn future(&self, function: &Function, block: &mut Expr) -> TokenStream {
        let here = Span::mixed_site();
        let (gpumem, body) = (&self.gpumem, self.body());
        let lines = self.new_lines(function);
        if let (Expr::Async(block), true) = (&mut *block, self.lines) {
            let marked = lines::marked(&block.block.stmts);
            // The block owns its end, whether it says `move` or not.
            let stmts = quote_spanned!(here=> let lines = lines; #marked);
            block.block.stmts = vec![Stmt::Expr(Expr::Verbatim(stmts), None)];
        }
        let future = quote_spanned!(here=> #gpumem::__private::Traced::new(#body, #block));
        if self.lines { quote_spanned!(here=> { #lines #future }) } else { future }
    }

    /// The statement that makes what the marks of the statements write to.
    fn new_lines(&self, function: &Function) -> TokenStream {
        if !self.lines {
            return TokenStream::new();
        }
        let gpumem = &self.gpumem;
        let end = u32::try_from(function.brace.span.close().start().line).unwrap_or(0);
        quote_spanned!(Span::mixed_site()=> let lines = #gpumem::__private::Lines::new(#end);)
    }

    fn body(&self) -> TokenStream {
        let here = Span::mixed_site();
        let Self { gpumem, builder, lines, budget } = self;
        let mut body = quote_spanned!(here=> #gpumem::__private::Body::new(#builder));
        if *lines {
            body.extend(quote_spanned!(here=> .lines(&lines)));
        }
        if let Some(budget) = budget {
            body.extend(quote_spanned!(here=> .budget(#budget)));
        }
        body
    }
}

/// Where the library is.
pub(crate) fn library(path: Option<&Path>) -> TokenStream {
    path.map_or_else(|| quote_spanned!(Span::mixed_site()=> ::gpumem), ToTokens::to_token_stream)
}

/// The name of the function that this is written into.
pub(crate) fn function_name(gpumem: &TokenStream) -> TokenStream {
    quote_spanned!(Span::mixed_site()=> #gpumem::__private::function_name(&|| {}))
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
