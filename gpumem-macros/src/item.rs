//! Parses the item below the attribute: a function or an `impl` block.
//!
//! A body stays a token stream, so that syntax that this version of syn does not know is kept.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::discouraged::Speculative;
use syn::parse::{End, Parse, ParseStream};
use syn::{Attribute, Error, ImplItem, Meta, Result, Signature, Token, Visibility, braced, token};

pub(crate) enum Item {
    Function(Box<Function>),
    Impl(Impl),
}

/// A function, a method or an associated function that has a body.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) defaultness: Option<Token![default]>,
    pub(crate) sig: Signature,
    pub(crate) brace: token::Brace,
    pub(crate) inner_attrs: Vec<Attribute>,
    pub(crate) body: TokenStream,
}

pub(crate) struct Impl {
    pub(crate) attrs: Vec<Attribute>,
    /// The tokens between the attributes and the braces.
    pub(crate) head: TokenStream,
    pub(crate) brace: token::Brace,
    pub(crate) inner_attrs: Vec<Attribute>,
    pub(crate) members: Vec<Member>,
}

pub(crate) enum Member {
    Function(Box<Function>),
    Other(Box<ImplItem>),
}

impl Parse for Item {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let ahead = input.fork();
        ahead.call(Attribute::parse_outer)?;
        ahead.parse::<Visibility>()?;
        if ahead.peek(Token![impl]) || ahead.peek2(Token![impl]) {
            return Ok(Self::Impl(input.parse()?));
        }
        let start = ahead.span();
        ahead.parse::<Option<Token![default]>>()?;
        if ahead.parse::<Signature>().is_err() {
            let message = "`#[gpu_mem_trace]` works on functions and `impl` blocks";
            return Err(Error::new(start, message));
        }
        if !ahead.peek(token::Brace) {
            let message = "`#[gpu_mem_trace]` needs a function that has a body";
            return Err(Error::new(ahead.span(), message));
        }
        Ok(Self::Function(input.parse()?))
    }
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let body;
        Ok(Self {
            attrs: input.call(Attribute::parse_outer)?,
            vis: input.parse()?,
            defaultness: input.parse()?,
            sig: input.parse()?,
            brace: braced!(body in input),
            inner_attrs: body.call(Attribute::parse_inner)?,
            body: body.parse()?,
        })
    }
}

impl Parse for Impl {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let attrs = input.call(Attribute::parse_outer)?;
        let mut head = TokenStream::new();
        // The last braces are the block, as in `impl Trait<{ N }> for Type {}`.
        while !(input.peek(token::Brace) && input.peek2(End)) {
            input.parse::<TokenTree>()?.to_tokens(&mut head);
        }
        let content;
        let brace = braced!(content in input);
        let inner_attrs = content.call(Attribute::parse_inner)?;
        let mut members = Vec::new();
        while !content.is_empty() {
            members.push(content.parse()?);
        }
        Ok(Self { attrs, head, brace, inner_attrs, members })
    }
}

impl Impl {
    /// Returns whether `#[async_trait]` is below this attribute and has not rewritten the methods yet.
    pub(crate) fn is_async_trait(&self) -> bool {
        self.attrs.iter().any(|attr| attr.path().segments.last().is_some_and(|name| name.ident == "async_trait"))
    }
}

impl Parse for Member {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let ahead = input.fork();
        if let Ok(function) = ahead.parse() {
            input.advance_to(&ahead);
            return Ok(Self::Function(Box::new(function)));
        }
        Ok(Self::Other(input.parse()?))
    }
}

impl Function {
    /// Returns an error if this function cannot be traced.
    pub(crate) fn unsupported(&self) -> Option<Error> {
        if let Some(word) = self.sig.constness {
            let message = "a `const fn` cannot be traced: it may run at compile time";
            return Some(Error::new(word.span, message));
        }
        let naked = self.attrs.iter().find(|attr| is_naked(attr))?;
        let message = "a naked function cannot be traced: its body is only assembly";
        Some(Error::new_spanned(naked.path(), message))
    }

    /// Returns whether the function already has its own `#[gpu_mem_trace]`, directly or in a `cfg_attr`.
    pub(crate) fn has_own_attribute(&self) -> bool {
        const NAME: &str = "gpu_mem_trace";
        self.attrs.iter().any(|attr| match &attr.meta {
            Meta::List(list) if list.path.is_ident("cfg_attr") => list.tokens.to_string().contains(NAME),
            meta => meta.path().segments.last().is_some_and(|name| name.ident == NAME),
        })
    }
}

/// Returns whether this is `#[unsafe(naked)]`, or `#[naked]`, the form that older compilers use.
fn is_naked(attr: &Attribute) -> bool {
    match &attr.meta {
        Meta::List(list) => list.path.is_ident("unsafe") && list.tokens.to_string() == "naked",
        meta => meta.path().is_ident("naked"),
    }
}
