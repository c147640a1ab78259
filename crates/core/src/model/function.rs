//! The names of functions and of scopes.
//!
//! A scope has the name that its user gave it. The scope of a function with an attribute is named like the closure that the
//! compiler sees in the function, such as `app::nn::Model<f32>::forward::{{closure}}`. The end of this name distinguishes it from
//! all names that users give. Therefore functions with the same name in two modules are two scopes, and so are the methods of two
//! types. A name that a user gave is one scope wherever it is opened.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
};

const CLOSURE: &str = "::{{closure}}";

/// The names of scopes as reports show them. A function is shown as the shortest end of its full name that no other scope shares.
#[derive(Clone, Debug, Default)]
pub struct ShortNames(HashMap<String, String>);

impl ShortNames {
    /// Creates the short names for these full names.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let (functions, given): (BTreeSet<_>, BTreeSet<_>) =
            names.into_iter().partition(|name: &&str| name.ends_with(CLOSURE));
        let functions: Vec<_> = functions.into_iter().map(|name| (name, ends_of(name))).collect();
        let mut scopes_with: HashMap<&str, usize> = HashMap::new();
        for end in functions.iter().flat_map(|(_, ends)| ends) {
            *scopes_with.entry(end).or_insert_with(|| usize::from(given.contains(end.as_str()))) += 1;
        }
        let shortest = |(name, ends): &(&str, Vec<String>)| {
            let short = ends.iter().find(|end| scopes_with[end.as_str()] == 1).or(ends.last());
            ((*name).to_owned(), short.cloned().unwrap_or_default())
        };
        Self(functions.iter().map(shortest).collect())
    }

    /// Returns the short name for a full one.
    pub fn get<'a>(&'a self, name: &'a str) -> &'a str {
        self.0.get(name).map_or(name, String::as_str)
    }
}

/// At most this many ends of a name are tried. After that, the whole name is used.
const MOST_ENDS: usize = 64;

/// Returns the ends of a function's full name that can stand for it, from the shortest to the whole: each with and without generic
/// arguments.
fn ends_of(full: &str) -> Vec<String> {
    let path = without_closures(full);
    let (around, function) = split_last(path);
    let (modules, segment) = split_last(around);
    let (mut modules, plain, exact) = match owner_type(segment) {
        None => (around, without_arguments(function).to_owned(), without_modules(function)),
        Some(owner) => (
            if segment.starts_with('<') { split_last(path_of_type(owner)).0 } else { modules },
            format!("{}::{}", name_of_type(owner), without_arguments(function)),
            format!("{}::{}", without_modules(owner), without_modules(function)),
        ),
    };
    let mut ends = vec![plain.clone(), exact.clone()];
    let mut before = String::new();
    while !modules.is_empty() && ends.len() < MOST_ENDS {
        let (outer, module) = split_last(modules);
        before = format!("{module}::{before}");
        ends.extend([format!("{before}{plain}"), format!("{before}{exact}")]);
        modules = outer;
    }
    ends.push(path.to_owned());
    ends.dedup();
    ends
}

/// Shortens the compiler's name of a closure to the name in a report's line: without modules, generic arguments and enclosing
/// functions.
///
/// A type such as `Model` is recognized by its capital letter, which the compiler's naming lint requires. Modules and functions
/// start with a small letter.
pub fn short_name(path: &str) -> String {
    let (around, function) = split_last(without_closures(path));
    let function = without_arguments(function);
    match owner_type(split_last(around).1) {
        Some(owner) => format!("{}::{function}", name_of_type(owner)),
        None => function.to_owned(),
    }
}

/// Returns the name of a scope in a line. For a function, this is the short name.
pub fn name_in_line(full: &str) -> Cow<'_, str> {
    if full.ends_with(CLOSURE) { short_name(full).into() } else { full.into() }
}

/// Returns the name with a `#` for each number, so that names that differ only in numbers become equal.
pub fn alike(name: &str) -> Cow<'_, str> {
    if !name.contains(|c: char| c.is_ascii_digit()) {
        return name.into();
    }
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '0'..='9' if text.ends_with('#') => {}
            '0'..='9' => text.push('#'),
            _ => text.push(c),
        }
    }
    text.into()
}

fn without_closures(mut path: &str) -> &str {
    while let Some(outer) = path.strip_suffix(CLOSURE) {
        path = outer;
    }
    path
}

