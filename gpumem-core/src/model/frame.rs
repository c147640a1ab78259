//! One function on a stack, and what a stack says: whose memory it is and on which line it was asked for.

use std::fmt;

/// A function on a stack, or one that was inlined there, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Demangled, as in `cudarc::driver::CudaStream::alloc`; without a path where the debug information has none.
    pub function: Option<String>,
    pub file: Option<String>,
    pub line: Option<u32>,
    pub column: Option<u32>,
    /// The file of the program or library that it is in.
    pub module: Option<String>,
}

/// As compilers print it: `src/train.rs:12:9`, then the function or the module where no file is known.
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

/// Where cargo keeps the sources of other crates: what follows the next folder is the crate's own.
const REGISTRIES: &[&str] = &["/registry/src/", "/git/checkouts/"];

impl Frame {
    /// With its file as somebody in that folder would name it; a crate's by the crate.
    #[must_use]
    pub fn seen_from(&self, folder: &str) -> Self {
        let shortened = |file: &String| {
            let of_crate = REGISTRIES.iter().find_map(|registry| file.split_once(registry)?.1.split_once('/'));
            let below =
                file.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')).filter(|_| !folder.is_empty());
            of_crate.map(|(_, rest)| rest).or(below).unwrap_or(file).to_owned()
        };
        Self { file: self.file.as_ref().map(shortened), ..self.clone() }
    }

    /// The function and its line, as far as they are known.
    pub fn in_words(&self) -> String {
        match (&self.function, &self.file) {
            (Some(function), Some(_)) => format!("{function} at {self}"),
            _ => self.to_string(),
        }
    }
}

/// NVIDIA's modules that all allocations go through, and so say nothing of whose they are.
const DRIVER: &[&str] = &["libcupti", "libcuda", "libcudart", "libnvidia*", "libcudadebugger"];

/// Whether a module is a library of NVIDIA's driver or runtime, by the path of its file. Its frames do not tell who allocated.
pub fn is_driver(module: &str) -> bool {
    DRIVER.iter().any(|pattern| fits(module, pattern))
}

/// Where the driver is entered: all that is further inside is the callback that is told of the call.
const ENTRANCE: &[&str] = &["libcupti", "libcuda"];

/// Modules by what people call them; the first that fits.
const LIBRARIES: &[(&str, &str)] = &[
    ("libcublasLt", "cuBLASLt"),
    ("libcublas", "cuBLAS"),
    ("libcublasMp", "cuBLASMp"),
    ("libcudnn*", "cuDNN"),
    ("libcufft*", "cuFFT"),
    ("libcurand", "cuRAND"),
    ("libcusolver*", "cuSOLVER"),
    ("libcusparseLt", "cuSPARSELt"),
    ("libcusparse", "cuSPARSE"),
    ("libcutensor*", "cuTENSOR"),
    ("libcufile*", "cuFile"),
    ("libnccl*", "NCCL"),
    ("libnpp*", "NPP"),
    ("libnvinfer*", "TensorRT"),
    ("libnvonnxparser", "TensorRT"),
    ("libnvJitLink", "nvJitLink"),
    ("libnvjpeg*", "nvJPEG"),
    ("libnvrtc*", "NVRTC"),
    ("libnvshmem*", "NVSHMEM"),
    ("libtorch*", "PyTorch"),
    ("libc10*", "PyTorch"),
    ("libjax*", "XLA"),
    ("libxla*", "XLA"),
    ("xla_*", "XLA"),
    ("libtensorflow*", "TensorFlow"),
    ("_pywrap_tensorflow*", "TensorFlow"),
    ("libonnxruntime*", "ONNX Runtime"),
    ("libggml*", "GGML"),
    ("libcudf", "cuDF"),
    ("librmm", "RMM"),
];

/// The system's modules, in which no user's line is.
const SYSTEM: &[&str] = &["libc", "libm", "libpthread", "libdl", "libgcc_s", "libstdc++", "ld-linux*", "linux-vdso"];

/// Crates between the user's line and the driver.
const CRATES: &[&str] = &["std", "core", "alloc", "gpumem", "cudarc"];

/// Folders of the standard library's sources; a folder of the user's may be called `core` too.
const STD_FOLDERS: &[&str] = &["/rustc/", "/rustlib/src/rust/", "/rust/deps/"];

