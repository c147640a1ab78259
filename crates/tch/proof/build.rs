//! Compiles `proof.cpp` with the headers that `gpumem-tch` has found.

use std::env;

fn main() {
    let headers = env::var_os("DEP_GPUMEM_TCH_HEADERS").expect("libtorch has CUDA");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(false)
        .includes(env::split_paths(&headers))
        .file("src/proof.cpp")
        .compile("gpumem_tch_proof");
    println!("cargo::rerun-if-changed=src/proof.cpp");
}
