//! Runs one script on a machine for each source of exact values.

use crate::script::check;
use crate::{Outcome, Standin};

/// Machines that differ only in the source that intercepts allocations.
#[derive(Debug, Clone)]
pub struct Machines(Vec<(&'static str, &'static str, Standin)>);

impl Standin {
    /// Returns this machine with libcupti, and this machine with a dispatch table on processors for which the stand-in
    /// driver has one.
    pub fn with_each_source(self) -> Machines {
        let mut all = vec![("cupti", "libcupti.so.13", self.clone().cupti())];
        if cfg!(target_arch = "x86_64") {
            all.push(("dispatch", "libcuda.so.1", self.dispatch()));
        }
        Machines(all)
    }
}

impl Machines {
    /// Returns the machines, one after the other.
    pub fn all(&self) -> impl Iterator<Item = &Standin> {
        self.0.iter().map(|(.., machine)| machine)
    }

    /// Runs [`check`] on each machine. In the answers, `SOURCE` and `LIBRARY` stand for the machine's own.
    ///
    /// # Panics
    /// Panics as [`check`] does.
    #[track_caller]
    pub fn check(&self, script: &str) -> Vec<Outcome> {
        let run = |(source, library, machine): &(&str, &str, Standin)| {
            let outcome = check(machine, &script.replace("SOURCE", source).replace("LIBRARY", library));
            // The library of the other source must not even be loaded.
            assert!(*source == "cupti" || !outcome.calls.iter().any(|call| call.starts_with("cupti")), "{outcome}");
            outcome
        };
        self.0.iter().map(run).collect()
    }
}
