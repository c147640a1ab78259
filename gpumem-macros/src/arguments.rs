//! Moves the arguments of an `async fn` into the async block that is traced.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote_spanned};
use syn::{Attribute, FnArg, Pat, PatIdent, Signature, parse_quote};

/// Makes each argument a plain name, and gives the statements that make it what it was, as the compiler itself does for an
/// `async fn`. They are dropped from the last to the first, whether the body names them or not.
pub(crate) fn moved(sig: &mut Signature) -> TokenStream {
    let here = Span::mixed_site();
    let mut tokens = TokenStream::new();
    for (number, input) in sig.inputs.iter_mut().enumerate() {
        let argument = match input {
            // A `let` cannot declare `self`. The block captures it instead, and drops what it captured after its variables: the same
            // place where the first argument is dropped.
            FnArg::Receiver(receiver) => {
                let word = receiver.self_token;
                tokens.extend(quote_spanned!(here=> let _ = &#word;));
                continue;
            }
            FnArg::Typed(argument) => argument,
        };
        let (cfgs, lints) = (only(&argument.attrs, is_cfg), only(&argument.attrs, is_lint));
        argument.attrs.retain(|attr| !is_lint(attr));
        let whole = format_ident!("__gpumem_argument_{number}", span = here);
        let (name, declared) = match &*argument.pat {
            Pat::Ident(PatIdent { by_ref: None, subpat: None, mutability, ident, .. }) => {
                // Clippy objects to a use of a name that begins with `_`, and to one that is declared without an effect.
                let (name, value) = if ident.to_string().starts_with('_') {
                    (&whole, quote_spanned!(here=> { let () = (); #whole }))
                } else {
                    (ident, ident.to_token_stream())
                };
                (name.clone(), quote_spanned!(here=> #(#cfgs)* #(#lints)* let #mutability #ident = #value;))
            }
            pat => {
                let declared = quote_spanned! {here=>
                    #(#cfgs)* let #whole = #whole;
                    #(#cfgs)* #(#lints)* let #pat = #whole;
                };
                (whole, declared)
            }
        };
        *argument.pat = parse_quote!(#name);
        tokens.extend(declared);
    }
    tokens
}

fn only(attrs: &[Attribute], which: impl Fn(&Attribute) -> bool) -> Vec<Attribute> {
    attrs.iter().filter(|attr| which(attr)).cloned().collect()
}

/// Without the argument there is no variable.
fn is_cfg(attr: &Attribute) -> bool {
    attr.path().is_ident("cfg")
}

/// What is said of the argument, the compiler finds where it is declared.
fn is_lint(attr: &Attribute) -> bool {
    ["allow", "expect", "warn", "deny", "forbid"].iter().any(|level| attr.path().is_ident(level))
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    #[test]
    fn arguments_are_moved_as_they_are_declared() {
        let mut sig = parse_quote! {
            async fn f(&self, mut a: A, #[cfg(x)] #[expect(unused)] (b, _): (B, C), ref c: D, #[other] _: E, _d: F)
        };
        let statements = super::moved(&mut sig).to_string();
        let expected: proc_macro2::TokenStream = parse_quote! {
            let _ = &self;
            let mut a = a;
            #[cfg(x)] let __gpumem_argument_2 = __gpumem_argument_2;
            #[cfg(x)] #[expect(unused)] let (b, _) = __gpumem_argument_2;
            let __gpumem_argument_3 = __gpumem_argument_3;
            let ref c = __gpumem_argument_3;
            let __gpumem_argument_4 = __gpumem_argument_4;
            let _ = __gpumem_argument_4;
            let _d = { let () = (); __gpumem_argument_5 };
        };
        assert_eq!(statements, expected.to_string());
        let expected: syn::Signature = parse_quote! {
            async fn f(
                &self, a: A, #[cfg(x)] __gpumem_argument_2: (B, C), __gpumem_argument_3: D, #[other] __gpumem_argument_4: E,
                __gpumem_argument_5: F
            )
        };
        assert_eq!(quote::quote!(#sig).to_string(), quote::quote!(#expected).to_string());
    }
}