/// Returns the type in a segment of a path, if there is one: `Model<f32>`, `<app::Model as Trait>`, `<impl Trait for
/// app::Model>`.
fn owner_type(segment: &str) -> Option<&str> {
    let Some(qualified) = segment.strip_prefix('<') else {
        let named = segment.starts_with(|first: char| first.is_alphabetic() && !first.is_lowercase());
        return named.then_some(segment);
    };
    let owner = qualified.strip_suffix('>').unwrap_or(qualified);
    Some(if let Some(block) = owner.strip_prefix("impl ") {
        rfind_outside(block, " for ").map_or(block, |at| &block[at + " for ".len()..])
    } else {
        rfind_outside(owner, " as ").map_or(owner, |at| &owner[..at])
    })
}

/// Returns the path of a type, without references and generic arguments.
fn path_of_type(owner: &str) -> &str {
    let plain = owner.trim_start_matches(['&', ' ']);
    let plain = plain.strip_prefix("mut ").unwrap_or(plain);
    let plain = plain.strip_prefix("dyn ").unwrap_or(plain);
    let end =
        plain.find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | ':' | '{' | '}' | '#'))).unwrap_or(plain.len());
    &plain[..end]
}

fn name_of_type(owner: &str) -> &str {
    let name = split_last(path_of_type(owner)).1;
    // Slices, tuples and raw pointers have no name, so they are shown in full.
    if name.is_empty() { owner } else { name }
}

/// Returns `Vec<Model>` for `alloc::vec::Vec<app::Model>`.
fn without_modules(text: &str) -> String {
    let (mut short, mut start, mut rest) = (String::new(), 0, text);
    while let Some(c) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("::").filter(|_| short.len() > start) {
            short.truncate(start);
            rest = after;
            continue;
        }
        short.push(c);
        if !(c.is_alphanumeric() || matches!(c, '_' | '{' | '}' | '#')) {
            start = short.len();
        }
        rest = &rest[c.len_utf8()..];
    }
    short
}

/// Splits off the last segment: `a::b<c::d>::e` becomes (`a::b<c::d>`, `e`). The first part is empty if there is one segment.
fn split_last(path: &str) -> (&str, &str) {
    rfind_outside(path, "::").map_or(("", path), |at| (&path[..at], &path[at + 2..]))
}

fn without_arguments(segment: &str) -> &str {
    segment.split('<').next().unwrap_or(segment)
}