/// What a program begins with before any code of its user's, where no file says so.
const BEGINNINGS: &[&str] = &["main", "_start", "__rust_try", "__rust_begin_short_backtrace"];

/// Which library made an allocation, by the stack of the call: the first from the inside that is not the driver nor what
/// listens to it, under the name that people know it by, else the name of its file, which is the program's for code of its
/// own. `None` where no module is known.
pub fn library(frames: &[Frame]) -> Option<&str> {
    let is_entrance = |frame: &Frame| frame.is_in(ENTRANCE);
    let entered = frames.iter().position(is_entrance).unwrap_or(0);
    let mut outside = frames[entered..].iter().filter(|frame| !frame.is_in(DRIVER) && !frame.is_of(&["gpumem"]));
    let module = outside.find_map(|frame| frame.module.as_deref())?;
    let known = LIBRARIES.iter().find(|(pattern, _)| fits(module, pattern));
    Some(known.map_or_else(|| file_name(module), |(_, name)| *name))
}

/// What of a stack is the program's: outside of the driver, what listens to it, and this crate.
pub fn of_program(frames: &[Frame]) -> &[Frame] {
    let entered = frames.iter().rposition(|frame| frame.is_in(ENTRANCE)).map_or(0, |at| at + 1);
    let own = frames[entered..].iter().take_while(|frame| frame.is_of(&["gpumem"])).count();
    &frames[entered + own..]
}

