//! Compiles `observe.cpp` against the libtorch that `torch-sys` has found.

use std::{
    env,
    path::{Path, PathBuf},
};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(has_cuda)");
    println!("cargo::rerun-if-changed=src/observe.cpp");
    // The variable is missing if torch-sys has its feature `doc-only`, or on a system where CUDA's allocator is not observed.
    let Some(libraries) = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else { return };
    if !libraries.join("libc10_cuda.so").exists() {
        return;
    }
    let headers = variable("LIBTORCH_INCLUDE").or(libraries.parent().map(Path::to_owned)).unwrap_or_default();
    let abi = variable("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".into());
    let headers = [headers.join("include"), cuda_headers(&libraries)];
    println!("cargo::metadata=headers={}", env::join_paths(&headers).expect("no folder has a colon").display());
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(false)
        .includes(&headers)
        .define("_GLIBCXX_USE_CXX11_ABI", &*abi.to_string_lossy())
        .file("src/observe.cpp")
        .compile("gpumem_tch");
    for library in ["torch_cuda", "torch_cpu", "c10_cuda", "c10"] {
        println!("cargo::rustc-link-lib={library}");
    }
    println!("cargo::rustc-cfg=has_cuda");
}

/// Returns the folder of CUDA's headers, which the headers of libtorch include. It belongs to a toolkit or to a package from PyPI.
fn cuda_headers(libraries: &Path) -> PathBuf {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).chain(["/usr/local/cuda".into()]);
    let packages =
        libraries.join("../../nvidia").read_dir().into_iter().flatten().flatten().map(|folder| folder.path());
    let mut folders = toolkits.chain(packages).map(|folder| folder.join("include"));
    folders.find(|folder| folder.join("crt/host_config.h").exists()).unwrap_or_else(|| {
        panic!(
            "libtorch's headers include CUDA's headers, which are not found: set CUDA_HOME to a CUDA toolkit, or to the folder \
             nvidia/cu13 that `pip install --target . --no-deps nvidia-cuda-runtime nvidia-cuda-crt` makes"
        )
    })
}

fn variable(name: &str) -> Option<PathBuf> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var_os(name).map(PathBuf::from)
}
