//! Tests a pool in C that uses the functions of `gpumem.h`.

use std::{fs::File, path::Path, process::Command};

use gpumem::Bytes;
use gpumem_recording::Reader;
use gpumem_tests::{Standin, built};

/// Compiles the program and links it with the `libgpumem_c.so` that was built with the tests.
fn compiled(program: &Path) {
    let library = built("libgpumem_c.so");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-std=c11", "-I"]).arg(here.join("../crates/c/include"));
    cc.arg(here.join("tests/standin/pools/program.c")).arg(&library);
    cc.arg(format!("-Wl,-rpath,{}", library.parent().expect("it is in a folder").display()));
    let output = cc.args(["-ldl", "-lpthread", "-o"]).arg(program).output().expect("there is a compiler of C");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_pool_in_c_is_measured() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (program, file) = (folder.join("pool-in-c"), folder.join("pool-in-c.capture"));
    compiled(&program);
    let machine = || if cfg!(target_arch = "x86_64") { Standin::new().dispatch() } else { Standin::new().cupti() };
    for stderr in ["full", "nobody reads it"] {
        let outcome = machine().run_program(&program, &[stderr]);
        assert!(outcome.succeeded(), "{stderr}: {outcome}");
    }
    let outcome = machine().env("GPUMEM_CAPTURE", &file).run_program(&program, &[]);
    assert!(outcome.is_clean(), "{outcome}");
    assert!(outcome.to_string().contains("gpumem: the pool is not measured: "), "{outcome}");
    let mut reader = Reader::new(File::open(&file).expect("it is there")).expect("it can be read");
    while reader.step().expect("it can be read").is_some() {}
    let summary = reader.summary().expect("there is room for it");
    let whole = &summary.scopes[0];
    // At the end, the program has the workspace and the two live parts. At the peak, it had the workspace and the first two
    // parts.
    assert_eq!((whole.used, whole.peak), (Bytes::mib(31), Bytes::mib(38)), "{summary}");
    let [pool] = &summary.pools[..] else { panic!("{summary}") };
    assert_eq!((pool.name.as_str(), pool.parts, pool.used), ("pool in C", 2, Bytes::mib(23)), "{summary}");
    assert_eq!((pool.unused(), pool.unknown_frees, pool.wrong_calls()), (Some(Bytes::mib(73)), 1, 1), "{summary}");
    assert_eq!(summary.lost, 1, "{summary}");
}
