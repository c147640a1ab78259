//! Parses the variable `GPUMEM`, which decides what each trace prints. The syntax is like `RUST_LOG`'s.

use std::{fmt, num::NonZeroU64};

use super::cards::size;
use crate::model::{Bytes, Trace, alike, quoted};

/// The output of a trace when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Prints its lines.
    Lines,
    /// Adds its values to the statistics of its name, and prints nothing.
    Stats,
    /// Prints and counts nothing.
    Off,
}

/// The settings for all traces with one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The output of the traces when they end; `None` leaves the choice to the program.
    pub what: Option<What>,
    /// A line is printed only if the trace used, freed or peaked at least this amount.
    at_least: Bytes,
    /// One in this many lines is printed; `None` prints all.
    pub every: Option<NonZeroU64>,
}

impl Rule {
    /// Returns whether the amounts are large enough for a line. Unknown amounts always are.
    pub fn is_large_enough(&self, trace: &Trace) -> bool {
        Self::most(trace) >= self.at_least.get() || !trace.is_measured()
    }

    /// Returns the amount that is compared with the limit for a line.
    pub fn most(trace: &Trace) -> u64 {
        trace.used.get().unsigned_abs().max(trace.peaked.get())
    }
}

/// The directives of `GPUMEM`: first those without a name, then the others. If two have the same name, the later one applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter(Vec<Directive>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Directive {
    /// The traces to which the directive applies; `None` for all.
    name: Option<String>,
    what: Option<What>,
    at_least: Option<Bytes>,
    every: Option<NonZeroU64>,
}

/// A directive that cannot be used, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadDirective {
    /// The position of the first wrong character in the whole text, counted from 1.
    at: usize,
    wrong: String,
    why: String,
}

impl fmt::Display for BadDirective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at character {}: {}", quoted(&self.wrong), self.at, self.why)
    }
}

impl Filter {
    /// Parses the directives. Returns those that can be used, and an error for each of the others.
    pub(super) fn parse(text: &str) -> (Self, Vec<BadDirective>) {
        let (mut directives, mut bad) = (Vec::new(), Vec::new());
        // The number of characters before this byte.
        let (mut byte, mut characters) = (0, 0);
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match directive(part) {
                Ok(directive) => directives.push(directive),
                Err((wrong, why)) => {
                    // `wrong` is a part of `text`.
                    let at = wrong.as_ptr().addr() - text.as_ptr().addr();
                    characters += text[byte..at].chars().count();
                    byte = at;
                    bad.push(BadDirective { at: characters + 1, wrong: wrong.to_owned(), why });
                }
            }
        }
        directives.sort_by_key(|directive: &Directive| directive.name.is_some());
        (Self(directives), bad)
    }

    /// Returns the settings for traces with this name, which is a function such as `Model::forward`, or a context.
    pub fn rule(&self, module: Option<&str>, name: &str) -> Rule {
        let of_all = |directive: &&Directive| directive.name.is_none();
        let asks = |directive: &Directive| matches!(directive.what, Some(What::Lines | What::Stats));
        let is_choice = self.0.iter().any(asks) && !self.0.iter().filter(of_all).any(|all| all.what.is_some());
        let mut rule = Rule { what: is_choice.then_some(What::Off), ..Rule::default() };
        let segments = segments(module, name);
        for directive in &self.0 {
            if directive.name.as_deref().is_none_or(|pattern| is_part(pattern, &segments)) {
                rule.what = directive.what.or(rule.what);
                rule.at_least = directive.at_least.unwrap_or(rule.at_least);
                rule.every = directive.every.or(rule.every);
            }
        }
        rule
    }

    /// Returns the names in the directives that match no trace, each with the most similar name of a trace. `names` are the modules and
    /// names of all traces.
    pub fn unmatched<'a>(&'a self, names: &'a [(Option<&str>, String)]) -> Vec<(&'a str, Option<&'a str>)> {
        let segments: Vec<Vec<&str>> = names.iter().map(|(module, name)| segments(*module, name)).collect();
        let pattern = self.0.iter().filter_map(|directive| directive.name.as_deref());
        let unmatched = pattern.filter(|pattern| !segments.iter().any(|segments| is_part(pattern, segments)));
        let near = |pattern: &str| {
            let known = names.iter().map(|(_, name)| name.as_str()).chain(segments.iter().flatten().copied());
            let near = known.filter(|known| !known.is_empty()).min_by_key(|known| (distance(pattern, known), *known));
            near.filter(|near| distance(pattern, near) <= pattern.chars().count() / 3)
        };
        unmatched.map(|pattern| (pattern, near(pattern))).collect()
    }
}

