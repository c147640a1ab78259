//! The names of ids.

use std::{borrow::Cow, fmt};

use crate::model::{
    CallsiteId, Frame, Phase, PoolId, StackId, backward_operation, is_gpumem_c, library, phase, program_frames,
    user_line,
};

/// The names of the ids in a ledger.
pub trait Names {
    /// Returns the name of a scope, and the place where it is opened.
    fn callsite(&self, id: CallsiteId) -> Callsite;
    /// Returns the description of a stack. May read files.
    fn stack(&self, id: StackId) -> Stack;
    /// Returns the name of a registered pool.
    fn pool(&self, id: PoolId) -> String;
}

/// The name of a scope, and the place where it is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Callsite {
    /// The name of the scope. `None` if the place is used instead.
    pub name: Option<Cow<'static, str>>,
    /// The source file; empty for a callsite that is not in the program.
    pub file: Cow<'static, str>,
    /// The line, starting at 1; 0 for a callsite that is not in the program.
    pub line: u32,
}

impl Callsite {
    /// Returns one of the callsites that every session has.
    pub fn built_in(id: CallsiteId) -> Option<Self> {
        let name = match id {
            CallsiteId::NONE => "(outside of all scopes)",
            CallsiteId::OTHERS => "(scopes above the limits)",
            _ => return None,
        };
        Some(Self { name: Some(name.into()), ..Self::default() })
    }

    /// Returns the place without the column, such as `src/main.rs:12`.
    pub fn place(&self) -> Option<String> {
        (!self.file.is_empty()).then(|| format!("{}:{}", self.file, self.line))
    }
}

/// Writes the name, or else the place.
impl fmt::Display for Callsite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().map(Cow::Borrowed);
        f.pad(&name.or_else(|| self.place().map(Cow::Owned)).unwrap_or_default())
    }
}

/// For blocks of the program without a stack, the place is its name followed by this text.
pub const NO_STACK: &str = " (no stack)";

/// The description of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// The library whose code allocated; `None` for the program.
    pub library: Option<String>,
    /// The user's line. If the stack has no symbols, this is `main`, or the program: `train (no symbols)`.
    pub line: Option<String>,
    /// True if the line is more informative than the library, which is the same for almost all blocks of such programs: a
    /// Python line, or an operation of PyTorch's backward pass.
    pub is_place: bool,
    /// The line that called the function of the user's line.
    pub caller: Option<String>,
    /// The functions, the innermost first, with their lines.
    pub frames: Vec<String>,
}

impl Stack {
    /// Returns the library, if it is shown instead of a line.
    pub fn library_as_place(&self) -> Option<&str> {
        self.library.as_deref().filter(|_| !self.is_place)
    }

    /// Creates the description for a block without a recorded stack that code in this file allocated.
    pub fn of_file(module: String, own_module: Option<&str>) -> Self {
        let stack = Self::new(&[Frame { module: Some(module), ..Frame::default() }], "", own_module);
        let own = own_module.filter(|_| stack.line.is_some());
        Self { line: own.map(|name| format!("{name}{NO_STACK}")), ..stack }
    }

    /// Creates the description of these frames, the innermost first. Paths of files in `folder` are relative to it.
    /// `own_module` is the file name of the module that gpumem is in: it counts as the program.
    pub fn new(frames: &[Frame], folder: &str, own_module: Option<&str>) -> Self {
        let seen = |frame: &Frame| frame.relative_to(folder).to_string();
        let (line, caller) = user_line(frames).map_or((None, None), |(line, caller)| (Some(line), caller));
        let is_python = line.is_some_and(Frame::is_python);
        let operation = backward_operation(frames).filter(|_| !is_python);
        let operation = operation.map(|operation| [operation, Phase::BackwardPass.in_brackets()].concat());
        let in_phase = |line: &Frame| seen(line) + phase(frames).map_or("", Phase::in_brackets);
        let library = library(frames);
        let is_own = library == own_module || library.is_some_and(is_gpumem_c);
        let (library, program) = if is_own { (None, own_module) } else { (library, None) };
        let has_main = program_frames(frames).iter().any(|frame| frame.function.as_deref() == Some("main"));
        let unnamed = program.map(|name| if has_main { "main".to_owned() } else { format!("{name} (no symbols)") });
        Self {
            library: library.map(str::to_owned),
            is_place: is_python || operation.is_some(),
            line: operation.or_else(|| line.map(in_phase)).or(unnamed),
            caller: caller.map(seen),
            frames: program_frames(frames).iter().map(|frame| frame.relative_to(folder).with_function()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(functions: &[Option<&str>], own_module: Option<&str>) -> Option<String> {
        let frame = |function: Option<&str>| Frame {
            function: function.map(str::to_owned),
            module: Some("/app/train".to_owned()),
            ..Frame::default()
        };
        let stack = Stack::new(&functions.iter().copied().map(frame).collect::<Vec<_>>(), "/app", own_module);
        assert_eq!(stack.library.is_none(), own_module == Some("train") || functions.is_empty());
        stack.line
    }

    #[test]
    fn a_program_without_names_is_the_place() {
        let own = Some("train");
        assert_eq!(line(&[Some("work"), Some("main")], own).as_deref(), Some("work"));
        assert_eq!(line(&[Some("cudaMalloc"), Some("main"), Some("_start")], own).as_deref(), Some("main"));
        assert_eq!(line(&[None, None], own).as_deref(), Some("train (no symbols)"));
        let of_file = |file: &str| Stack::of_file(file.to_owned(), own);
        assert_eq!(of_file("/app/train").line.as_deref(), Some("train (no stack)"));
        assert_eq!((of_file("/lib/x.so").line, of_file("/lib/x.so").library.as_deref()), (None, Some("x.so")));
        assert_eq!(line(&[None, None], Some("other")), None, "another file is a library, which has a name");
        assert_eq!(line(&[], own), None);
        assert_eq!(line(&[], None), None);
    }
}
