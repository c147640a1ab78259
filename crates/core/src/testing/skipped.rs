//! Marks tests that cannot run here.

use std::{env, fmt::Display, io::Write};

/// `.ci/run` sets this variable to the first words of the reasons for which tests may be skipped there, separated by semicolons.
const MAY_SKIP: &str = "GPUMEM_TESTS_MAY_SKIP";

/// Prints that the calling test is skipped, and the reason. The line `skipped: …` goes directly to stderr instead of through
/// `eprintln!`, because the test runner hides its output when a test passes.
///
/// # Panics
/// Panics if the variable above is set and does not allow this reason.
pub fn skipped(why: impl Display) {
    let why = why.to_string();
    if let Ok(reasons) = env::var(MAY_SKIP) {
        let mut reasons = reasons.split(';').filter(|reason| !reason.is_empty());
        assert!(reasons.any(|reason| why.starts_with(reason)), "skipped: {why}; {MAY_SKIP} does not allow it");
    }
    // Without stderr, the line cannot be shown.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
