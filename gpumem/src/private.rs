//! The names that the code of the macros uses. They are not part of the public API and may change at any time.

use std::any::type_name;

pub use crate::model::Gauge;
#[cfg(all(feature = "__internal", feature = "cupti", feature = "dispatch"))]
pub use crate::session::calls_of_both_sources;
pub use crate::session::{BodyGuard, Budget, End, Figure, GpuMemTrace, Lines, Relation, TraceSpec, Traced};
#[cfg(feature = "sim")]
pub use crate::session::{TestSession, simulated_gpu};

/// The name of the function that contains the closure `_here`: `forward`, `Model::forward`.
pub fn function_name<F>(_here: &F) -> String {
    readable(type_name::<F>())
}

/// Is never called. A body that returns its value tells the compiler the type of the body.
pub fn return_type_hint<R>() -> R {
    unreachable!("gpumem: nothing calls this")
}

/// Panics with the location of its caller. The macros call it in the user's function, so the message names a line there.
///
/// # Panics
/// Always.
#[track_caller]
pub fn fail(text: &str) -> ! {
    panic!("{text}")
}

/// Shortens the compiler's name of a closure to the name in a report: without modules, generic arguments and enclosing functions.
///
/// A type such as `Model` is recognised by its capital letter, which the compiler's naming lint asks for. Modules and functions have
/// none.
fn readable(mut path: &str) -> String {
    while let Some(outer) = path.strip_suffix("::{{closure}}") {
        path = outer;
    }
    let (around, function) = split_last(path);
    let function = without_arguments(function);
    match owner(split_last(around).1) {
        Some(owner) => format!("{owner}::{function}"),
        None => function.to_owned(),
    }
}

/// The type in a segment of a path, if there is one: `Model<f32>`, `<Model as Trait>`, `<impl Trait for Model>`.
fn owner(segment: &str) -> Option<&str> {
    let Some(qualified) = segment.strip_prefix('<') else {
        let named = segment.starts_with(|first: char| first.is_alphabetic() && !first.is_lowercase());
        return named.then(|| without_arguments(segment));
    };
    let mut owner = qualified.strip_suffix('>').unwrap_or(qualified);
    if let Some(block) = owner.strip_prefix("impl ") {
        owner = rfind_outside(block, " for ").map_or(block, |at| &block[at + " for ".len()..]);
    } else if let Some(at) = rfind_outside(owner, " as ") {
        owner = &owner[..at];
    }
    let plain = owner.trim_start_matches(['&', ' ']);
    let plain = plain.strip_prefix("mut ").unwrap_or(plain);
    let plain = plain.strip_prefix("dyn ").unwrap_or(plain);
    let path_end =
        plain.find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | ':' | '{' | '}' | '#'))).unwrap_or(plain.len());
    let name = split_last(&plain[..path_end]).1;
    // Slices, tuples and raw pointers have no name. They are shown in full.
    Some(if name.is_empty() { owner } else { name })
}

/// Splits off the last segment: `a::b<c::d>::e` becomes (`a::b<c::d>`, `e`). The first part is empty if there is one segment.
fn split_last(path: &str) -> (&str, &str) {
    rfind_outside(path, "::").map_or(("", path), |at| (&path[..at], &path[at + 2..]))
}

fn without_arguments(segment: &str) -> &str {
    segment.split('<').next().unwrap_or(segment)
}

/// The last position of `wanted` outside all brackets. The `>` of an arrow is not a bracket.
fn rfind_outside(text: &str, wanted: &str) -> Option<usize> {
    let text = text.as_bytes();
    let mut depth = 0_usize;
    for at in (0..text.len()).rev() {
        match text[at] {
            b'>' if text[..at].ends_with(b"-") => {}
            b'>' | b')' | b']' => depth += 1,
            b'<' | b'(' | b'[' => depth = depth.saturating_sub(1),
            _ if depth == 0 && text[at..].starts_with(wanted.as_bytes()) => return Some(at),
            _ => {}
        }
    }
    None
}

