//! The names by which modules, crates and folders are recognized. A pattern such as `libcudart` fits `libcudart.so.12`;
//! `libcudnn*` fits all names that start with `libcudnn`.

use super::phase::Phase;

/// Folders in which Cargo keeps the sources of other crates. A folder for the index or repository follows, then the crate.
pub(in super::super) const REGISTRIES: &[&str] = &["/registry/src/", "/git/checkouts/"];

/// The folders of Python packages.
pub(super) const PACKAGE_FOLDERS: &[&str] = &["/site-packages/", "/dist-packages/"];

/// Parts of the paths of Python packages, of Python's standard library, and of files that `torch.compile` writes. `<frozen` is the name
/// of files inside the interpreter.
pub(super) const PYTHON_PACKAGES: &[&str] =
    &["/site-packages/", "/dist-packages/", "/gpumem_trace/", "/lib/python3.", "<frozen ", TORCH_COMPILE];

/// The folder of files that `torch.compile` writes, followed by the name of the user.
pub(super) const TORCH_COMPILE: &str = "/torchinductor_";

/// Functions of Python packages that only call the function they are given: the folder or the file, and the name. Functions
/// inside other functions need no entry. PyTorch's history contains only the last part of a name.
pub(super) const WRAPPERS: &[(&str, &str)] = &[
    ("/torch/nn/modules/module.py", "Module._wrapped_call_impl"),
    ("/torch/nn/modules/module.py", "Module._call_impl"),
    ("/torch/nn/modules/module.py", "Module._apply"),
    ("/torch/_dynamo/", "OptimizedModule.__call__"),
    ("/torch/_functorch/", "call_func_at_runtime_with_args"),
    ("/torch/_functorch/", "_AnalyzeCustomOpInputOutputMode.__torch_dispatch__"),
    ("/torch/_inductor/", "CompiledFxGraph.__call__"),
    ("/torch/autograd/function.py", "Function.apply"),
    ("/torch/autograd/function.py", "BackwardCFunction.apply"),
    ("/torch/_ops.py", "OpOverload.__call__"),
    ("/torch/_ops.py", "OpOverloadPacket.__call__"),
    ("/torch/distributed/distributed_c10d.py", "_new_group_with_tag"),
    ("/torch/distributed/distributed_c10d.py", "_new_process_group_helper"),
    ("/torch/utils/checkpoint.py", "_run_fn_with_dynamo_disabled"),
    ("/transformers/modeling_layers.py", "GradientCheckpointingLayer.__call__"),
    ("/threading.py", "Thread._bootstrap"),
    ("/threading.py", "Thread._bootstrap_inner"),
    ("/threading.py", "Thread.run"),
];

/// The names that decorators in Python packages give to their inner functions.
pub(super) const DECORATED: &[&str] = &["decorate_context", "inner", "wrapped", "wrapped_func", "wrapper"];

/// Functions of Python packages that show the phase in which the functions they call run. PyTorch's history contains only the last parts
/// of their names.
pub(super) const PHASES: &[(&str, &str, Phase)] = &[
    // The functions that the engine calls on its own threads, and those that call the engine.
    ("/torch/autograd/function.py", "BackwardCFunction.apply", Phase::BackwardPass),
    ("/torch/autograd/graph.py", "_engine_run_backward", Phase::BackwardPass),
    ("/torch/utils/checkpoint.py", "unpack_hook", Phase::BackwardPass),
    // Checkpoints with and without `use_reentrant`.
    ("/torch/utils/checkpoint.py", "backward", Phase::Recomputation),
    ("/torch/utils/checkpoint.py", "recompute_fn", Phase::Recomputation),
    ("/torch/utils/data/_utils/pin_memory.py", "_pin_memory_loop", Phase::PinThread),
];

/// Python's interpreter.
pub(super) const INTERPRETER: &[&str] = &["python3*", "libpython*"];

/// NVIDIA's modules that all allocations go through. Therefore they do not show which library allocates.
pub(super) const DRIVER: &[&str] = &["libcupti", "libcuda", "libcudart", "libnvidia*", "libcudadebugger"];

/// The modules in which a call enters the driver. All inner frames belong to the callback that observes the call.
pub(super) const ENTRANCE: &[&str] = &["libcupti", "libcuda"];

/// Modules of libraries that frameworks call, and the names of the libraries. The first pattern that fits is used.
///
/// An entry gives the library its name, and hides its functions from [`user_line`](super::user_line), so that a line of its
/// caller is shown. In contrast to an entry of [`LIBRARIES`], the library is also a part of stacks with Python lines, inside of
/// the function that calls it ([`calls`](super::calls())).
pub(super) const CALLED_LIBRARIES: &[(&str, &str)] = &[
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
];

