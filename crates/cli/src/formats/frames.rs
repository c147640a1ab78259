//! The stacks of origins as text.

use std::collections::HashMap;

use gpumem_core::model::{Call, Frame, calls, readable_frames, user_line};

use crate::history::{History, Moment, Origin, OriginSum};

/// One function on a stack, or a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CodeFrame {
    pub(super) function: String,
    /// The name of the file; empty if it is not known. [`short`](Self::short) shortens paths in a Python package: they
    /// start at the package.
    pub(super) file: String,
    /// The line number; 0 if it is not known.
    pub(super) line: u32,
}

impl CodeFrame {
    fn new(frame: &Frame) -> Self {
        Self {
            function: frame.function.clone().unwrap_or_else(|| frame.to_string()),
            file: frame.file.clone().or_else(|| frame.module.clone()).unwrap_or_default(),
            line: frame.line.unwrap_or(0),
        }
    }

    /// Creates a frame from the name of a scope, a library or a place.
    fn named(name: &str) -> Self {
        Self { function: name.to_owned(), ..Self::default() }
    }

    /// Creates a frame with less text than [`new`](Self::new). A function of a Python package is identified by its name
    /// and its file: with its line, one function would appear several times. C++ functions are shown without the types
    /// of their arguments.
    fn short(frame: &Frame) -> Self {
        let mut short = Self::new(frame);
        if frame.is_of_torch_compile() {
            // The function around the kernels has the same name in all programs.
            short.file = frame.relative_to("").file.unwrap_or_default();
            if matches!(short.function.as_str(), "call" | "Runner.call") {
                short.function = std::mem::take(&mut short.file);
            }
        } else if frame.is_of_python_package() {
            let package = short.file.rsplit_once("-packages/").map_or(short.file_name(), |(_, path)| path);
            short.file = package.to_owned();
            short.line = 0;
        }
        let function = &short.function;
        let mut brackets =
            function.match_indices('(').map(|(at, _)| at).filter(|at| *at > 0 && function.contains("::"));
        if let Some(at) = brackets.find(|at| !function[*at..].starts_with("(anonymous namespace)")) {
            short.function.truncate(at);
        }
        short
    }

    fn file_name(&self) -> &str {
        self.file.rsplit('/').next().unwrap_or_default()
    }

    /// Returns the Python package of a [`short`](Self::short) frame.
    fn package(&self) -> Option<&str> {
        let (package, _) = self.file.split_once('/').filter(|(package, _)| self.line == 0 && !package.is_empty())?;
        Some(package)
    }

    /// Returns whether `part` occurs in the name of the function or of its package, ignoring case.
    pub(crate) fn name_contains(&self, part: &str) -> bool {
        let names = [Some(self.function.as_str()), self.package()];
        names.into_iter().flatten().any(|name| name.to_lowercase().contains(&part.to_lowercase()))
    }

    /// Returns text such as `train::forward (src/model.rs:42)`.
    pub(crate) fn in_words(&self, folder: &str) -> String {
        let Self { function, file, line } = self;
        let below = file.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')).filter(|_| !folder.is_empty());
        match (below.unwrap_or(file), line) {
            ("", 0) => function.clone(),
            ("", line) => format!("{function}:{line}"),
            (_, 0) if self.package().is_some() => format!("{function} ({})", self.file_name()),
            (file, 0) => format!("{function} ({file})"),
            (file, line) => format!("{function} ({file}:{line})"),
        }
    }
}

/// Returns the frames of an origin, the outermost first: its scopes, then the functions of its stack. A folded stack
/// contains only the functions that show the purpose of the memory. Memory that is not on the device has its kind as
/// the first frame, so that it is not mistaken for device memory.
pub(crate) fn stack(history: &History, origin: &Origin, is_folded: bool) -> Vec<CodeFrame> {
    let functions = if is_folded { folded(history, origin) } else { functions(history, origin) };
    let kind = (!origin.kind.is_on_device()).then(|| CodeFrame::named(origin.kind.name()));
    let scopes = origin.path.iter().map(|name| CodeFrame::named(name));
    kind.into_iter().chain(scopes).chain(functions.into_iter().rev()).collect()
}

/// Returns the functions of an origin that [`calls`] keeps, innermost first, as short frames. If none are known, returns
/// the origin's place.
fn folded(history: &History, origin: &Origin) -> Vec<CodeFrame> {
    let frames = history.definitions().frames(origin.stack);
    let mut functions: Vec<_> = calls(&frames)
        .into_iter()
        .map(|call| match call {
            Call::Function(frame) => CodeFrame::short(frame),
            Call::Library(name) | Call::Backward(name) => CodeFrame::named(name),
            Call::Phase(phase) => CodeFrame::named(&["PyTorch", phase.in_brackets()].concat()),
        })
        .collect();
    if functions.is_empty() {
        functions.push(CodeFrame::named(&origin.place()));
    }
    functions
}

/// Returns the innermost package functions (at most two) called from the user's line, such as `GPT2MLP.forward →
/// NewGELUActivation.forward`. `None` if the user's own function allocated.
pub(crate) fn called_from_line(history: &History, origin: &Origin) -> Option<String> {
    let frames = history.definitions().frames(origin.stack);
    let (line, _) = user_line(&frames)?;
    let package_calls = calls(&frames).into_iter().map_while(|call| match call {
        Call::Function(frame) => (!std::ptr::eq(frame, line)).then(|| CodeFrame::short(frame).function),
        Call::Library(name) | Call::Backward(name) => Some(name.to_owned()),
        Call::Phase(_) => None,
    });
    let mut functions: Vec<_> = package_calls.take(2).collect();
    functions.reverse();
    (!functions.is_empty()).then(|| functions.join(" → "))
}

/// Returns the functions of an origin, innermost first, without the standard library's. If none are known, returns the
/// origin's place.
pub(super) fn functions(history: &History, origin: &Origin) -> Vec<CodeFrame> {
    let frames = history.definitions().frames(origin.stack);
    let mut frames: Vec<_> = readable_frames(&frames).into_iter().map(CodeFrame::new).collect();
    if frames.is_empty() {
        frames.push(CodeFrame::named(&origin.place()));
    }
    frames
}

/// Returns the live memory at a moment, one device after the other.
pub(crate) fn held_at(history: &History, moment: Moment) -> Vec<OriginSum<'_>> {
    let held = history.held_after(&history.changes_at(moment));
    held.into_iter().flatten().filter(|held| history.has_kind_at(held.origin.kind, moment)).collect()
}

/// Gives each distinct value an index, in the order in which the values are first seen.
#[derive(Debug)]
pub(crate) struct Indices<T> {
    known: HashMap<T, usize>,
    pub(crate) all: Vec<T>,
}

impl<T> Default for Indices<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), all: Vec::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Indices<T> {
    pub(crate) fn get_or_insert(&mut self, value: &T) -> usize {
        if let Some(index) = self.known.get(value) {
            return *index;
        }
        self.known.insert(value.clone(), self.all.len());
        self.all.push(value.clone());
        self.all.len() - 1
    }
}
