//! The program `probe` exports the symbol that a copy of NVTX finds: `tests/run/nvtx/linked.c` says why.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bin=probe=-Wl,--export-dynamic-symbol=InitializeInjectionNvtx2_fnptr");
}
