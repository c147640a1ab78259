//! The stacks of origins, in words.

use std::collections::HashMap;

use gpumem_core::model::{Frame, readable_frames, user_line};

use crate::history::{Held, History, Moment, Origin};

/// One function on a stack, or a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CodeFrame {
    pub(super) function: String,
    /// The name of the file; empty if it is not known.
    pub(super) file: String,
    /// The number of the line; 0 if it is not known.
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

    /// `train::forward (src/model.rs:42)`
    pub(crate) fn in_words(&self, folder: &str) -> String {
        let Self { function, file, line } = self;
        let below = file.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')).filter(|_| !folder.is_empty());
        match (below.unwrap_or(file), line) {
            ("", _) => function.clone(),
            (file, 0) => format!("{function} ({file})"),
            (file, line) => format!("{function} ({file}:{line})"),
        }
    }
}

/// The frames of an origin, the outermost first: its scopes, then the functions of its stack.
pub(crate) fn stack(history: &History, origin: &Origin) -> Vec<CodeFrame> {
    below_scopes(origin, functions(history, origin))
}

/// The same, but it ends at the user's line. If no such line is known, it ends at the library. If there are lines of Python, it has only
/// these.
pub(crate) fn stack_to_place(history: &History, origin: &Origin) -> Vec<CodeFrame> {
    let frames = history.definitions().frames(origin.stack);
    let line = user_line(&frames).map(|(line, _)| line);
    let has_python = line.is_some_and(Frame::is_python);
    let readable = readable_frames(&frames);
    let outside = match line.filter(|_| origin.line.is_some()) {
        Some(line) => readable.iter().position(|frame| std::ptr::eq(*frame, line)).unwrap_or(0),
        None => readable.iter().take_while(|frame| frame.line.is_none()).count(),
    };
    let place = CodeFrame { function: origin.place(), ..CodeFrame::default() };
    let callers = readable[outside..].iter().filter(|frame| !has_python || frame.is_python());
    let place = Some(place).filter(|_| origin.line.is_none());
    below_scopes(origin, place.into_iter().chain(callers.map(|frame| CodeFrame::new(frame))).collect())
}

fn below_scopes(origin: &Origin, functions: Vec<CodeFrame>) -> Vec<CodeFrame> {
    let scopes = origin.path.iter().map(|name| CodeFrame { function: name.clone(), ..CodeFrame::default() });
    scopes.chain(functions.into_iter().rev()).collect()
}

/// The functions of an origin, the innermost first, without those of the standard library; its place if they are not known.
pub(super) fn functions(history: &History, origin: &Origin) -> Vec<CodeFrame> {
    let frames = history.definitions().frames(origin.stack);
    let mut frames: Vec<_> = readable_frames(&frames).into_iter().map(CodeFrame::new).collect();
    if frames.is_empty() {
        frames.push(CodeFrame { function: origin.place(), ..CodeFrame::default() });
    }
    frames
}

/// What was live at a moment, of all devices one after the other.
pub(crate) fn held_at(history: &History, moment: Moment) -> Vec<Held<'_>> {
    let held = history.held_after(&history.changes_at(moment));
    held.into_iter().flatten().filter(|held| history.has_kind_at(held.origin.kind, moment)).collect()
}

/// Numbers for things, in the order in which they are seen first.
#[derive(Debug)]
pub(crate) struct Numbers<T> {
    known: HashMap<T, usize>,
    pub(crate) all: Vec<T>,
}

impl<T> Default for Numbers<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), all: Vec::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Numbers<T> {
    pub(crate) fn of(&mut self, thing: &T) -> usize {
        if let Some(number) = self.known.get(thing) {
            return *number;
        }
        self.known.insert(thing.clone(), self.all.len());
        self.all.push(thing.clone());
        self.all.len() - 1
    }
}
