//! Writes the item back: a guard stands around the body that is traced, and a future is wrapped.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::Parser;
use syn::token::Brace;
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Error, Expr, ExprAsync, Path, Result, ReturnType, Stmt, Type, parse_quote, parse2};

use crate::args::Args;
use crate::item::{Function, Impl, Item, Member};
use crate::{arguments, budget, lines};

/// A mistake becomes one error, followed by the item as it was: nothing else breaks because of it.
pub(crate) fn expand(args: TokenStream, item: &TokenStream) -> TokenStream {
    traced(args, item).unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #item)
    })
}

fn traced(args: TokenStream, item: &TokenStream) -> Result<TokenStream> {
    let parsed = parse2::<Item>(item.clone())?;
    let options = args.clone();
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
            // First it, then this attribute once more: so the methods have arguments as they have without it.
            None if block.is_async_trait() => {
                let (attrs, gpumem) = (&block.attrs, library(args.gpumem.as_ref()));
                let tail = impl_block(&block, |function| with_body(function, &function.body));
                Ok(quote!(#(#attrs)* #[#gpumem::gpu_mem_trace(#options)] #tail))
            }
            None => {
                let (attrs, trace) = (&block.attrs, Trace::new(&args));
                let traced = impl_block(&block, |function| {
                    // Some say otherwise, or have no room for a guard.
                    let is_traced = !function.has_own_attribute() && function.refusal().is_none();
                    if is_traced { traced_function(function, &trace) } else { with_body(function, &function.body) }
                });
                Ok(quote!(#(#attrs)* #traced))
            }
        },
    }
}

/// The block without its attributes, with each method that has a body as `written` has it.
fn impl_block(block: &Impl, written: impl Fn(&Function) -> TokenStream) -> TokenStream {
    let Impl { head, brace, inner_attrs, members, .. } = block;
    let mut tokens = head.clone();
    brace.surround(&mut tokens, |tokens| {
        tokens.extend(quote!(#(#inner_attrs)*));
        for member in members {
            tokens.extend(match member {
                Member::Function(function) => written(function),
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
        return trace.around(function, first, body);
    };
    if function.sig.asyncness.is_none()
        && let Some(future) = returned_future(&mut stmts)
        && let Expr::Async(block) = &*future
    {
        *future = Expr::Verbatim(trace.future(function, block.clone()));
        return with_body(function, &quote!(#first #(#stmts)*));
    }
    // Items at the start stay there: clippy wants them before all statements.
    let items = stmts.iter().take_while(|stmt| matches!(stmt, Stmt::Item(_))).count();
    let (items, stmts) = stmts.split_at(items);
    trace.around(function, &quote!(#(#items)* #first), &trace.statements(stmts))
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
        if args.thread_local {
            builder.extend(quote_spanned!(here=> .thread_local_only()));
        }
        let budget = args.max_peak.map(|bytes| {
            let limit = budget::limit(&gpumem, "Peak", "AtMost", &bytes.to_token_stream());
            quote_spanned! {here=>
                #gpumem::__private::Budget::of_function(#ctx, |__gpumem_text| #gpumem::__private::fail(__gpumem_text))#limit
            }
        });
        Self { gpumem, builder, lines: args.lines, budget }
    }

    fn statements(&self, stmts: &[Stmt]) -> TokenStream {
        if self.lines { lines::marked(stmts) } else { quote!(#(#stmts)*) }
    }

    /// The function with its statements behind a guard, or in a future that is awaited. `first` comes before them.
    pub(crate) fn around(&self, function: &Function, first: &TokenStream, stmts: &TokenStream) -> TokenStream {
        let here = Span::mixed_site();
        let (gpumem, lines, body) = (&self.gpumem, self.new_lines(function), self.body());
        if function.sig.asyncness.is_some() {
            let mut function = function.clone();
            let returned = returned(&function, gpumem);
            let arguments = arguments::moved(&mut function.sig);
            let end = quote_spanned!(here=> let __gpumem_end = __gpumem_end;);
            let stmts = guarded(&end, function.brace, stmts);
            let traced = quote_spanned! {here=>
                #lines
                let __gpumem_end = #gpumem::__private::End::new();
                #gpumem::__private::Traced::new(
                    #body.ended_by(&__gpumem_end),
                    async move {
                        #returned
                        #arguments
                        #stmts
                    },
                )
                .await
            };
            return with_body(&function, &quote!(#first #traced));
        }
        let builder = &self.builder;
        let guard = if self.lines || self.budget.is_some() {
            quote_spanned!(here=> #body.start())
        } else {
            quote_spanned!(here=> #builder.start_or_off())
        };
        // A temporary that lives as long as a variable: a variable's name could be that of a constant of the user.
        let guards = quote_spanned!(here=> #lines let _ = &#guard;);
        let stmts = guarded(&guards, function.brace, stmts);
        with_body(function, &quote!(#first #stmts))
    }

    /// The async block, traced. What it owns is dropped after the trace, as the arguments of an `async fn` are.
    fn future(&self, function: &Function, mut block: ExprAsync) -> TokenStream {
        let here = Span::mixed_site();
        let (gpumem, body) = (&self.gpumem, self.body());
        let lines = self.new_lines(function);
        // The block owns these, whether it says `move` or not.
        let mut own = quote_spanned!(here=> let __gpumem_end = __gpumem_end;);
        if self.lines {
            own.extend(quote_spanned!(here=> let __gpumem_lines = __gpumem_lines;));
        }
        let stmts = std::mem::take(&mut block.block.stmts);
        let inside = if let Some(at) = lines::of_async_trait(&stmts) {
            // Its arguments first.
            let (before, after) = stmts.split_at(at);
            let after = self.statements(after);
            quote_spanned!(here=> #(#before)* #own #after)
        } else {
            guarded(&own, block.block.brace_token, &self.statements(&stmts))
        };
        block.block.stmts = vec![Stmt::Expr(Expr::Verbatim(inside), None)];
        quote_spanned! {here=> {
            #lines
            let __gpumem_end = #gpumem::__private::End::new();
            #gpumem::__private::Traced::new(#body.ended_by(&__gpumem_end), #block)
        }}
    }

    /// The statement that makes what the marks of the statements write to.
    fn new_lines(&self, function: &Function) -> TokenStream {
        if !self.lines {
            return TokenStream::new();
        }
        let gpumem = &self.gpumem;
        let end = u32::try_from(function.brace.span.close().start().line).unwrap_or(0);
        quote_spanned!(Span::mixed_site()=> let __gpumem_lines = #gpumem::__private::Lines::new(#end);)
    }

    fn body(&self) -> TokenStream {
        let here = Span::mixed_site();
        let Self { gpumem, builder, lines, budget } = self;
        let mut body = quote_spanned!(here=> #gpumem::__private::TraceSpec::new(#builder));
        if *lines {
            body.extend(quote_spanned!(here=> .lines(&__gpumem_lines)));
        }
        if let Some(budget) = budget {
            body.extend(quote_spanned!(here=> .budget(#budget)));
        }
        body
    }
}

/// The statements in a block of their own, and around it a block in which `guards` are dropped after all that is theirs.
///
/// Before edition 2024 the temporaries of a last expression outlive the variables of its block, and would outlive the guards.
/// The braces of a block decide its edition. The inner braces are the user's, so values are dropped as without the attribute. The
/// outer braces are ours, of edition 2024, so all temporaries of the user's block are dropped before the guards. A block also
/// passes the expected type on to its last expression; `match` and `let` do not.
pub(crate) fn guarded(guards: &TokenStream, brace: Brace, stmts: &TokenStream) -> TokenStream {
    let here = Span::mixed_site();
    let mut block = TokenStream::new();
    brace.surround(&mut block, |block| {
        // Around a lone expression the compiler would call the braces unnecessary.
        block.extend(quote_spanned!(here=> let () = (); #stmts));
    });
    quote_spanned!(here=> { #guards #block })
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
            assert!(written.contains(". start_or_off () ; { let () = () ; new @ syntax } }"), "{written}");
        }
    }
}
