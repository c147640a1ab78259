//! The frames of a snapshot: their functions, files and lines.

use std::path::Path;

use gpumem_core::recording::Symbol;

use super::{Objects, Value};

/// The library of PyTorch that calls the driver, and one for functions in C++ of which only the name is known. They are the first ones of the
/// history.
pub(super) const LIBRARIES: [&str; 2] = ["libc10_cuda.so", "libtorch.so"];

/// Returns whether a function in C or C++ belongs to the interpreter, begins a thread or the program, or reads the
/// stack.
fn is_everywhere(name: &str) -> bool {
    const BEGINNINGS: [&str; 7] =
        ["Py", "_Py", "_start", "__libc_", "__clone", "torch::unwind::", "torch::CapturedTraceback::"];
    BEGINNINGS.iter().any(|beginning| name.starts_with(beginning)) || name.ends_with("gather_with_cpp()")
}

impl Objects {
    /// Returns the number of a frame. `None` for functions that every stack has, which are not the program's.
    pub(super) fn frame(&mut self, function: Option<Value>, file: Value, line: u64) -> Option<u32> {
        // Code without debug information has the name `??`.
        let text = |value| match value {
            Some(Value::Text(text)) => Some(self.known_text(text)).filter(|text| !matches!(*text, "" | "??")),
            _ => None,
        };
        let path = text(Some(file)).unwrap_or_default();
        // If the line is not known, PyTorch writes the path of the library and an address in it.
        let ends_with = |end: &str| Path::new(path).extension().is_some_and(|known| known == end);
        let is_library = ends_with("so") || path.contains(".so.");
        let line = if is_library { 0 } else { line };
        if let Some(known) = self.frames.get(&(function, file, line)) {
            return Some(*known);
        }
        // Without an address, a function in C++ has no line, and at most the name of a file such as `TensorImpl.cpp`.
        let is_native = line == 0 && !ends_with("py") && !path.starts_with('<');
        let name = text(function);
        if is_native && name.is_some_and(is_everywhere) {
            return None;
        }
        let symbol = Symbol {
            function: name.map(str::to_owned),
            file: Some(path.to_owned()).filter(|path| !path.is_empty() && !is_native),
            line: u32::try_from(line).ok().filter(|line| *line > 0),
            column: None,
        };
        let path = path.to_owned();
        let history = &mut self.history;
        let number = u32::try_from(history.frames.len()).unwrap_or(u32::MAX);
        history.frames.push(symbol);
        self.frames.insert((function, file, line), number);
        if is_library {
            let library = *self.libraries.entry(file).or_insert_with(|| {
                history.libraries.push(path);
                u32::try_from(history.libraries.len()).unwrap_or(u32::MAX)
            });
            history.frame_libraries.insert(number, library);
        } else if is_native {
            history.frame_libraries.insert(number, 2);
        }
        Some(number)
    }
}
