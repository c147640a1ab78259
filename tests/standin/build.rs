//! Names the shared object, so that the tests can give a copy of it the name that libcupti has.

fn main() {
    // As long as `libcupti.so.13`. The loader finds libcuda and libnvidia-ml by their files' names alone.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libstandi.so.0");
    // Without what a debugger needs of cudarc, which is ten times the rest; the tests copy and search the file.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--strip-debug");
    println!("cargo::rerun-if-changed=build.rs");
}
