//! Reads the options: `#[gpu_mem_trace(ctx = "step", silent)]`.

use proc_macro2::{Ident, Span};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Lit, Path, Result, Token};

use crate::amount;

/// The options as they were written; what is absent is left to the library.
#[derive(Default)]
pub(crate) struct Args {
    pub(crate) ctx: Option<Ctx>,
    pub(crate) device: Option<u32>,
    /// A variant of `gpumem::Gauge`.
    pub(crate) gauge: Option<Ident>,
    pub(crate) silent: Option<bool>,
    pub(crate) on_exit_report: Option<bool>,
    /// Only what one thread allocates.
    pub(crate) thread_local: bool,
    pub(crate) skip: bool,
    /// Each statement is told.
    pub(crate) lines: bool,
    pub(crate) max_peak: Option<i128>,
    /// Where the library is found, if not at `::gpumem`.
    pub(crate) gpumem: Option<Path>,
}

pub(crate) struct Ctx {
    /// The word `ctx`.
    pub(crate) key: Ident,
    pub(crate) value: String,
}

const OPTIONS: [&str; 10] =
    ["ctx", "device", "gauge", "silent", "on_exit_report", "thread_local", "lines", "max_peak", "skip", "crate"];

impl Parse for Args {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut args = Self::default();
        let mut seen = Vec::new();
        // What needs exact figures.
        let mut exact = None;
        while !input.is_empty() {
            let key = option(input, &mut seen, &OPTIONS)?;
            match key.to_string().as_str() {
                "ctx" => {
                    let value = value(&key, input, r#"a string: `ctx = "step"`"#, string)?;
                    args.ctx = Some(Ctx { key, value });
                }
                "device" => args.device = Some(value(&key, input, ORDINAL, ordinal)?),
                "gauge" => args.gauge = Some(value(&key, input, GAUGES, gauge)?),
                "silent" => args.silent = Some(flag(&key, input)?),
                "on_exit_report" => args.on_exit_report = Some(flag(&key, input)?),
                "thread_local" => {
                    args.thread_local = flag(&key, input)?;
                    if args.thread_local {
                        exact = Some(key);
                    }
                }
                "lines" => args.lines = flag(&key, input)?,
                "max_peak" => {
                    args.max_peak = Some(value(&key, input, AMOUNT, amount)?);
                    exact = Some(key);
                }
                "skip" => args.skip = flag(&key, input)?,
                _ => args.gpumem = Some(path(&key, input)?),
            }
            comma(input)?;
        }
        let is_exact = args.gauge.as_ref().is_none_or(|gauge| gauge == "Exact");
        match exact {
            Some(key) if !is_exact => {
                let message = format!("`{key}` needs exact figures; leave `gauge` out");
                Err(Error::new(key.span(), message))
            }
            _ => Ok(args),
        }
    }
}

/// The next option's name: one that exists and was not given before.
pub(crate) fn option(input: ParseStream<'_>, seen: &mut Vec<Ident>, options: &[&str]) -> Result<Ident> {
    let known = || format!("the options are `{}`", options.join("`, `"));
    if !input.peek(Ident::peek_any) {
        return Err(input.error(known()));
    }
    let key = input.call(Ident::parse_any)?;
    if seen.contains(&key) {
        let message = format!("the option `{key}` is given twice");
        return Err(Error::new(key.span(), message));
    }
    if !options.iter().any(|option| key == option) {
        let message = format!("unknown option `{key}`; {}", known());
        return Err(Error::new(key.span(), message));
    }
    seen.push(key.clone());
    Ok(key)
}

/// What stands between two options; nothing after the last.
pub(crate) fn comma(input: ParseStream<'_>) -> Result<()> {
    if !input.is_empty() {
        input.parse::<Token![,]>()?;
    }
    Ok(())
}

pub(crate) const AMOUNT: &str = r#"an amount of memory: "512 MB", "1.5 GiB", or a number of bytes"#;
pub(crate) const ORDINAL: &str = "the number of a CUDA device: `device = 1`";
const GAUGES: &str = r#""exact", "pool", "sampled" or "off""#;

pub(crate) fn string(lit: &Lit) -> Option<String> {
    match lit {
        Lit::Str(text) => Some(text.value()),
        _ => None,
    }
}

fn boolean(lit: &Lit) -> Option<bool> {
    match lit {
        Lit::Bool(lit) => Some(lit.value),
        _ => None,
    }
}

/// Bytes: MB are MiB, as everywhere.
pub(crate) fn amount(lit: &Lit) -> Option<i128> {
    match lit {
        Lit::Str(text) => amount::bytes(&text.value()).filter(|bytes| *bytes >= 0),
        Lit::Int(number) => number.base10_parse::<u64>().ok().map(Into::into),
        _ => None,
    }
}

pub(crate) fn ordinal(lit: &Lit) -> Option<u32> {
    match lit {
        Lit::Int(number) => number.base10_parse().ok(),
        _ => None,
    }
}

fn gauge(lit: &Lit) -> Option<Ident> {
    let variant = match string(lit)?.as_str() {
        "exact" => "Exact",
        "pool" => "Pool",
        "sampled" => "Sampled",
        "off" => "Off",
        _ => return None,
    };
    Some(Ident::new(variant, Span::mixed_site()))
}

/// `silent` alone, or `silent = false`.
fn flag(key: &Ident, input: ParseStream<'_>) -> Result<bool> {
    if !input.peek(Token![=]) {
        return Ok(true);
    }
    value(key, input, "`true` or `false`", boolean)
}

pub(crate) fn path(key: &Ident, input: ParseStream<'_>) -> Result<Path> {
    const EXPECTED: &str = "a path: `crate = my::gpumem`";
    equals(key, input, EXPECTED)?;
    let wrong = misfit(key, input, EXPECTED);
    Path::parse_mod_style(input).map_err(|_| wrong)
}

/// The literal after the `=`, as `read` understands it.
pub(crate) fn value<T>(
    key: &Ident,
    input: ParseStream<'_>,
    expected: &str,
    read: impl FnOnce(&Lit) -> Option<T>,
) -> Result<T> {
    equals(key, input, expected)?;
    let wrong = misfit(key, input, expected);
    let lit = input.parse::<Lit>().ok();
    lit.as_ref().and_then(read).ok_or(wrong)
}

fn equals(key: &Ident, input: ParseStream<'_>, expected: &str) -> Result<Token![=]> {
    input.parse().map_err(|_| misfit(key, input, expected))
}

/// What to say when the next token is not what `key` takes; said at `key` when there is none.
fn misfit(key: &Ident, input: ParseStream<'_>, expected: &str) -> Error {
    let span = if ends_here(input) { key.span() } else { input.span() };
    Error::new(span, format!("`{key}` takes {expected}"))
}

fn ends_here(input: ParseStream<'_>) -> bool {
    input.is_empty() || input.peek(Token![,])
}
