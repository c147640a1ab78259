//! Finds the library that allocated, and the user's line, on a stack.

mod calls;
mod phase;
mod tables;

use std::path::Path;

pub(crate) use self::calls::{backward_operation, phase};
use self::tables::{
    CALLED_LIBRARIES, CRATES, DRIVER, ENTRANCE, FRAMEWORKS, GPUMEM, GPUMEM_C, GPUMEM_H, INTERPRETER, LIBRARIES,
    PACKAGE_FOLDERS, PACKAGES, PYTHON_PACKAGES, RUNTIME, STARTUP, STD_FOLDERS, SYSTEM, TOOLKIT_FILES,
    TOOLKIT_NAMESPACES, TOOLKITS, TORCH_COMPILE,
};
pub(super) use self::tables::{REGISTRIES, file_name};
pub use self::{
    calls::{Call, calls, torch_operation},
    phase::Phase,
};
use super::Frame;

/// Returns whether a module, given by the path of its file, belongs to NVIDIA's driver or runtime. Its frames do not
/// show which library allocates.
pub fn is_driver(module: &str) -> bool {
    DRIVER.iter().any(|pattern| fits(module, pattern))
}

/// Returns whether a module is the gpumem of a program in C, which counts as the program.
pub fn is_gpumem_c(module: &str) -> bool {
    GPUMEM_C.iter().any(|pattern| fits(module, pattern))
}

/// Returns the library that allocated: the library of the innermost frame outside the driver and gpumem. The name comes from the tables; other
/// modules are named after their Python package, or else after their file. `None` if no module is known.
pub fn library(frames: &[Frame]) -> Option<&str> {
    let is_entrance = |frame: &Frame| frame.is_in(ENTRANCE);
    let entered = frames.iter().position(is_entrance).unwrap_or(0);
    // The module that contains gpumem counts as the program.
    let is_outside = |frame: &&Frame| !frame.is_in(DRIVER) && (frame.is_in(GPUMEM_C) || !frame.is_of_gpumem());
    let mut outside = frames[entered..].iter().filter(is_outside);
    let module = outside.find_map(|frame| frame.module.as_deref())?;
    let named =
        |package| PACKAGES.iter().find(|(pattern, _)| fits(package, pattern)).map_or(package, |(_, name)| *name);
    let of_package = || package(module).map(named);
    let known = CALLED_LIBRARIES.iter().chain(LIBRARIES).find(|(pattern, _)| fits(module, pattern));
    Some(known.map(|(_, name)| *name).or_else(of_package).unwrap_or_else(|| file_name(module)))
}

/// Returns the Python package that a module belongs to: `cupy` for `…/site-packages/cupy/cuda/memory.cpython-312-x86_64-linux-gnu.so`,
/// `numpy` for `…/site-packages/numpy.libs/libopenblas.so`. The folder `nvidia` belongs to many packages, so it identifies none.
fn package(module: &str) -> Option<&str> {
    let (_, below) = PACKAGE_FOLDERS.iter().find_map(|folder| module.rsplit_once(folder))?;
    below.split(['/', '.']).next().filter(|package| !matches!(*package, "" | "nvidia"))
}

/// Returns the frames of the program: the frames outside the driver, its callback and gpumem.
pub fn program_frames(frames: &[Frame]) -> &[Frame] {
    let entered = frames.iter().rposition(|frame| frame.is_in(ENTRANCE)).map_or(0, |at| at + 1);
    let own = frames[entered..].iter().take_while(|frame| frame.is_of_gpumem()).count();
    &frames[entered + own..]
}

/// Returns the frames of the program and its libraries. Leaves out the standard library, gpumem, the libraries of the operating system,
/// code before `main`, and the interpreter if there are Python lines.
pub fn readable_frames(frames: &[Frame]) -> Vec<&Frame> {
    let has_python = frames.iter().any(Frame::is_python);
    let is_readable = |frame: &&Frame| {
        let is_startup = frame.file.is_none() && frame.function.as_deref().is_some_and(|name| STARTUP.contains(&name));
        let is_interpreter = has_python && frame.is_in(INTERPRETER);
        !is_startup && !is_interpreter && !frame.is_in(SYSTEM) && !frame.is_of_gpumem() && !frame.is_of(RUNTIME)
    };
    program_frames(frames).iter().filter(is_readable).collect()
}

