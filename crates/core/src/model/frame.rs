//! One function on a stack.

use std::fmt;

use super::attribution::{REGISTRIES, file_name};

/// A function on a stack, or a function that was inlined there. Each field is `None` if it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// The demangled function, such as `cudarc::driver::CudaStream::alloc`. The name has no path if the debug information has
    /// none.
    pub function: Option<String>,
    /// The source file.
    pub file: Option<String>,
    /// The line in the file, starting at 1.
    pub line: Option<u32>,
    /// The column in the line, starting at 1.
    pub column: Option<u32>,
    /// The file of the program or library that contains the function.
    pub module: Option<String>,
}

/// Writes the place as compilers print it: `src/train.rs:12:9`. If the file is not known, it writes the function, or
/// else the module.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(file) = &self.file else {
            let known = self.function.as_deref().or_else(|| self.module.as_deref().map(file_name));
            return f.write_str(known.unwrap_or("?"));
        };
        f.write_str(file)?;
        for number in [self.line, self.column].iter().map_while(|number| *number) {
            write!(f, ":{number}")?;
        }
        Ok(())
    }
}

impl Frame {
    /// Returns the frame with a shorter path of its file: relative to this folder if the file is in it, or starting with the
    /// crate if Cargo fetched the file. A file that `torch.compile` wrote has a meaningless name of 50 characters, which is
    /// shortened: `compiled: cdkrsmzu….py`.
    #[must_use]
    pub fn relative_to(&self, folder: &str) -> Self {
        let shortened = |file: &String| {
            let of_crate = REGISTRIES.iter().find_map(|registry| file.split_once(registry)?.1.split_once('/'));
            let below =
                file.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')).filter(|_| !folder.is_empty());
            if self.is_of_torch_compile() {
                return format!("compiled: {}….py", file_name(file).chars().take(8).collect::<String>());
            }
            of_crate.map(|(_, rest)| rest).or(below).unwrap_or(file).to_owned()
        };
        Self { file: self.file.as_ref().map(shortened), ..self.clone() }
    }

    /// Returns the function and its line: `train::forward at src/model.rs:42`. If one of them is not known, this is only the
    /// other.
    pub fn with_function(&self) -> String {
        match (&self.function, &self.file) {
            (Some(function), Some(_)) => format!("{function} at {self}"),
            _ => self.to_string(),
        }
    }
}
