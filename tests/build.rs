//! The program `probe` exports the symbols that a copy of NVTX finds: `tests/run/nvtx/linked.c` says why.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for symbol in ["InitializeInjectionNvtx2_fnptr", "InitializeInjectionNvtxExtension_fnptr"] {
        println!("cargo::rustc-link-arg-bin=probe=-Wl,--export-dynamic-symbol={symbol}");
    }
}
