//! `#[gpu_mem_trace(lines)]`: inserts marks between the statements of a body.

use proc_macro2::{Delimiter, LineColumn, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::{ParseStream, Parser};
use syn::spanned::Spanned;
use syn::{Attribute, Expr, Local, Pat, Stmt, Type};

/// The maximum number of characters of a statement that are kept. The printed text is shorter.
const MAX_LENGTH: usize = 200;

/// Returns the statements with a mark before each one, and a mark after the last statement if that may declare variables. A mark is a
/// temporary that lives as long as a variable would, so it needs no name.
pub(crate) fn with_marks(stmts: &[Stmt]) -> TokenStream {
    let here = Span::mixed_site();
    let last = stmts.iter().rposition(|stmt| !matches!(stmt, Stmt::Item(_)));
    let async_trait_body = async_trait_body(stmts);
    let mut tokens = TokenStream::new();
    for (at, stmt) in stmts.iter().enumerate() {
        if let (true, Stmt::Local(local)) = (async_trait_body == Some(at), stmt) {
            tokens.extend(with_marks_inside(local));
            continue;
        }
        let has_row = !matches!(stmt, Stmt::Item(_)) && (async_trait_body.is_none() || !is_async_trait_code(stmt));
        if has_row {
            let Source { attrs, line, text } = source(stmt);
            // The mark has the location of the statement, so that a warning about unreachable code points there.
            let here = here.located_at(stmt.span());
            tokens.extend(quote_spanned!(here=> #(#attrs)* let _ = &__gpumem_lines.line(#line, #text);));
        }
        stmt.to_tokens(&mut tokens);
        if Some(at) == last && may_have_variables(stmt) {
            // If the statement never ends, this mark is unreachable. Only the compiler knows that.
            tokens.extend(quote_spanned!(here=> #[allow(unreachable_code)] let () = __gpumem_lines.end();));
        }
    }
    tokens
}

/// Returns the index of the statement that contains the body of a method under `#[async_trait]`: `let __ret: T = { … };`, or
/// `let _: () = { … };` if the method returns nothing. Returns `None` unless all other statements come from `#[async_trait]`.
pub(crate) fn async_trait_body(stmts: &[Stmt]) -> Option<usize> {
    let at = stmts.iter().position(|stmt| match stmt {
        Stmt::Local(local) => {
            let is_body = local.init.as_ref().is_some_and(|init| matches!(*init.expr, Expr::Block(_)));
            is_body && (name(local).as_deref() == Some("__ret") || is_unit(&local.pat))
        }
        _ => false,
    })?;
    let others = stmts.iter().enumerate().filter(|(other, _)| *other != at);
    others.into_iter().all(|(_, stmt)| is_async_trait_code(stmt)).then_some(at)
}

fn with_marks_inside(local: &Local) -> TokenStream {
    let Local { attrs, let_token, pat, init, .. } = local;
    match init.as_ref().map(|init| &*init.expr) {
        Some(Expr::Block(block)) => {
            let body = with_marks(&block.block.stmts);
            quote!(#(#attrs)* #let_token #pat = { #body };)
        }
        _ => local.to_token_stream(),
    }
}

/// Returns whether `#[async_trait]` generated this statement.
fn is_async_trait_code(stmt: &Stmt) -> bool {
    match stmt {
        Stmt::Local(local) => {
            let source = |init: &syn::LocalInit| init.expr.to_token_stream().to_string();
            let (name, init) = (name(local), local.init.as_ref().map(source));
            name.as_deref() == Some("__self")
                || name.is_some() && name == init
                || init.is_some_and(|init| init.contains("__arg"))
        }
        Stmt::Expr(Expr::Path(path), None) => path.path.is_ident("__ret"),
        Stmt::Expr(Expr::If(condition), _) => condition.cond.to_token_stream().to_string().contains("__ret"),
        _ => false,
    }
}

/// Returns whether this is `_: ()`.
fn is_unit(pat: &Pat) -> bool {
    let Pat::Type(typed) = pat else { return false };
    matches!((&*typed.pat, &*typed.ty), (Pat::Wild(_), Type::Tuple(tuple)) if tuple.elems.is_empty())
}

fn name(local: &Local) -> Option<String> {
    let mut pat = &local.pat;
    if let Pat::Type(typed) = pat {
        pat = &typed.pat;
    }
    match pat {
        Pat::Ident(pat) => Some(pat.ident.to_string()),
        _ => None,
    }
}

/// Returns whether a statement declares variables, or is a macro that may do so. A macro without a semicolon does not count, because it may
/// be the value of the body.
fn may_have_variables(stmt: &Stmt) -> bool {
    match stmt {
        Stmt::Local(_) => true,
        Stmt::Macro(call) => call.semi_token.is_some(),
        _ => false,
    }
}

struct Source {
    /// The `cfg` and `allow` attributes of the statement, which its mark needs as well.
    attrs: Vec<Attribute>,
    line: u32,
    text: String,
}

fn source(stmt: &Stmt) -> Source {
    let split = |input: ParseStream<'_>| Ok((input.call(Attribute::parse_outer)?, input.parse::<TokenStream>()?));
    let tokens = stmt.to_token_stream();
    let (mut attrs, tokens) = split.parse2(tokens.clone()).unwrap_or((Vec::new(), tokens));
    attrs.retain(|attr| attr.path().is_ident("cfg") || attr.path().is_ident("allow"));
    let line = u32::try_from(tokens.span().start().line).unwrap_or(0);
    let mut line_text = OneLine::default();
    line_text.write(tokens);
    let mut text = line_text.text;
    if text.chars().count() > MAX_LENGTH {
        text = text.chars().take(MAX_LENGTH - 1).chain(['…']).collect();
    }
    Source { attrs, line, text }
}

/// The source text of tokens on one line, with the user's spaces.
#[derive(Default)]
struct OneLine {
    text: String,
    /// The end of the last token.
    end: Option<LineColumn>,
}

impl OneLine {
    fn write(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => {
                    let (open, close) = match group.delimiter() {
                        Delimiter::Parenthesis => ("(", ")"),
                        Delimiter::Bracket => ("[", "]"),
                        Delimiter::Brace => ("{", "}"),
                        Delimiter::None => ("", ""),
                    };
                    // If syn has rebuilt the group, both spans cover the whole group.
                    let (start, end) = (group.span_open().start(), group.span_close().end());
                    self.token(open, start, LineColumn { column: start.column + open.len(), ..start });
                    if open == "{" && start.line != end.line {
                        self.text.push_str(" … }");
                        self.end = Some(end);
                    } else {
                        self.write(group.stream());
                        self.token(close, LineColumn { column: end.column.saturating_sub(close.len()), ..end }, end);
                    }
                }
                token => self.token(&token.to_string(), token.span().start(), token.span().end()),
            }
        }
    }

    fn token(&mut self, token: &str, start: LineColumn, end: LineColumn) {
        if let Some(before) = self.end {
            let closes = matches!(token, ")" | "]");
            if before.line == start.line {
                if before.column < start.column {
                    self.text.push(' ');
                }
            } else if closes {
                let without_comma = self.text.trim_end_matches(',').len();
                self.text.truncate(without_comma);
            } else if !matches!(token, "." | "?" | "," | ";") && !self.text.ends_with(['(', '[']) {
                self.text.push(' ');
            }
        }
        self.text.push_str(token);
        self.end = Some(end);
    }
}

#[cfg(test)]
mod tests {
    use syn::Block;
    use syn::parse::Parser;

    use super::source;

    #[test]
    fn a_statement_is_one_line() {
        for (written, shown) in [
            ("let x = f(a,b) ;", "let x = f(a,b) ;"),
            ("let x = f(\n    a,\n    &b,\n)?;", "let x = f(a, &b)?;"),
            ("x\n    .map(|x| x + 1)\n    .sum()", "x.map(|x| x + 1).sum()"),
            ("for i in 0..3 {\n    f(i);\n}", "for i in 0..3 { … }"),
            ("for i in 0..3 { f(i); }", "for i in 0..3 { f(i); }"),
            ("if a {\n    b\n} else {\n    c\n}", "if a { … } else { … }"),
            ("#[cfg(all())]\n/// Documented.\nlet x =\n    1;", "let x = 1;"),
            ("println!(\"{x}\");", "println!(\"{x}\");"),
            ("let v = vec![\n    1,\n    2,\n];", "let v = vec![1, 2];"),
        ] {
            let stmts = Block::parse_within.parse_str(written).unwrap();
            assert_eq!(source(&stmts[0]).text, shown);
        }
    }

    #[test]
    fn a_statement_has_its_line_and_its_attributes() {
        let stmts = Block::parse_within.parse_str("a;\n#[cfg(any())]\n#[allow(unused)]\nlet b = 1;").unwrap();
        let b = source(&stmts[1]);
        assert_eq!((b.attrs.len(), b.line), (2, 4));
    }
}
