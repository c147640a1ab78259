//! Moves the arguments of an `async fn` into the traced async block, so that they are dropped in the same order as without the attribute.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote_spanned};
use syn::{Attribute, FnArg, Pat, PatIdent, Signature, parse_quote};

/// Replaces each argument with a plain name. Returns the statements that declare the user's arguments again inside the block, as the
/// compiler does for an `async fn`. The arguments are dropped from the last to the first, even those that the body does not use.
pub(crate) fn moved_into_block(sig: &mut Signature) -> TokenStream {
    let here = Span::mixed_site();
    let mut tokens = TokenStream::new();
    for (number, input) in sig.inputs.iter_mut().enumerate() {
        let argument = match input {
            // A `let` cannot declare `self`, so the block captures it. Captured values are dropped after the variables, and the first
            // argument is dropped last as well.
            FnArg::Receiver(receiver) => {
                let self_word = receiver.self_token;
                tokens.extend(quote_spanned!(here=> let _ = &#self_word;));
                continue;
            }
            FnArg::Typed(argument) => argument,
        };
        let (cfgs, lints) = (filtered(&argument.attrs, is_cfg), filtered(&argument.attrs, is_lint));
        argument.attrs.retain(|attr| !is_lint(attr));
        let argument_name = format_ident!("__gpumem_argument_{number}", span = here);
        let (name, declared) = match &*argument.pat {
            Pat::Ident(PatIdent { by_ref: None, subpat: None, mutability, ident, .. }) => {
                // Clippy warns when a name that starts with `_` is used, and when a `let` has no effect. The inner block avoids both
                // warnings.
                let (name, value) = if ident.to_string().starts_with('_') {
                    (&argument_name, quote_spanned!(here=> { let () = (); #argument_name }))
                } else {
                    (ident, ident.to_token_stream())
                };
                (name.clone(), quote_spanned!(here=> #(#cfgs)* #(#lints)* let #mutability #ident = #value;))
            }
            pat => {
                let declared = quote_spanned! {here=>
                    #(#cfgs)* let #argument_name = #argument_name;
                    #(#cfgs)* #(#lints)* let #pat = #argument_name;
                };
                (argument_name, declared)
            }
        };
        *argument.pat = parse_quote!(#name);
        tokens.extend(declared);
    }
    tokens
}

fn filtered(attrs: &[Attribute], predicate: impl Fn(&Attribute) -> bool) -> Vec<Attribute> {
    attrs.iter().filter(|attr| predicate(attr)).cloned().collect()
}

/// Returns whether this is a `cfg` attribute. The statement gets the same condition as the argument.
fn is_cfg(attr: &Attribute) -> bool {
    attr.path().is_ident("cfg")
}

/// Returns whether this is a lint attribute. The compiler applies the lint attributes of an argument where its name is declared, so they
/// move to the statement.
fn is_lint(attr: &Attribute) -> bool {
    ["allow", "expect", "warn", "deny", "forbid"].iter().any(|level| attr.path().is_ident(level))
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    #[test]
    fn each_argument_is_declared_again() {
        let mut sig = parse_quote! {
            async fn f(&self, mut a: A, #[cfg(x)] #[expect(unused)] (b, _): (B, C), ref c: D, #[other] _: E, _d: F)
        };
        let statements = super::moved_into_block(&mut sig).to_string();
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