fn segments<'a>(module: Option<&'a str>, name: &'a str) -> Vec<&'a str> {
    module.into_iter().flat_map(|module| module.split("::")).chain(name.split("::")).collect()
}

/// Returns the edit distance: how many letters must be added, removed or replaced to turn one name into the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in (1..).zip(other.chars()) {
            let replaced = diagonal + usize::from(letter != other);
            diagonal = row[column];
            row[column] = replaced.min(row[column] + 1).min(row[column - 1] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

/// Returns whether the name contains these segments in sequence. A `#` matches any number.
fn is_part(pattern: &str, segments: &[&str]) -> bool {
    let pattern: Vec<_> = pattern.split("::").collect();
    let is_same = |(pattern, segment): (&&str, &&str)| pattern == segment || **pattern == *alike(segment);
    segments.windows(pattern.len()).any(|part| pattern.iter().zip(part).all(is_same))
}

/// Returns whether this word can be the name of traces. A misspelt setting or another word of `RUST_LOG` cannot.
fn is_name(word: &str) -> bool {
    const SETTINGS: [&str; 5] = ["lines", "info", "stats", "off", "every"];
    const OTHERS: [&str; 9] = ["on", "all", "none", "true", "false", "trace", "debug", "warn", "error"];
    let is_misspelt = |setting: &&str| word.len().abs_diff(setting.len()) <= 1 && distance(word, setting) <= 1;
    let is_word = word.chars().any(char::is_alphabetic) && !word.contains('>');
    is_word && !OTHERS.contains(&word) && !SETTINGS.iter().any(is_misspelt)
}

const FORMS: &str =
    "write lines, stats, off, every=100 or >=10MiB, after NAME= for some traces: forward=off, forward>=10MiB";

fn directive(text: &str) -> Result<Directive, (&str, String)> {
    let named = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    if let Some((name, amount)) = text.split_once(">=") {
        // `NAME=>=SIZE` has the same meaning as `NAME>=SIZE`.
        let (name, amount) = (name.trim_end_matches('=').trim(), amount.trim());
        let wrong = if amount.is_empty() { text } else { amount };
        let at_least = Some(size(amount).map_err(|why| (wrong, why))?);
        return Ok(Directive { name: named(name), what: named(name).map(|_| What::Lines), at_least, every: None });
    }
    let (name, setting) = match text.split_once('=') {
        Some((name, setting)) if name.trim() != "every" => (name.trim(), setting.trim()),
        _ => ("", text),
    };
    if name.is_empty() && setting != text {
        return Err((text, "a name is missing before `=`".to_owned()));
    }
    let plain = Directive { name: named(name), ..Directive::default() };
    match setting.split_once('=').map(|(key, number)| (key.trim(), number.trim())) {
        Some(("every", number)) => match number.parse() {
            Ok(every) => Ok(Directive { every: Some(every), ..plain }),
            Err(_) if number.is_empty() => Err((text, "a number is missing after `=`".to_owned())),
            Err(_) => Err((number, "it is not a whole number of 1 or more".to_owned())),
        },
        Some(_) => Err((setting, FORMS.to_owned())),
        None => match setting {
            "lines" | "info" => Ok(Directive { what: Some(What::Lines), ..plain }),
            "stats" => Ok(Directive { what: Some(What::Stats), ..plain }),
            "off" => Ok(Directive { what: Some(What::Off), ..plain }),
            // `train` has the same meaning as `train=lines`; `RUST_LOG` treats the name of a module like that.
            name if plain.name.is_none() && is_name(name) => {
                Ok(Directive { name: named(name), what: Some(What::Lines), ..plain })
            }
            "" => Err((text, FORMS.to_owned())),
            _ => Err((setting, FORMS.to_owned())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ByteDelta, Gauge};

    fn filter(text: &str) -> Filter {
        let (filter, bad) = Filter::parse(text);
        assert_eq!(bad, [], "{text}");
        filter
    }

    #[test]
    fn the_last_directive_for_a_name_holds() {
        use What::{Lines, Off, Stats};
        const ALL: &str = "app::train=lines, forward>=10MiB, backward=off, every=100";
        for (text, module, name, what, mib, every) in [
            ("", "app", "f", None, 0, 0),
            ("info", "app", "f", Some(Lines), 0, 0),
            ("stats", "app", "f", Some(Stats), 0, 0),
            ("every=3,>=1MiB", "app", "f", None, 1, 3),
            ("f=>=10MiB", "app", "f", Some(Lines), 10, 0),
            (ALL, "app::train", "step", Some(Lines), 0, 100),
            (ALL, "app::train::inner", "Model::forward", Some(Lines), 10, 100),
            (ALL, "app::train", "backward", Some(Off), 0, 100),
            (ALL, "app::load", "read", Some(Off), 0, 100),
            // A directive that only removes lines does not change the others.
            ("backward=off", "app", "forward", None, 0, 0),
            ("f>=1MiB,off", "app", "g", Some(Off), 0, 0),
            ("f=off,lines", "app", "f", Some(Off), 0, 0),
            ("f=off,f=lines", "app", "f", Some(Lines), 0, 0),
            ("stats,f=lines,f=every=7,", "app", "f", Some(Lines), 0, 7),
            // Only whole segments match.
            ("train=lines", "app::training", "f", Some(Off), 0, 0),
            ("Model::forward=lines", "app", "Model::forward", Some(Lines), 0, 0),
            ("app::forward=lines", "app", "Model::forward", Some(Off), 0, 0),
            ("train", "app::train", "f", Some(Lines), 0, 0),
            ("app::train, f=off", "app::load", "read", Some(Off), 0, 0),
            ("Model::forward,off", "app", "Model::forward", Some(Lines), 0, 0),
            ("request #=stats", "", "request 17", Some(Stats), 0, 0),
            ("request 1=stats", "", "request 17", Some(Off), 0, 0),
            ("a b > c=stats", "", "a b > c", Some(Stats), 0, 0),
        ] {
            let module = (!module.is_empty()).then_some(module);
            let expected = Rule { what, at_least: Bytes::mib(mib), every: NonZeroU64::new(every) };
            assert_eq!(filter(text).rule(module, name), expected, "{text}: {module:?} {name}");
        }
    }

    #[test]
    fn a_name_that_no_trace_has_is_found() {
        let names = [(Some("app::train"), "Model::forward"), (None, "request 17"), (None, "")];
        let names = names.map(|(module, name)| (module, name.to_owned()));
        let filter =
            filter("info,forwrad=off,forward>=1MiB,trian::Model=lines,request #=stats,optimizer=off,train=every=2");
        assert_eq!(
            filter.unmatched(&names),
            [("forwrad", Some("forward")), ("trian::Model", None), ("optimizer", None)]
        );
        assert_eq!(filter.unmatched(&[])[1], ("forward", None));
        for (one, other, expected) in [("", "", 0), ("", "abc", 3), ("forwrad", "forward", 2), ("step", "steps", 1)] {
            assert_eq!((distance(one, other), distance(other, one)), (expected, expected), "{one} {other}");
        }
    }

    #[test]
    fn an_error_says_what_is_wrong_and_where() {
        for (text, error) in [
            ("forward>=10", "`10` at character 10: it has no unit; write a size such as 10GiB"),
            (
                "é=off, f >= tenMB",
                "`tenMB` at character 13: `tenMB` is not an amount of memory; write a number and a unit, such as 512MiB or 16GiB",
            ),
            (
                "f>=",
                "`f>=` at character 1: `` is not an amount of memory; write a number and a unit, such as 512MiB or 16GiB",
            ),
            ("every=0", "`0` at character 7: it is not a whole number of 1 or more"),
            ("off,f=every=x", "`x` at character 13: it is not a whole number of 1 or more"),
            ("every=", "`every=` at character 1: a number is missing after `=`"),
            ("=off", "`=off` at character 1: a name is missing before `=`"),
            ("line", &format!("`line` at character 1: {FORMS}")),
            ("f=off,debug", &format!("`debug` at character 7: {FORMS}")),
            ("1", &format!("`1` at character 1: {FORMS}")),
            ("stats , train = trace", &format!("`trace` at character 17: {FORMS}")),
            ("train=", &format!("`train=` at character 1: {FORMS}")),
            ("a=b=c", &format!("`b=c` at character 3: {FORMS}")),
            ("a>1MiB", &format!("`a>1MiB` at character 1: {FORMS}")),
        ] {
            let (_, bad) = Filter::parse(text);
            assert_eq!(bad.iter().map(ToString::to_string).collect::<Vec<_>>(), [error], "{text}");
        }
        let (good, bad) = Filter::parse("f=on,every=0,g=off");
        assert_eq!((good, bad.len()), (filter("g=off"), 2));
    }

    #[test]
    fn a_freed_amount_is_as_large_and_an_unknown_one_may_be() {
        let rule = filter(">=10MiB").rule(None, "f");
        let of = |used: i64, peaked, stale| {
            let mut trace = Trace::off(0);
            (trace.gauge, trace.stale) = (Gauge::Exact, stale);
            (trace.used, trace.peaked) = (ByteDelta::new(used << 20), Bytes::mib(peaked));
            rule.is_large_enough(&trace)
        };
        assert!(of(10, 0, false) && of(-10, 0, false) && of(0, 10, false) && !of(9, 9, false));
        assert!(of(0, 0, true));
    }
}
