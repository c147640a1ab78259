//! The commands that show the machine, on the stand-in driver.

mod info;

use gpumem_tests::{Outcome, Standin, built};
use serde_json::Value;

/// Runs the command with these arguments.
fn gpumem(machine: &Standin, arguments: &[&str]) -> Outcome {
    machine.run_program(&built("gpumem-command"), arguments)
}

/// What it prints with `--json`.
#[track_caller]
fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome}"))
}

/// It ended with this code, and these words stand in this order in one line of stderr for each.
#[track_caller]
fn ended(outcome: &Outcome, code: i32, lines: &[&str]) {
    assert_eq!(outcome.exit(), format!("exit status: {code}"), "{outcome}");
    let printed: Vec<_> = outcome.stderr.lines().collect();
    assert_eq!(printed.len(), lines.len(), "{outcome}");
    for (printed, expected) in printed.iter().zip(lines) {
        assert!(printed.starts_with("gpumem: ") && printed.contains(expected), "{printed}\n{expected}\n{outcome}");
    }
}

/// No call created a context.
#[track_caller]
fn without_context(outcome: &Outcome) {
    assert!(!outcome.calls.iter().any(|call| call.contains("context_created") || call.contains("Retain")), "{outcome}");
}