/// Parts of the library that the project's benchmarks measure alone.
#[cfg(feature = "__internal")]
pub mod internal {
    /// Records the calling thread's stack, as for a large block.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack() -> u32 {
        crate::session::WAYS_TO_A_STACK[0]().0
    }

    /// The same for a stack that was not recorded before.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack_walked() -> u32 {
        crate::session::WAYS_TO_A_STACK[1]().0
    }

    /// The same with the unwinder of the system, and at most 32 functions.
    #[cfg(feature = "backtrace")]
    #[inline(never)]
    pub fn stack_by_the_system() -> u32 {
        crate::session::WAYS_TO_A_STACK[2]().0
    }

    /// Puts hooks into the dispatch table that report nothing, to measure the cost of a hook alone.
    ///
    /// # Errors
    /// As for the source `dispatch`.
    #[cfg(feature = "dispatch")]
    pub fn hook_for_nobody() -> crate::error::Result<()> {
        crate::session::hook_for_nobody()
    }

    /// A stream-ordered allocation of this many bytes and its free: once intercepted by hooks that report nothing, once not
    /// intercepted.
    #[cfg(feature = "dispatch")]
    pub fn pairs() -> [fn(u64); 2] {
        crate::session::rehearse()
    }
}

#[cfg(test)]
mod tests {
    use super::readable;

    #[test]
    fn names() {
        for (path, name) in [
            ("forward", "forward"),
            ("app::forward::{{closure}}", "forward"),
            ("app::nn::forward::{{closure}}::{{closure}}", "forward"),
            ("app::forward<alloc::vec::Vec<u8>>::{{closure}}", "forward"),
            ("app::forward<fn(u8) -> a::B, a::main::{{closure}}>::{{closure}}", "forward"),
            // methods
            ("app::nn::Model::forward::{{closure}}", "Model::forward"),
            ("app::Model<app::nn::Layer<f32>>::forward<u8>::{{closure}}", "Model::forward"),
            ("app::View<'_>::forward::{{closure}}", "View::forward"),
            ("app::Array<3>::forward::{{closure}}", "Array::forward"),
            ("app::Model::match::{{closure}}", "Model::match"),
            ("app::Modèle::passe::{{closure}}", "Modèle::passe"),
            // of traits, and of types of other modules
            ("<app::nn::Model as app::Layer>::forward::{{closure}}", "Model::forward"),
            ("<app::Model<f32> as app::Layer<fn() -> u8>>::forward::{{closure}}", "Model::forward"),
            ("app::ext::<impl app::Model>::forward::{{closure}}", "Model::forward"),
            ("app::ext::<impl app::Model<a::Vec<_>>>::forward::{{closure}}", "Model::forward"),
            ("app::ext::<impl app::Layer<u8> for app::Model>::forward::{{closure}}", "Model::forward"),
            // of types without a path of their own
            ("<u32 as app::Layer>::forward::{{closure}}", "u32::forward"),
            ("<&mut app::Model as app::Layer>::forward::{{closure}}", "Model::forward"),
            ("<dyn app::Other + core::marker::Send as app::Layer>::forward::{{closure}}", "Other::forward"),
            ("<dyn core::ops::function::Fn(u8) -> a::B as app::Layer>::forward::{{closure}}", "Fn::forward"),
            ("<[f32] as app::Layer>::forward::{{closure}}", "[f32]::forward"),
            ("<(app::A, u8) as app::Layer>::forward::{{closure}}", "(app::A, u8)::forward"),
            ("<fn(app::A) -> u8 as app::Layer>::forward::{{closure}}", "fn::forward"),
            ("<app::main::{{closure}} as app::Layer>::forward::{{closure}}", "{{closure}}::forward"),
            // inside another function: its own name
            ("app::outer::inner::{{closure}}", "inner"),
            ("app::Model<_>::forward::inner::{{closure}}", "inner"),
            ("app::ext::<impl app::Model>::forward::inner::{{closure}}", "inner"),
            ("app::main::{{closure}}::inner::{{closure}}", "inner"),
            ("app::outer::Local::forward::{{closure}}", "Local::forward"),
            // no function name: shown unchanged, without a panic
            ("", ""),
            ("::", ""),
            ("<", ""),
            ("a<b::c", "c"),
        ] {
            assert_eq!(readable(path), name, "{path}");
        }
    }
}
