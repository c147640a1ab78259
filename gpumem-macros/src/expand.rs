//! Generates the traced function: a guard around the body, or a traced future.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::parse::Parser;
use syn::token::Brace;
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Error, Expr, ExprAsync, Path, Result, ReturnType, Stmt, Type, parse_quote, parse2};

use crate::item::{Function, Impl, Item, Member};
use crate::options::Options;
use crate::{arguments, lines};

/// Returns the traced item. After a mistake, returns one error and the unchanged item, so that no further errors follow.
pub(crate) fn expand(options: &TokenStream, item: &TokenStream) -> TokenStream {
    traced_item(options, item).unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #item)
    })
}

fn traced_item(tokens: &TokenStream, item: &TokenStream) -> Result<TokenStream> {
    let parsed = parse2::<Item>(item.clone())?;
    let options = parse2::<Options>(tokens.clone())?;
    if options.skip {
        return Ok(item.clone());
    }
    match parsed {
        Item::Function(function) => match function.unsupported() {
            Some(error) => Err(error),
            None => Ok(traced_function(&TokenStream::new(), &function, &Trace::new(&options))),
        },
        Item::Impl(block) => match &options.ctx {
            Some(ctx) => {
                let message = "`ctx` cannot be used on an `impl` block: each method is reported under its own name";
                Err(Error::new(ctx.key.span(), message))
            }
            // `#[async_trait]` must run first, so this attribute is written again below it. The methods then have the same arguments as
            // without this attribute.
            None if block.is_async_trait() => {
                let (attrs, gpumem) = (&block.attrs, library(options.library.as_ref()));
                let block = impl_block(&block, |function| with_body(function, &function.body));
                Ok(quote!(#(#attrs)* #[#gpumem::gpu_mem_trace(#tokens)] #block))
            }
            None => {
                let (attrs, trace) = (&block.attrs, Trace::new(&options));
                let block = impl_block(&block, |function| {
                    let is_traced = !function.has_own_attribute() && function.unsupported().is_none();
                    if is_traced {
                        traced_function(&TokenStream::new(), function, &trace)
                    } else {
                        with_body(function, &function.body)
                    }
                });
                Ok(quote!(#(#attrs)* #block))
            }
        },
    }
}

/// Returns the block without its attributes. `write` generates the tokens of each method that has a body.
fn impl_block(block: &Impl, write: impl Fn(&Function) -> TokenStream) -> TokenStream {
    let Impl { head, brace, inner_attrs, members, .. } = block;
    let mut tokens = head.clone();
    brace.surround(&mut tokens, |tokens| {
        tokens.extend(quote!(#(#inner_attrs)*));
        for member in members {
            tokens.extend(match member {
                Member::Function(function) => write(function),
                Member::Other(item) => item.to_token_stream(),
            });
        }
    });
    tokens
}

/// Returns the traced function. The statements in `prelude` run before the trace starts.
pub(crate) fn traced_function(prelude: &TokenStream, function: &Function, trace: &Trace) -> TokenStream {
    let body = &function.body;
    let Ok(mut stmts) = Block::parse_within.parse2(body.clone()) else {
        // The body contains syntax that this version of syn does not know, so it cannot be split into statements.
        let trace = Trace { lines: false, ..trace.clone() };
        return trace.around(function, prelude, body);
    };
    if function.sig.asyncness.is_none()
        && let Some(future) = returned_future(&mut stmts)
        && let Expr::Async(block) = &*future
    {
        *future = Expr::Verbatim(trace.future(function, block.clone()));
        return with_body(function, &quote!(#prelude #(#stmts)*));
    }
    // Items at the start of the body stay there: clippy wants items before all statements.
    let items = stmts.iter().take_while(|stmt| matches!(stmt, Stmt::Item(_))).count();
    let (items, stmts) = stmts.split_at(items);
    trace.around(function, &quote!(#(#items)* #prelude), &trace.statements(stmts))
}

/// Finds the async block of a function that ends in `async {}` or `Box::pin(async {})`, which is what `#[async_trait]` generates.
fn returned_future(stmts: &mut [Stmt]) -> Option<&mut Expr> {
    let Stmt::Expr(last, None) = stmts.last_mut()? else { return None };
    match last {
        Expr::Async(_) => Some(last),
        Expr::Call(call) if is_box_pin(&call.func) => {
            call.args.first_mut().filter(|future| matches!(future, Expr::Async(_)))
        }
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

/// Returns a statement that tells the compiler the type of the body. Unlike a function, an async block cannot declare its type.
fn return_type_hint(function: &Function, gpumem: &TokenStream) -> TokenStream {
    let mut ty = match &function.sig.output {
        ReturnType::Default => parse_quote!(()),
        ReturnType::Type(_, ty) => (**ty).clone(),
    };
    ReplaceImplTrait.visit_type_mut(&mut ty);
    if matches!(ty, Type::Never(_) | Type::Infer(_)) {
        return TokenStream::new();
    }
    quote_spanned! {Span::mixed_site()=>
        if false {
            return #gpumem::__private::return_type_hint::<#ty>();
        }
    }
}

/// Replaces `impl Trait` with `_`, because `impl Trait` is not allowed inside a body.
struct ReplaceImplTrait;

impl VisitMut for ReplaceImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if matches!(ty, Type::ImplTrait(_)) {
            *ty = parse_quote!(_);
        } else {
            visit_mut::visit_type_mut(self, ty);
        }
    }
}

fn with_body(function: &Function, body: &TokenStream) -> TokenStream {
    let Function { attrs, vis, defaultness, sig, brace, inner_attrs, .. } = function;
    let mut tokens = quote!(#(#attrs)* #vis #defaultness #sig);
    brace.surround(&mut tokens, |tokens| {
        tokens.extend(quote!(#(#inner_attrs)* #body));
    });
    tokens
}

/// The code that is added to a body. It contains no `#[allow]`, which would be an error under a user's `#![forbid]`.
#[derive(Clone)]
pub(crate) struct Trace {
    /// The path of the library.
    pub(crate) gpumem: TokenStream,
    /// An expression for the builder of the trace, with the user's options.
    pub(crate) builder: TokenStream,
    pub(crate) lines: bool,
    /// An expression such as `Budget::…`.
    pub(crate) budget: Option<TokenStream>,
}

impl Trace {
    fn new(options: &Options) -> Self {
        let here = Span::mixed_site();
        let gpumem = library(options.library.as_ref());
        let ctx = options.ctx.as_ref().map_or_else(|| function_name(&gpumem), |ctx| ctx.value.to_token_stream());
        let mut builder = if options.ctx.is_some() {
            quote_spanned!(here=> #gpumem::__private::GpuMemTrace::builder())
        } else {
            builder_in_function(&gpumem)
        };
        if let Some(device) = options.device {
            builder.extend(quote_spanned!(here=> .device(#device)));
        }
        if let Some(gauge) = &options.gauge {
            builder.extend(quote_spanned!(here=> .gauge(#gpumem::__private::Gauge::#gauge)));
        }
        if let Some(silent) = options.silent {
            builder.extend(quote_spanned!(here=> .silent(#silent)));
        }
        if let Some(report) = options.on_exit_report {
            builder.extend(quote_spanned!(here=> .on_exit_report(#report)));
        }
        if options.stats {
            builder.extend(quote_spanned!(here=> .stats()));
        }
        if options.thread_local {
            builder.extend(quote_spanned!(here=> .thread_local_only()));
        }
        if options.all_threads && options.max_peak.is_none() {
            builder.extend(quote_spanned!(here=> .all_threads()));
        }
        if let Some(ctx) = &options.ctx {
            let ctx = &ctx.value;
            // The name comes last, because the other options decide whether the trace is off. If it is, the text is not copied.
            builder.extend(quote_spanned!(here=> .ctx_unless_off(|| #ctx)));
        }
        let budget = options.max_peak.map(|bytes| {
            let limit = limit(&gpumem, "Peak", "AtMost", &bytes.to_token_stream());
            let (in_code, counted) = (in_code(), counted(options.all_threads));
            quote_spanned! {here=>
                #gpumem::__private::Budget::of_function(#ctx, |__gpumem_text| #gpumem::__private::fail(__gpumem_text))
                    #in_code #counted #limit
            }
        });
        Self { gpumem, builder, lines: options.lines, budget }
    }

    fn statements(&self, stmts: &[Stmt]) -> TokenStream {
        if self.lines { lines::with_marks(stmts) } else { quote!(#(#stmts)*) }
    }

    /// Returns the function with a guard around `stmts`. For an `async fn`, the body awaits a traced future. `prelude` runs before the
    /// trace starts.
    fn around(&self, function: &Function, prelude: &TokenStream, stmts: &TokenStream) -> TokenStream {
        let here = Span::mixed_site();
        let (gpumem, lines, spec) = (&self.gpumem, self.declare_lines(function), self.spec());
        if function.sig.asyncness.is_some() {
            let mut function = function.clone();
            let type_hint = return_type_hint(&function, gpumem);
            let arguments = arguments::moved_into_block(&mut function.sig);
            let end = quote_spanned!(here=> let __gpumem_end = __gpumem_end;);
            let stmts = guarded_block(&end, function.brace, stmts);
            let traced = quote_spanned! {here=>
                #lines
                let __gpumem_end = #gpumem::__private::End::new();
                #gpumem::__private::Traced::new(
                    #spec.ended_by(&__gpumem_end),
                    async move {
                        #type_hint
                        #arguments
                        #stmts
                    },
                )
                .await
            };
            return with_body(&function, &quote!(#prelude #traced));
        }
        let builder = &self.builder;
        let guard = if self.lines || self.budget.is_some() {
            quote_spanned!(here=> #spec.start())
        } else {
            quote_spanned!(here=> #builder.start_or_off())
        };
        // The guard is a temporary that lives as long as a variable would. A named variable could clash with one of the user's constants.
        let guards = quote_spanned!(here=> #lines let _ = &#guard;);
        let stmts = guarded_block(&guards, function.brace, stmts);
        with_body(function, &quote!(#prelude #stmts))
    }

    /// Returns the async block as a traced future. Captured values are dropped after the trace ends, as arguments are.
    fn future(&self, function: &Function, mut block: ExprAsync) -> TokenStream {
        let here = Span::mixed_site();
        let (gpumem, spec) = (&self.gpumem, self.spec());
        let lines = self.declare_lines(function);
        // These statements make the block own both variables, whether or not it is a `move` block.
        let mut owned = quote_spanned!(here=> let __gpumem_end = __gpumem_end;);
        if self.lines {
            owned.extend(quote_spanned!(here=> let __gpumem_lines = __gpumem_lines;));
        }
        let stmts = std::mem::take(&mut block.block.stmts);
        let traced = if let Some(at) = lines::async_trait_body(&stmts) {
            // The statements before the body declare the method's arguments. The trace ends before these are dropped.
            let (arguments, rest) = stmts.split_at(at);
            let rest = self.statements(rest);
            quote_spanned!(here=> #(#arguments)* #owned #rest)
        } else {
            guarded_block(&owned, block.block.brace_token, &self.statements(&stmts))
        };
        block.block.stmts = vec![Stmt::Expr(Expr::Verbatim(traced), None)];
        quote_spanned! {here=> {
            #lines
            let __gpumem_end = #gpumem::__private::End::new();
            #gpumem::__private::Traced::new(#spec.ended_by(&__gpumem_end), #block)
        }}
    }

    /// Returns the statement that declares `__gpumem_lines`. The marks between the statements use it.
    fn declare_lines(&self, function: &Function) -> TokenStream {
        if !self.lines {
            return TokenStream::new();
        }
        let gpumem = &self.gpumem;
        let end = u32::try_from(function.brace.span.close().start().line).unwrap_or(0);
        quote_spanned!(Span::mixed_site()=> let __gpumem_lines = #gpumem::__private::Lines::new(#end);)
    }

    /// Returns an expression such as `TraceSpec::…`.
    fn spec(&self) -> TokenStream {
        let here = Span::mixed_site();
        let Self { gpumem, builder, lines, budget } = self;
        let mut spec = quote_spanned!(here=> #gpumem::__private::TraceSpec::new(#builder));
        if *lines {
            spec.extend(quote_spanned!(here=> .lines(&__gpumem_lines)));
        }
        if let Some(budget) = budget {
            spec.extend(quote_spanned!(here=> .budget(#budget)));
        }
        spec
    }
}

/// Returns a block that contains `guards` and, inside it, a block with the user's statements. The guards are dropped last.
///
/// Before edition 2024, the temporaries of a block's last expression outlive its variables, so they would outlive the guards. The edition
/// of a block is the span of its braces. The inner braces are the user's, so values are dropped as they are without the attribute. The outer
/// braces are ours and of edition 2024, so all temporaries of the user's block are dropped before the guards. A block also passes the
/// expected type on to its last expression, which `match` and `let` do not.
pub(crate) fn guarded_block(guards: &TokenStream, brace: Brace, stmts: &TokenStream) -> TokenStream {
    let here = Span::mixed_site();
    let mut block = TokenStream::new();
    brace.surround(&mut block, |block| {
        // Without this statement, the compiler would warn about unnecessary braces around a single expression.
        block.extend(quote_spanned!(here=> let () = (); #stmts));
    });
    quote_spanned!(here=> { #guards #block })
}

/// Returns a method call on a budget, such as `.limit(Quantity::Peak, Relation::AtMost, 1024)`.
pub(crate) fn limit(gpumem: &TokenStream, quantity: &str, relation: &str, amount: &TokenStream) -> TokenStream {
    let (quantity, relation) = (format_ident!("{quantity}"), format_ident!("{relation}"));
    quote_spanned! {Span::mixed_site()=>
        .limit(#gpumem::__private::Quantity::#quantity, #gpumem::__private::Relation::#relation, #amount)
    }
}

/// Returns the method call `.of_all_threads()` on a budget, or nothing.
pub(crate) fn counted(all_threads: bool) -> TokenStream {
    if all_threads { quote_spanned!(Span::mixed_site()=> .of_all_threads()) } else { TokenStream::new() }
}

/// Returns the method call `.in_code(cfg!(test))` on a budget. It tells the library whether the user's crate is compiled for its tests.
pub(crate) fn in_code() -> TokenStream {
    quote_spanned!(Span::mixed_site()=> .in_code(::core::cfg!(test)))
}

/// Returns the path of the library: the option `crate`, or `::gpumem`.
pub(crate) fn library(path: Option<&Path>) -> TokenStream {
    path.map_or_else(|| quote_spanned!(Span::mixed_site()=> ::gpumem), ToTokens::to_token_stream)
}

/// Returns an expression for the builder of a trace whose scope is the function.
pub(crate) fn builder_in_function(gpumem: &TokenStream) -> TokenStream {
    quote_spanned!(Span::mixed_site()=> #gpumem::__private::builder_in(&|| {}, ::core::module_path!()))
}

/// Returns an expression for the name of the function that contains it.
pub(crate) fn function_name(gpumem: &TokenStream) -> TokenStream {
    quote_spanned!(Span::mixed_site()=> #gpumem::__private::function_name(&|| {}))
}

#[cfg(test)]
mod tests {
    use quote::quote;

    #[test]
    fn a_body_with_syntax_unknown_to_syn_is_kept() {
        for item in [quote!(fn f() { new @ syntax }), quote!(impl T { fn f() { new @ syntax } })] {
            let written = super::expand(&quote!(silent), &item).to_string();
            assert!(!written.contains("compile_error"), "{written}");
            assert!(written.contains(". start_or_off () ; { let () = () ; new @ syntax } }"), "{written}");
        }
    }
}