/// Like [`CALLED_LIBRARIES`], but for all other modules, such as those of frameworks. An entry also gives a name and hides the
/// functions of the library. On stacks with Python lines, [`calls`](super::calls()) shows only these lines.
pub(super) const LIBRARIES: &[(&str, &str)] = &[
    ("libtorch*", "PyTorch"),
    ("libc10*", "PyTorch"),
    ("libjax*", "XLA"),
    ("libxla*", "XLA"),
    ("xla_*", "XLA"),
    ("libtensorflow*", "TensorFlow"),
    ("_pywrap_tensorflow*", "TensorFlow"),
    ("libonnxruntime*", "ONNX Runtime"),
    ("onnxruntime_pybind11_state", "ONNX Runtime"),
    ("libggml*", "GGML"),
    ("libcudf", "cuDF"),
    ("librmm", "RMM"),
    ("libxgboost", "XGBoost"),
];

/// Python packages and the names of their libraries, for files that are not in [`LIBRARIES`]. An entry only gives a name.
pub(super) const PACKAGES: &[(&str, &str)] = &[
    ("torch", "PyTorch"),
    ("cupy*", "CuPy"),
    ("jaxlib", "XLA"),
    ("tensorflow", "TensorFlow"),
    ("tensorrt*", "TensorRT"),
    ("onnxruntime", "ONNX Runtime"),
    ("triton", "Triton"),
    ("cudf", "cuDF"),
    ("rmm", "RMM"),
];

/// Modules of the operating system, which contain no line of a user.
pub(super) const SYSTEM: &[&str] =
    &["libc", "libm", "libpthread", "libdl", "libgcc_s", "libstdc++", "ld-linux*", "linux-vdso"];

/// Crates of frameworks that allocate for the user, and all crates whose names start with one of these, such as `candle_nn`. Used
/// if the file is not known. An entry makes [`user_line`](super::user_line) prefer every other function of the stack, as it does
/// for functions whose files Cargo fetched.
pub(super) const FRAMEWORKS: &[&str] =
    &["candle", "burn", "cubecl", "tch", "torch_sys", "dfdx", "cust", "ort", "rayon", "tokio"];

/// Crates between a user's line and the driver, in addition to gpumem's own.
pub(super) const CRATES: &[&str] = &["std", "core", "alloc", "cudarc"];

/// Those of these crates that do not show where a program allocates.
pub(super) const RUNTIME: &[&str] = &["std", "core", "alloc"];

/// gpumem's crates that run in programs, by their names in functions and in files.
pub(super) const GPUMEM: &[&str] = &[
    "gpumem",
    "gpumem_c",
    "gpumem-c",
    "gpumem_core",
    "gpumem-core",
    "gpumem_driver",
    "gpumem-driver",
    "gpumem_recording",
    "gpumem-recording",
];

/// The gpumem module that a C program links with.
pub(super) const GPUMEM_C: &[&str] = &["libgpumem_c"];

/// The prefix of the functions in `gpumem.h`. Used if the file is not known and the functions are linked into the program.
pub(super) const GPUMEM_H: &str = "gpumem_pool_";

/// Folders of the standard libraries' sources, of Rust and of C++. Their full paths are needed, because a user's folder may also be
/// called `core`.
pub(super) const STD_FOLDERS: &[&str] =
    &["/rustc/", "/rustlib/src/rust/", "/rust/deps/", "/usr/include/", "/include/c++/", "/lib/gcc/", "/lib/clang/"];

/// Folders in which the CUDA toolkit is installed. Its headers are in folders `include` below them.
pub(super) const TOOLKITS: &[&str] =
    &["/usr/local/cuda", "/opt/cuda", "/hpc_sdk/", "/site-packages/nvidia/", "/dist-packages/nvidia/"];

/// Parts of the paths of toolkit headers in other places, of thrust and cub, and of files that nvcc generates to call kernels.
pub(super) const TOOLKIT_FILES: &[&str] = &[
    "/targets/x86_64-linux/include/",
    "/targets/sbsa-linux/include/",
    "/targets/aarch64-linux/include/",
    "/cuda_runtime.h",
    ".cudafe1.stub.c",
    "/include/thrust/",
    "/thrust/thrust/",
    "/include/cub/",
    "/cub/cub/",
    "/include/cccl/",
    "/include/cuda/std/",
];

/// The namespaces of thrust, cub and libcu++, and of allocators of the standard library.
pub(super) const TOOLKIT_NAMESPACES: &[&str] = &["thrust::", "cub::", "cuda::std::", "__gnu_cxx::"];

/// Functions that run before any code of the user. Used if the file is not known.
pub(super) const STARTUP: &[&str] = &["main", "_start", "__rust_try", "__rust_begin_short_backtrace"];

/// Returns the last part of a path.
pub(in super::super) fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}
