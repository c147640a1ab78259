//! Parses the options of the attributes: `#[gpu_mem_trace(ctx = "step", silent)]`.

use proc_macro2::{Ident, Span};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Lit, Path, Result, Token};

use crate::amount;

/// The options of `#[gpu_mem_trace]` as the user wrote them. The library chooses the value of an option that is missing.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct Options {
    pub(crate) ctx: Option<Ctx>,
    pub(crate) device: Option<u32>,
    /// A variant of `gpumem::Gauge`.
    pub(crate) gauge: Option<Ident>,
    pub(crate) silent: Option<bool>,
    pub(crate) on_exit_report: Option<bool>,
    pub(crate) stats: bool,
    pub(crate) thread_local: bool,
    pub(crate) skip: bool,
    pub(crate) lines: bool,
    /// The limit in bytes.
    pub(crate) max_peak: Option<i128>,
    /// The option `threads = "all"`: the budget counts every thread.
    pub(crate) all_threads: bool,
    /// The option `crate`: the path of the library.
    pub(crate) library: Option<Path>,
}

pub(crate) struct Ctx {
    /// The word `ctx` in the source, for errors to point at.
    pub(crate) key: Ident,
    pub(crate) value: String,
}

const KEYS: [&str; 12] = [
    "ctx",
    "device",
    "gauge",
    "silent",
    "on_exit_report",
    "stats",
    "thread_local",
    "lines",
    "max_peak",
    "threads",
    "skip",
    "crate",
];

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut options = Self::default();
        let mut seen = Vec::new();
        // The last option seen that needs exact values.
        let mut needs_exact = None;
        let mut threads = None;
        while !input.is_empty() {
            let key = parse_key(input, &mut seen, &KEYS)?;
            match key.to_string().as_str() {
                "ctx" => {
                    let value = parse_value(&key, input, r#"a string: `ctx = "step"`"#, string)?;
                    options.ctx = Some(Ctx { key, value });
                }
                "device" => options.device = Some(parse_value(&key, input, ORDINAL, ordinal)?),
                "gauge" => options.gauge = Some(parse_value(&key, input, GAUGES, gauge)?),
                "silent" => options.silent = Some(parse_flag(&key, input)?),
                "on_exit_report" => options.on_exit_report = Some(parse_flag(&key, input)?),
                "stats" => options.stats = parse_flag(&key, input)?,
                "thread_local" => {
                    options.thread_local = parse_flag(&key, input)?;
                    if options.thread_local {
                        needs_exact = Some(key);
                    }
                }
                "lines" => options.lines = parse_flag(&key, input)?,
                "max_peak" => {
                    options.max_peak = Some(parse_value(&key, input, AMOUNT, amount)?);
                    needs_exact = Some(key);
                }
                "threads" => {
                    options.all_threads = parse_value(&key, input, THREADS, all_threads)?;
                    threads = Some(key);
                }
                "skip" => options.skip = parse_flag(&key, input)?,
                _ => options.library = Some(parse_path(&key, input)?),
            }
            parse_comma(input)?;
        }
        if let Some(key) = threads.filter(|_| options.thread_local) {
            let message =
                "`threads = \"all\"` counts every thread, and `thread_local` leaves some out; remove one of them";
            return Err(Error::new(key.span(), message));
        }
        let may_be_exact = options.gauge.as_ref().is_none_or(|gauge| gauge == "Exact");
        match needs_exact {
            Some(key) if !may_be_exact => {
                let message = format!("`{key}` needs exact numbers; remove the option `gauge`");
                Err(Error::new(key.span(), message))
            }
            _ => Ok(options),
        }
    }
}

/// Parses the name of the next option and adds it to `seen`. Returns an error if it is not one of `keys`, or is in `seen` already.
pub(crate) fn parse_key(input: ParseStream<'_>, seen: &mut Vec<Ident>, keys: &[&str]) -> Result<Ident> {
    let all = || format!("the options are `{}`", keys.join("`, `"));
    if !input.peek(Ident::peek_any) {
        return Err(input.error(all()));
    }
    let key = input.call(Ident::parse_any)?;
    if seen.contains(&key) {
        let message = format!("the option `{key}` is given twice");
        return Err(Error::new(key.span(), message));
    }
    if !keys.iter().any(|known| key == known) {
        let message = format!("unknown option `{key}`; {}", all());
        return Err(Error::new(key.span(), message));
    }
    seen.push(key.clone());
    Ok(key)
}

/// Parses the comma after an option. The last option does not need one.
pub(crate) fn parse_comma(input: ParseStream<'_>) -> Result<()> {
    if !input.is_empty() {
        input.parse::<Token![,]>()?;
    }
    Ok(())
}

pub(crate) const AMOUNT: &str =
    r#"an amount of memory with its unit: "512 MB", "1.5 GiB", or a number of bytes without quotes"#;
pub(crate) const ORDINAL: &str = "the ordinal of a CUDA device: `device = 1`";
pub(crate) const THREADS: &str =
    r#""all": `threads = "all"` counts every thread; without it a budget counts its own thread"#;
const GAUGES: &str = r#""exact", "sampled" or "off""#;

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

/// Parses an amount in bytes. MB means MiB, as everywhere in gpumem.
pub(crate) fn amount(lit: &Lit) -> Option<i128> {
    match lit {
        Lit::Str(text) => amount::bytes(&text.value()).filter(|bytes| *bytes >= 0),
        Lit::Int(number) => number.base10_parse::<u64>().ok().map(Into::into),
        _ => None,
    }
}

/// Parses `"all"`, the only value of `threads`, and returns true for it.
pub(crate) fn all_threads(lit: &Lit) -> Option<bool> {
    (string(lit)? == "all").then_some(true)
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
        "sampled" => "Sampled",
        "off" => "Off",
        _ => return None,
    };
    Some(Ident::new(variant, Span::mixed_site()))
}

/// Parses the value of a flag: nothing, which means true, `= true` or `= false`.
fn parse_flag(key: &Ident, input: ParseStream<'_>) -> Result<bool> {
    if !input.peek(Token![=]) {
        return Ok(true);
    }
    parse_value(key, input, "`true` or `false`", boolean)
}

/// Parses `= path`.
pub(crate) fn parse_path(key: &Ident, input: ParseStream<'_>) -> Result<Path> {
    const EXPECTED: &str = "a path: `crate = my::gpumem`";
    parse_equals(key, input, EXPECTED)?;
    let wrong = wrong_value(key, input, EXPECTED);
    Path::parse_mod_style(input).map_err(|_| wrong)
}

/// Parses `= literal` and converts the literal with `read`.
pub(crate) fn parse_value<T>(
    key: &Ident,
    input: ParseStream<'_>,
    expected: &str,
    read: impl FnOnce(&Lit) -> Option<T>,
) -> Result<T> {
    parse_equals(key, input, expected)?;
    let wrong = wrong_value(key, input, expected);
    let lit = input.parse::<Lit>().ok();
    lit.as_ref().and_then(read).ok_or(wrong)
}

fn parse_equals(key: &Ident, input: ParseStream<'_>, expected: &str) -> Result<Token![=]> {
    input.parse().map_err(|_| wrong_value(key, input, expected))
}

/// Returns the error for a wrong value. The error points at the next token, or at `key` if the value is missing.
fn wrong_value(key: &Ident, input: ParseStream<'_>, expected: &str) -> Error {
    let is_missing = input.is_empty() || input.peek(Token![,]);
    let span = if is_missing { key.span() } else { input.span() };
    Error::new(span, format!("`{key}` takes {expected}"))
}
