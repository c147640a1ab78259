//! Tests the commands that show the machine, on the stand-in driver.

mod doctor;
#[cfg(feature = "export")]
mod export;
mod info;
mod names;
mod ps;
mod watch;
mod widths;

use std::path::Path;

use gpumem_tests::{Outcome, Standin, built};
use serde_json::Value;

/// Runs the command with these arguments.
fn gpumem(machine: &Standin, arguments: &[&str]) -> Outcome {
    machine.run_program(&built("gpumem-command"), arguments)
}

/// Returns the output of the command with `--json`.
#[track_caller]
fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome}"))
}

/// Checks that the command ended with this code, and that stderr has one line for each of these texts, which contains the text.
#[track_caller]
fn ended(outcome: &Outcome, code: i32, lines: &[&str]) {
    assert_eq!(outcome.exit(), format!("exit status: {code}"), "{outcome}");
    let printed: Vec<_> = outcome.stderr.lines().collect();
    assert_eq!(printed.len(), lines.len(), "{outcome}");
    for (printed, expected) in printed.iter().zip(lines) {
        assert!(printed.starts_with("gpumem: ") && printed.contains(expected), "{printed}\n{expected}\n{outcome}");
    }
}

/// Runs a shell script on a machine whose driver has a dispatch table. In the script, `$gpumem` is the command and `$program` is
/// the probe. The function `probe` runs the probe, which allocates 4 MiB and waits until the file `$end` exists.
#[track_caller]
fn script(machine: Standin, name: &str, script: &str) -> Outcome {
    let prefix = format!("machine-{name}-");
    let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(env!("CARGO_TARGET_TMPDIR"));
    let folder = folder.expect("the folder for tests can be written");
    let [gpumem, probe] = ["gpumem-command", "probe"].map(built);
    let steps = "'call cuInit 0' 'call cuDevicePrimaryCtxRetain &context 0' 'call cuCtxSetCurrent context' \
                 'call cuMemAlloc_v2 &kept 4194304'";
    let text = format!(
        "cd {folder}; gpumem={}; program={}; end={folder}/end; probe() {{ exec {} {steps} \"await_file $end\"; }}\n{script}",
        gpumem.display(),
        probe.display(),
        probe.display(),
        folder = folder.path().display(),
    );
    let machine = machine
        .dispatch()
        .env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"))
        .env("XDG_RUNTIME_DIR", folder.path());
    machine.run_program("/bin/bash".as_ref(), &["-c", &text])
}

/// Checks that no call created a context.
#[track_caller]
fn without_context(outcome: &Outcome) {
    assert!(!outcome.calls.iter().any(|call| call.contains("context_created") || call.contains("Retain")), "{outcome}");
}

/// A program for `gpumem run --live` whose peaks are short, the highest first. Before each peak, the program makes thousands of
/// events. After the peak, it waits for a file whose name is the number of bytes of the peak.
struct Spikes {
    /// The arguments of `probe`, in a shell's quotes.
    steps: String,
    peaks: Vec<u64>,
    /// The bytes of the program at its end.
    kept: u64,
}

impl Spikes {
    fn new() -> Self {
        let (mut steps, mut peaks, mut kept) = (Vec::new(), Vec::new(), 0);
        for number in 0..6_u64 {
            // These blocks stay, and their sizes do not compress.
            for block in 0..150 {
                let bytes = 512 * (1 + (number * 150 + block) * 7_919 % 997);
                kept += bytes;
                steps.push(format!("'call cuMemAlloc_v2 &kept {bytes}'"));
            }
            let bytes = (1_000 - 100 * number) << 20;
            let peak = kept + bytes;
            // So few events that the file starts over at most once: the reader cannot miss any, however slow the machine is.
            steps.push(format!(
                "'busy 16' 'call cuMemAlloc_v2 &spike {bytes}' 'call cuMemFree_v2 spike' 'await_file {peak}'"
            ));
            peaks.push(peak);
        }
        Self { steps: steps.join(" "), peaks, kept }
    }

    /// Fills in the steps and the peaks.
    fn script(&self, text: &str) -> String {
        let peaks: Vec<_> = self.peaks.iter().map(u64::to_string).collect();
        text.replace("STEPS", &self.steps).replace("PEAKS", &peaks.join(" "))
    }
}