/// The user's line on a stack: the first frame from the inside that is known and is not of Rust's own libraries, of
/// gpumem, of cudarc, nor in a library of CUDA's. One that cargo did not fetch from elsewhere, if there is any: a framework is
/// not what somebody who uses it looks for.
///
/// And the line that called it, of another file or function: programs allocate through functions of their own.
pub fn users_line(frames: &[Frame]) -> Option<(&Frame, Option<&Frame>)> {
    let lines = frames.iter().filter(|frame| {
        let elsewhere = frame.is_in(DRIVER) || frame.is_in(SYSTEM) || frame.is_in_library();
        !elsewhere && frame.is_known() && !frame.is_of(CRATES)
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

    /// Of a crate that came from a registry or a repository.
    fn is_fetched(&self) -> bool {
        self.file.as_ref().is_some_and(|file| REGISTRIES.iter().any(|registry| file.contains(registry)))
    }

    fn is_in_library(&self) -> bool {
        LIBRARIES.iter().any(|(pattern, _)| self.is_in(&[pattern]))
    }

    /// Enough to find the code by.
    fn is_known(&self) -> bool {
        self.file.is_some() || self.function.as_deref().is_some_and(|function| !BEGINNINGS.contains(&function))
    }

    /// Its code is that of one of these crates, by its file or its function.
    fn is_of(&self, crates: &[&str]) -> bool {
        let file = self.file.as_deref().unwrap_or_default();
        let in_std = crates.contains(&"std") && STD_FOLDERS.iter().any(|folder| file.contains(folder));
        let written_in = crates.iter().any(|name| is_in_crate(file, name));
        let named = self.function.as_deref().map(crates_of).unwrap_or_default();
        in_std || written_in || !named.is_empty() && named.iter().all(|name| crates.contains(name))
    }
}

/// Whether a module's file is meant by `libcudart`: `libcudart.so.12`, `libcudart-d0da41ae.so.11.0`. `libcudnn*` means all
/// that begin so.
fn fits(module: &str, pattern: &str) -> bool {
    let file = file_name(module);
    pattern.strip_suffix('*').map_or_else(
        || file.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-'])),
        |beginning| file.starts_with(beginning),
    )
}

fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// Whether a source file is in a crate's folder `src`, as the registry, a git checkout or a workspace has it:
/// `cudarc-0.19.10/src/`, `cudarc-3f2a91c07be4d586/41d0a5b/src/`, `cudarc/src/`. Rust's own have folders of their own.
fn is_in_crate(file: &str, name: &str) -> bool {
    let mut folders = file.split(['/', '\\']);
    let is_version = |rest: &str| {
        let number = rest.strip_prefix('-').unwrap_or_default();
        number.starts_with(|c: char| c.is_ascii_digit())
            || number.len() == 16 && number.bytes().all(|c| c.is_ascii_hexdigit())
    };
    let is_std = ["std", "core", "alloc"].contains(&name);
    !is_std
        && folders.any(|folder| folder.strip_prefix(name).is_some_and(|rest| rest.is_empty() || is_version(rest)))
        && folders.take(2).any(|folder| folder == "src")
}

/// The crates that a function's path begins with: `core` of `core::mem::drop`, `cudarc` of `<&cudarc::X>::f`, and both of
/// `<a::T as b::Trait>::f`, whose code is in either.
fn crates_of(function: &str) -> Vec<&str> {
    let is_qualified = function.starts_with(['<', '_']);
    let of_trait = function.split_once(" as ").filter(|_| is_qualified).map(|(_, path)| path);
    [Some(function), of_trait].into_iter().flatten().filter_map(leading_crate).collect()
}

/// The first name of a path, where it is followed by another: a name alone is a generic parameter or a function of C's.
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
mod tests {
    use super::*;

    /// `module | function | file:line` for each frame, innermost first; `-` for what is not known.
    fn stack(text: &str) -> Vec<Frame> {
        let frame = |line: &str| {
            let mut parts = line.split(" | ").map(|part| Some(part.trim().to_owned()).filter(|part| part != "-"));
            let (module, function) = (parts.next().flatten(), parts.next().flatten());
            let place = parts.next().flatten();
            let (file, number) = match place.as_deref().and_then(|place| place.rsplit_once(':')) {
                Some((file, number)) => (Some(file.to_owned()), number.parse().ok()),
                None => (place, None),
            };
            Frame { function, file, line: number, column: None, module }
        };
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(frame).collect()
    }

    #[track_caller]
    fn check(text: &str, attribution: Option<&str>, line: Option<&str>) {
        let frames = stack(text);
        assert_eq!(library(&frames), attribution, "{text}");
        assert_eq!(users_line(&frames).map(|(line, _)| line).map(ToString::to_string).as_deref(), line, "{text}");
    }

    const CUDARC: &str =
        "/home/me/.cargo/registry/src/index.crates.io-0123456789abcdef/cudarc-0.19.10/src/driver/result.rs";

    #[test]
    fn what_is_the_programs_begins_outside_of_the_driver() {
        let frame = |function: &str, module: &str| Frame {
            function: Some(function.to_owned()),
            module: Some(module.to_owned()),
            ..Frame::default()
        };
        let driver = frame("cuMemAlloc_v2", "/lib/libcuda.so.1");
        let (user, own) = (frame("app::train", "/bin/app"), frame("gpumem::sim::SimGpu::alloc", "/bin/app"));
        let heard =
            [frame("gpumem::sys::cupti::callback", "/bin/app"), frame("", "libcupti.so.13"), driver, user.clone()];
        assert_eq!(of_program(&heard), &heard[3..]);
        let simulated = [own.clone(), own, user];
        assert_eq!(of_program(&simulated), &simulated[2..]);
        assert_eq!(of_program(&[]), []);
    }

    #[test]
    fn files_are_named_as_they_are_seen() {
        for (file, seen) in [
            ("/home/me/app/src/main.rs", "src/main.rs"),
            ("/home/me/apples/src/main.rs", "/home/me/apples/src/main.rs"),
            ("src/main.rs", "src/main.rs"),
            (
                "/home/me/.cargo/registry/src/index.crates.io-19/candle-core-0.9/src/lib.rs",
                "candle-core-0.9/src/lib.rs",
            ),
            ("/home/me/.cargo/git/checkouts/burn-3f2a/41d0a5b/src/lib.rs", "41d0a5b/src/lib.rs"),
        ] {
            let frame = Frame { file: Some(file.to_owned()), ..Frame::default() };
            assert_eq!(frame.seen_from("/home/me/app").file.as_deref(), Some(seen));
            assert_eq!(frame.seen_from("").file.as_deref() == Some(file), !file.contains(".cargo"));
        }
    }

    #[test]
    fn a_program_that_allocates_through_cudarc() {
        let text = format!(
            "/app/train | gpumem::sys::cupti::callback | /app/gpumem/src/sys/cupti.rs:10
             /cuda/libcupti.so.13 | - | -
             /lib/libcuda.so.580.159 | - | -
             /lib/libcuda.so.580.159 | cuMemAlloc_v2 | -
             /app/train | cudarc::driver::result::malloc_sync | {CUDARC}:812
             /app/train | alloc_zeros<f32> | {CUDARC}:1290
             /app/train | <core::result::Result<T,E> as core::ops::try_trait::Try>::branch | /rustc/59807/library/core/src/result.rs:2
             /app/train | train::model::Layer::new | src/model.rs:42
             /app/train | train::main | src/main.rs:7
             /app/train | core::ops::function::FnOnce::call_once | /rustc/59807/library/core/src/ops/function.rs:250"
        );
        check(&text, Some("train"), Some("src/model.rs:42"));
    }

    #[test]
    fn a_program_that_allocates_through_a_framework() {
        const CANDLE: &str =
            "/home/me/.cargo/registry/src/index.crates.io-0123456789abcdef/candle-core-0.9.1/src/cuda.rs";
        let framework = format!(
            "/app/train | cudarc::driver::result::malloc_sync | {CUDARC}:812
             /app/train | candle_core::cuda_backend::alloc | {CANDLE}:70
             /app/train | <T as candle_core::Module>::forward | {CANDLE}:90"
        );
        let program = "\n/app/train | train::forward | src/model.rs:42\n/app/train | train::main | src/main.rs:7";
        check(&format!("{framework}{program}"), Some("train"), Some("src/model.rs:42"));
        // On a thread of the framework's there is nobody else.
        check(&framework, Some("train"), Some(&format!("{CANDLE}:70")));
    }

    #[test]
    fn a_program_without_symbols() {
        let text = "/app/train | - | -
             /cuda/libcupti.so.13 | - | -
             /lib/libcuda.so.1 | cuMemAlloc_v2 | -
             /app/train | - | -
             /lib/libc.so.6 | __libc_start_call_main | ./csu/libc_start_call_main.h:58
             /app/train | _start | -";
        check(text, Some("train"), None);
        // What is told of the call is in the program too, and not what made it.
        check(&text.replace("cuMemAlloc_v2 | -", "- | -\n/env/libcublas.so.13 | - | -"), Some("cuBLAS"), None);
        // Function names alone, from the symbol table.
        let text = "/app/train | cudarc::driver::result::malloc_sync | -
             /app/train | train::forward | -
             /app/train | main | -";
        check(text, Some("train"), Some("train::forward"));
        check("/app/train | std::rt::lang_start | -\n/app/train | main | -", Some("train"), None);
    }

    #[test]
    fn a_library_that_allocates_for_itself() {
        let text = "/app/train | gpumem::sys::cupti::callback | -
             /cuda/libcupti.so.13 | - | -
             /lib/libcuda.so.1 | cuMemAlloc_v2 | -
             /env/libcudart.so.13 | cudaMalloc | -
             /env/libcublasLt.so.13 | - | -
             /env/libcublas.so.13 | cublasCreate_v2 | -
             /app/train | cudarc::cublas::result::create_handle | -
             /app/train | train::Blas::new | src/blas.rs:9";
        check(text, Some("cuBLASLt"), Some("src/blas.rs:9"));
    }

    #[test]
    fn a_simulated_device_has_no_driver() {
        let text = "/app/train | gpumem::source::sim::SimGpu::alloc | /home/me/gpumem/gpumem/src/source/sim.rs:91
             /app/train | alloc | /home/me/.cargo/registry/src/x/gpumem-0.1.0/src/source/sim.rs:91
             /app/train | quickstart::main | examples/examples/quickstart.rs:12";
        check(text, Some("train"), Some("examples/examples/quickstart.rs:12"));
    }

    #[test]
    fn nothing_known_is_nothing_said() {
        check("", None, None);
        check("- | - | -", None, None);
        check("/lib/libcuda.so.1 | cuMemAlloc_v2 | -", None, None);
    }

    #[test]
    fn libraries_go_by_the_name_that_people_know() {
        for (module, name) in [
            ("/env/nvidia/cublas/lib/libcublas.so.13", "cuBLAS"),
            ("/env/nvidia/cublas/lib/libcublasLt.so.13.0.2", "cuBLASLt"),
            ("libcudnn_engines_precompiled.so.9", "cuDNN"),
            ("libnccl.so.2", "NCCL"),
            ("libcufft.so.12", "cuFFT"),
            ("libcusparse.so.12", "cuSPARSE"),
            ("libcusparseLt.so.0", "cuSPARSELt"),
            ("libcusolverMg.so.12", "cuSOLVER"),
            ("libcurand-1a2b3c4d.so.10", "cuRAND"),
            ("libnvrtc.so.13", "NVRTC"),
            ("libnvinfer_plugin.so.10", "TensorRT"),
            ("libtorch_cuda.so", "PyTorch"),
            ("libc10_cuda.so", "PyTorch"),
            ("xla_cuda_plugin.so", "XLA"),
            ("/opt/libmine.so.2", "libmine.so.2"),
            ("/usr/bin/python3.12", "python3.12"),
            // They begin as others do.
            ("libcudaq.so", "libcudaq.so"),
            ("libcublasser.so", "libcublasser.so"),
        ] {
            check(&format!("/lib/libcuda.so.1 | - | -\n{module} | - | -"), Some(name), None);
        }
        for driver in ["libcupti.so.13", "libcuda.so.1", "libcuda.so.580.159.01", "libcudart-d0da41ae.so.11.0"] {
            check(&format!("/lib/{driver} | cudaMalloc | -"), None, None);
        }
    }

    #[test]
    fn whose_code_a_function_is() {
        for (function, crates) in [
            ("core::mem::drop", &["core"][..]),
            ("<cudarc::driver::CudaStream>::alloc::<f32>", &["cudarc"]),
            ("<&mut cudarc::driver::CudaStream as core::fmt::Debug>::fmt", &["cudarc", "core"]),
            ("_<train::Model as core::ops::drop::Drop>::drop", &["train", "core"]),
            ("<F as core::ops::function::FnOnce<A>>::call_once", &["core"]),
            ("<&dyn core::ops::function::Fn() as core::ops::function::FnOnce<()>>::call_once", &["core", "core"]),
            ("<[T] as train::Shape>::rank", &["train"]),
            ("train::cast::<u8 as core::Any>", &["train"]),
            ("cuMemAlloc_v2", &[]),
            ("call_once<fn(), ()>", &[]),
            ("", &[]),
        ] {
            assert_eq!(crates_of(function), crates, "{function}");
        }
    }

    #[test]
    fn whose_code_a_file_is() {
        let of = |file: &str, function: Option<&str>| {
            let frame = Frame { file: Some(file.into()), function: function.map(Into::into), ..Frame::default() };
            frame.is_of(CRATES)
        };
        for file in [
            CUDARC,
            "/home/me/.cargo/git/checkouts/cudarc-3f2a91c07be4d586/41d0a5b/src/lib.rs",
            "/home/me/app/vendor/cudarc/src/driver/result.rs",
            "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/alloc/src/boxed.rs",
            "/home/me/.rustup/toolchains/stable/lib/rustlib/src/rust/library/core/src/iter/mod.rs",
            "/rust/deps/hashbrown-0.16.1/src/raw.rs",
        ] {
            assert!(of(file, None), "{file}");
        }
        for file in [
            "src/main.rs",
            "/home/me/app/core/src/lib.rs",
            "/home/me/cudarc-experiments/src/main.rs",
            "/home/me/gpumem/examples/examples/quickstart.rs",
            "/home/me/gpumem-demo/src/main.rs",
        ] {
            assert!(!of(file, Some("demo::main")), "{file}");
        }
        // A trait of the user's for a type of cudarc's, and the other way round.
        assert!(!of("src/ext.rs", Some("<cudarc::driver::CudaStream as demo::Ext>::zeros")));
        assert!(!of("src/ext.rs", Some("<demo::Buffer as core::ops::drop::Drop>::drop")));
    }

    #[test]
    fn a_frame_reads_as_compilers_print_it() {
        let frame = Frame { file: Some("src/a.rs".into()), line: Some(3), column: Some(9), ..Frame::default() };
        assert_eq!(frame.to_string(), "src/a.rs:3:9");
        assert_eq!(Frame { line: None, ..frame }.to_string(), "src/a.rs");
        let frame = Frame { module: Some("/lib/libcublas.so.13".into()), ..Frame::default() };
        assert_eq!(frame.to_string(), "libcublas.so.13");
        assert_eq!(Frame { function: Some("a::b".into()), ..frame }.to_string(), "a::b");
        assert_eq!(Frame::default().to_string(), "?");
    }
}
