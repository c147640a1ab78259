//! Names the shared object, so that the tests can give a copy of it the name of libcupti.

fn main() {
    // The name is as long as `libcupti.so.13`. The loader finds libcuda and libnvidia-ml only by their files' names.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libstandi.so.0");
    // The debug information of cudarc is left out, because it is ten times as large as the rest, and the tests copy and
    // search the file.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--strip-debug");
    println!("cargo::rerun-if-changed=build.rs");
}
