//! Tests the messages of wrong uses of the attribute, word for word, in `ui/fail`. After a change of words, run
//! `TRYBUILD=overwrite cargo test -p gpumem-compile-tests`. The crates that the attribute must not disturb are in `ui/pass`; they
//! are tests.

#[allow(unreachable_pub, reason = "in gpumem-tests it is public")]
use std::process::Command;

/// Compilers word their own part of a message differently, so one is chosen.
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
