//! Tests the error messages for wrong uses of the attribute, word for word. The uses are in `ui/fail`. After you change a
//! message, run `TRYBUILD=overwrite cargo test -p gpumem-compile-tests`. The programs in `ui/pass` are correct uses; Cargo builds
//! and runs each of them as a test.

#[allow(unreachable_pub, reason = "in gpumem-tests it is public")]
use std::process::Command;

/// The compiler with which messages are compared, because each version words its own part of a message differently.
const WORDED_BY: &str = "rustc 1.95.";

#[test]
fn refuses() {
    let compiler = compiler();
    if compiler.starts_with(WORDED_BY) {
        trybuild::TestCases::new().compile_fail("ui/fail/*.rs");
    } else {
        gpumem_core::testing::skipped(format_args!("no {WORDED_BY}x, whose words are expected: this is {compiler}"));
    }
}

fn compiler() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("--version").output();
    String::from_utf8_lossy(&output.expect("rustc runs").stdout).into_owned()
}