/// Returns the last position of `pattern` outside all brackets. The `>` of an arrow is not a bracket.
fn rfind_outside(text: &str, pattern: &str) -> Option<usize> {
    let text = text.as_bytes();
    let mut depth = 0_usize;
    for at in (0..text.len()).rev() {
        match text[at] {
            b'>' if text[..at].ends_with(b"-") => {}
            b'>' | b')' | b']' => depth += 1,
            b'<' | b'(' | b'[' => depth = depth.saturating_sub(1),
            _ if depth == 0 && text[at..].starts_with(pattern.as_bytes()) => return Some(at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (path, name) in [
            ("forward", "forward"),
            ("app::forward::{{closure}}", "forward"),
            ("app::nn::forward::{{closure}}::{{closure}}", "forward"),
            ("app::forward<alloc::vec::Vec<u8>>::{{closure}}", "forward"),
            ("app::forward<fn(u8) -> a::B, a::main::{{closure}}>::{{closure}}", "forward"),
            // These are methods.
            ("app::nn::Model::forward::{{closure}}", "Model::forward"),
            ("app::Model<app::nn::Layer<f32>>::forward<u8>::{{closure}}", "Model::forward"),
            ("app::View<'_>::forward::{{closure}}", "View::forward"),
            ("app::Array<3>::forward::{{closure}}", "Array::forward"),
            ("app::Model::match::{{closure}}", "Model::match"),
            ("app::Modèle::passe::{{closure}}", "Modèle::passe"),
            // These are methods of traits, and of types of other modules.
            ("<app::nn::Model as app::Layer>::forward::{{closure}}", "Model::forward"),
            ("<app::Model<f32> as app::Layer<fn() -> u8>>::forward::{{closure}}", "Model::forward"),
            ("app::ext::<impl app::Model>::forward::{{closure}}", "Model::forward"),
            ("app::ext::<impl app::Model<a::Vec<_>>>::forward::{{closure}}", "Model::forward"),
            ("app::ext::<impl app::Layer<u8> for app::Model>::forward::{{closure}}", "Model::forward"),
            // These are methods of types without their own path.
            ("<u32 as app::Layer>::forward::{{closure}}", "u32::forward"),
            ("<&mut app::Model as app::Layer>::forward::{{closure}}", "Model::forward"),
            ("<dyn app::Other + core::marker::Send as app::Layer>::forward::{{closure}}", "Other::forward"),
            ("<dyn core::ops::function::Fn(u8) -> a::B as app::Layer>::forward::{{closure}}", "Fn::forward"),
            ("<[f32] as app::Layer>::forward::{{closure}}", "[f32]::forward"),
            ("<(app::A, u8) as app::Layer>::forward::{{closure}}", "(app::A, u8)::forward"),
            ("<fn(app::A) -> u8 as app::Layer>::forward::{{closure}}", "fn::forward"),
            ("<app::main::{{closure}} as app::Layer>::forward::{{closure}}", "{{closure}}::forward"),
            // A function inside another one has its own name.
            ("app::outer::inner::{{closure}}", "inner"),
            ("app::Model<_>::forward::inner::{{closure}}", "inner"),
            ("app::ext::<impl app::Model>::forward::inner::{{closure}}", "inner"),
            ("app::main::{{closure}}::inner::{{closure}}", "inner"),
            ("app::outer::Local::forward::{{closure}}", "Local::forward"),
            // These are not names of functions. They are shown unchanged, without a panic.
            ("", ""),
            ("::", ""),
            ("<", ""),
            ("a<b::c", "c"),
        ] {
            assert_eq!(short_name(path), name, "{path}");
        }
    }

    #[test]
    fn names_that_differ_in_numbers_are_alike() {
        for (name, expected) in
            [("load", "load"), ("request 17", "request #"), ("7 of 9x10", "# of #x#"), ("é1#2", "é##")]
        {
            assert_eq!(alike(name), expected);
        }
        assert_eq!(name_in_line("app::Model<f32>::forward::{{closure}}"), "Model::forward");
        assert_eq!(name_in_line("app::step 1"), "app::step 1");
    }

    #[track_caller]
    fn check(full: &[&str], short: &[&str]) {
        let names = ShortNames::of(full.iter().copied());
        assert_eq!(full.iter().map(|name| names.get(name)).collect::<Vec<_>>(), short);
    }

    #[test]
    fn a_name_is_as_short_as_it_can_be() {
        check(&["app::nn::forward::{{closure}}", "load"], &["forward", "load"]);
        check(&["app::a::forward::{{closure}}", "app::b::forward::{{closure}}"], &["a::forward", "b::forward"]);
        check(&["app::a::x::f::{{closure}}", "app::b::x::f::{{closure}}"], &["a::x::f", "b::x::f"]);
        check(&["one::f::{{closure}}", "two::f::{{closure}}"], &["one::f", "two::f"]);
        // `f` could be either of them, and only one can be longer.
        check(&["app::f::{{closure}}", "app::a::f::{{closure}}"], &["app::f", "a::f"]);
    }

    #[test]
    fn methods_have_their_type_and_types_their_arguments() {
        check(&["app::Wrap<u8>::run::{{closure}}"], &["Wrap::run"]);
        check(
            &["app::Wrap<u8>::run::{{closure}}", "app::Wrap<&str>::run::{{closure}}"],
            &["Wrap<u8>::run", "Wrap<&str>::run"],
        );
        check(
            &["app::load<alloc::vec::Vec<f32>>::{{closure}}", "app::load<f16>::{{closure}}"],
            &["load<Vec<f32>>", "load<f16>"],
        );
        check(
            &["<app::a::Model as app::Layer>::run::{{closure}}", "<app::b::Model as app::Layer>::run::{{closure}}"],
            &["a::Model::run", "b::Model::run"],
        );
        // These are methods of two traits of one type.
        check(
            &["<app::Model as app::Layer>::run::{{closure}}", "<app::Model as app::Task>::run::{{closure}}"],
            &["<app::Model as app::Layer>::run", "<app::Model as app::Task>::run"],
        );
    }

    #[test]
    fn a_name_that_a_user_wrote_stays() {
        check(&["forward", "app::forward::{{closure}}"], &["forward", "app::forward"]);
        check(&["a::b", "step 1", "step 2", ""], &["a::b", "step 1", "step 2", ""]);
        check(&["app::f::{{closure}}", "app::f"], &["f", "app::f"]);
    }
}