/// Returns the user's line: the innermost known frame that is not in the standard library, the CUDA toolkit, gpumem, cudarc or a library
/// of the tables. Frames of crates that Cargo fetched and of Python packages are used only if there is no other, because users of a
/// framework look for their own line. On a stack with Python lines, only these are used.
///
/// The second frame is the line of another function or file that called it: programs often allocate through helper
/// functions.
pub fn user_line(frames: &[Frame]) -> Option<(&Frame, Option<&Frame>)> {
    let has_python = frames.iter().any(Frame::is_python);
    let lines = frames.iter().filter(|frame| !has_python || frame.is_python()).filter(|frame| {
        let elsewhere = frame.is_in(DRIVER) || frame.is_in(SYSTEM) || frame.is_in_library() || frame.is_of_toolkit();
        !elsewhere && frame.is_known() && !frame.is_of_gpumem() && !frame.is_of(CRATES)
    });
    let mut own = lines.clone().filter(|frame| !frame.is_fetched());
    if let Some(line) = own.next() {
        let is_caller = |frame: &&Frame| frame.file.is_some() && (&frame.file, frame.line) != (&line.file, line.line);
        return Some((line, own.find(is_caller)));
    }
    lines.clone().next().map(|line| (line, None))
}

impl Frame {
    fn is_in(&self, modules: &[&str]) -> bool {
        self.module.as_deref().is_some_and(|module| modules.iter().any(|pattern| fits(module, pattern)))
    }

    /// Returns whether this is a Python frame: one with a file but without a module, because it is not machine code.
    pub fn is_python(&self) -> bool {
        let is_source = |file: &String| {
            Path::new(file).extension().is_some_and(|extension| extension == "py") || file.starts_with('<')
        };
        self.module.is_none() && self.file.as_ref().is_some_and(is_source)
    }

    /// Returns whether Cargo or a Python package manager fetched the code, or whether it came with Python. A frame without a file
    /// must belong to a known framework.
    fn is_fetched(&self) -> bool {
        let Some(file) = &self.file else {
            let named = self.function.as_deref().map(crates_of).unwrap_or_default();
            return !named.is_empty() && named.iter().all(|name| is_of_framework(name));
        };
        if self.is_python() { self.is_of_python_package() } else { is_below(file, REGISTRIES) }
    }

    /// Returns whether the file belongs to a Python package or to Python itself, or whether `torch.compile` wrote it.
    pub fn is_of_python_package(&self) -> bool {
        self.file.as_deref().is_some_and(|file| is_below(file, PYTHON_PACKAGES))
    }

    /// Returns whether `torch.compile` wrote the file.
    pub fn is_of_torch_compile(&self) -> bool {
        self.file.as_deref().is_some_and(|file| file.contains(TORCH_COMPILE))
    }

    /// Returns whether this frame belongs to the CUDA toolkit inside the program: its headers, thrust, cub, and the CUDA runtime
    /// if it is linked into the program, which is `libcudart_static_…` and the functions of its API, such as `cudaMalloc`.
    fn is_of_toolkit(&self) -> bool {
        let function = self.function.as_deref().map(declared_name).unwrap_or_default();
        let is_of_api =
            || function.strip_prefix("cuda").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
        let is_of_file = self.file.as_deref().map_or_else(
            || function.starts_with("libcudart_static_") || is_of_api(),
            |file| is_below(file, TOOLKIT_FILES) || TOOLKITS.iter().any(|folder| has_headers(file, folder)),
        );
        is_of_file || TOOLKIT_NAMESPACES.iter().any(|namespace| function.starts_with(namespace))
    }

    fn is_in_library(&self) -> bool {
        CALLED_LIBRARIES.iter().chain(LIBRARIES).any(|(pattern, _)| self.is_in(&[pattern]))
    }

    /// Returns whether enough is known for a user to find the code.
    fn is_known(&self) -> bool {
        self.file.is_some() || self.function.as_deref().is_some_and(|function| !STARTUP.contains(&function))
    }

    fn is_of_gpumem(&self) -> bool {
        let is_of_header = self.function.as_deref().is_some_and(|function| function.starts_with(GPUMEM_H));
        let is_of_checkout = || self.file.as_deref().is_some_and(is_in_checkout);
        is_of_header || self.is_in(GPUMEM_C) || self.is_of(GPUMEM) || is_of_checkout()
    }

    /// Returns whether the code belongs to one of these crates, according to its file or its function.
    fn is_of(&self, crates: &[&str]) -> bool {
        let file = self.file.as_deref().unwrap_or_default();
        let in_std = crates.contains(&"std") && STD_FOLDERS.iter().any(|folder| file.contains(folder));
        let written_in = crates.iter().any(|name| is_in_crate(file, name));
        let named = self.function.as_deref().map(crates_of).unwrap_or_default();
        in_std || written_in || !named.is_empty() && named.iter().all(|name| crates.contains(name))
    }
}

fn is_below(file: &str, folders: &[&str]) -> bool {
    folders.iter().any(|folder| file.contains(folder))
}

