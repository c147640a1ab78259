//! Marks tests that cannot run here.

use std::{env, fmt::Display, io::Write};

/// `.ci/run` sets this variable to the beginnings of the reasons for which a test may be skipped there, separated by
/// semicolons.
const MAY_SKIP: &str = "GPUMEM_TESTS_MAY_SKIP";

/// Prints that the calling test is skipped, and the reason. The line `skipped: …` goes to stderr itself and not through `eprintln!`,
/// whose output the test runner keeps to itself when a test passes.
///
/// # Panics
/// Panics if the variable above is set and allows other reasons only.
pub fn skipped(why: impl Display) {
    let why = why.to_string();
    if let Ok(reasons) = env::var(MAY_SKIP) {
        let mut reasons = reasons.split(';').filter(|reason| !reason.is_empty());
        assert!(reasons.any(|reason| why.starts_with(reason)), "skipped: {why}; {MAY_SKIP} does not allow it");
    }
    // Without stderr, nobody can read the line.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
