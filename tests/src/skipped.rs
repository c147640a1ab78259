//! Tests that cannot run here.

use std::{fmt::Display, io::Write};

/// Says that the calling test is skipped, and why. The line `skipped: …` goes to stderr itself and not through `eprintln!`, whose output
/// the test runner keeps to itself when a test passes.
pub fn skipped(why: impl Display) {
    // Without stderr nobody reads it.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
