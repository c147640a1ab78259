//! The names in a snapshot.

use std::{borrow::Cow, path::Path};

/// PyTorch's library that calls the driver, and one for C++ functions of which only the name is known. They are the
/// first two libraries of the history.
pub(super) const LIBRARIES: [&str; 2] = ["libc10_cuda.so", "libtorch.so"];

/// Returns whether a C or C++ function is found on every stack: it belongs to the interpreter, starts a thread or the
/// program, or reads the stack.
pub(super) fn is_everywhere(name: &str) -> bool {
    const PREFIXES: [&str; 7] =
        ["Py", "_Py", "_start", "__libc_", "__clone", "torch::unwind::", "torch::CapturedTraceback::"];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || name.ends_with("gather_with_cpp()")
}

fn ends_with(path: &str, end: &str) -> bool {
    Path::new(path).extension().is_some_and(|known| known == end)
}

pub(super) fn is_library(path: &str) -> bool {
    ends_with(path, "so") || path.contains(".so.")
}

pub(super) fn is_python(path: &str) -> bool {
    ends_with(path, "py") || path.starts_with('<')
}

/// Each frame has its own copy of its names, so a name is cut to this many bytes before and after its middle. A path
/// that the system can open has at most 4,096 bytes.
const HALF_OF_NAME: usize = 500;

/// Returns a text, without its middle if it is too long.
pub(super) fn held(text: &str) -> Cow<'_, str> {
    if text.len() <= 2 * HALF_OF_NAME {
        return text.into();
    }
    let is_boundary = |at: &usize| text.is_char_boundary(*at);
    let start = (0..=HALF_OF_NAME).rev().find(is_boundary).unwrap_or(0);
    let end = (text.len() - HALF_OF_NAME..text.len()).find(is_boundary).unwrap_or(text.len());
    format!("{}…{}", &text[..start], &text[end..]).into()
}

/// Returns whether a field of any other dictionary is needed. The divisions in `roundup_power2_divisions` have numbers
/// as names.
pub(super) fn is_needed(name: &str) -> bool {
    const NAMES: [&str; 6] = [
        "segments",
        "device_traces",
        "allocator_settings",
        "max_split_size",
        "roundup_power2_divisions",
        "expandable_segments",
    ];
    NAMES.contains(&name) || name.parse::<u64>().is_ok()
}