/// Returns whether a file is in a folder `include` below a folder.
fn has_headers(file: &str, folder: &str) -> bool {
    file.split_once(folder).is_some_and(|(_, below)| below.contains("/include/"))
}

/// Returns whether a pattern of the tables fits the file of a module: `libcudart` fits `libcudart.so.12` and
/// `libcudart-d0da41ae.so.11.0`.
fn fits(module: &str, pattern: &str) -> bool {
    let file = file_name(module);
    pattern.strip_suffix('*').map_or_else(
        || file.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-'])),
        |prefix| file.starts_with(prefix),
    )
}

fn is_of_framework(name: &str) -> bool {
    let is_framework =
        |known: &&str| name.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'));
    FRAMEWORKS.iter().any(is_framework)
}

/// Returns whether a source file is in the folder `src` of a crate, in a registry, a git checkout or a workspace:
/// `cudarc-0.19.10/src/`, `cudarc-3f2a91c07be4d586/41d0a5b/src/`, `cudarc/src/`. The crates of the standard library are in
/// other folders.
fn is_in_crate(file: &str, name: &str) -> bool {
    let is_version = |rest: &str| {
        let number = rest.strip_prefix('-').unwrap_or_default();
        number.starts_with(|c: char| c.is_ascii_digit())
            || number.len() == 16 && number.bytes().all(|c| c.is_ascii_hexdigit())
    };
    let mut folders = file.split(['/', '\\']);
    let mut is_found = false;
    while let (Some(folder), false) = (folders.next(), is_found) {
        // Only Cargo's checkouts have a folder in between. In a clone of gpumem, `gpumem/examples/src` is the user's.
        let between = match folder.strip_prefix(name) {
            Some("") => 0,
            Some(rest) if is_version(rest) => 1,
            _ => continue,
        };
        is_found = folders.clone().take(1 + between).any(|folder| folder == "src");
    }
    is_found && !["std", "core", "alloc"].contains(&name)
}

/// Returns whether a source file is in `crates/` of gpumem's repository: in the checkout of this build, in a folder `gpumem`, or in
/// Cargo's git folder. The names of the crates' folders are not enough, because a user may also have a `crates/core`.
fn is_in_checkout(file: &str) -> bool {
    let own = env!("CARGO_MANIFEST_DIR").strip_suffix("core").and_then(|crates| file.strip_prefix(crates));
    let below = own.or_else(|| {
        let (above, below) = file.split_once("/crates/")?;
        let mut above = above.rsplit('/').take(2);
        above.any(|folder| folder == "gpumem" || folder.starts_with("gpumem-")).then_some(below)
    });
    below.is_some_and(|below| below.split('/').nth(1) == Some("src"))
}

/// Returns the crates at the start of a function's path: `core` in `core::mem::drop`, `cudarc` in `<&cudarc::X>::f`. Both `a` and `b` in
/// `<a::T as b::Trait>::f`, because the code may be in either.
fn crates_of(function: &str) -> Vec<&str> {
    let function = declared_name(function);
    let is_qualified = function.starts_with(['<', '_']);
    let of_trait = function.split_once(" as ").filter(|_| is_qualified).map(|(_, path)| path);
    [Some(function), of_trait].into_iter().flatten().filter_map(leading_crate).collect()
}

/// Returns the name of a C++ function without its return type and arguments: `thrust::fill<int>` for `void
/// thrust::fill<int>(int*, int)`. Rust names have neither.
fn declared_name(function: &str) -> &str {
    let (mut depth, mut start, mut last) = (0_usize, 0, ' ');
    for (at, sign) in function.char_indices() {
        match sign {
            '(' if depth == 0 && at > start && !function[at..].starts_with("(anonymous ") => {
                return &function[start..at];
            }
            '<' | '(' | '{' | '[' => depth += 1,
            // Function types contain `->`.
            '>' if last == '-' => {}
            '>' | ')' | '}' | ']' => depth = depth.saturating_sub(1),
            ' ' if depth == 0 => start = at + 1,
            _ => {}
        }
        last = sign;
    }
    &function[start..]
}

/// Returns the first name of a path, if another name follows. A single name is a generic parameter or a C function.
fn leading_crate(path: &str) -> Option<&str> {
    const SIGNS: &[&str] = &["_<", "<", "&", "*const ", "*mut ", "mut ", "dyn ", "impl ", "[", "("];
    let mut path = path;
    while let Some(rest) = SIGNS.iter().find_map(|sign| path.strip_prefix(sign)) {
        path = rest;
    }
    let end = path.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    path[end..].starts_with("::").then_some(&path[..end])
}

#[cfg(test)]
mod tests;
