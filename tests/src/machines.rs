//! The same script on a machine for each source of exact figures.

use std::time::Duration;

use crate::script::check;
use crate::{Outcome, Standin};

/// Machines that differ only in the source that intercepts allocations.
#[derive(Debug, Clone)]
pub struct Machines(Vec<(&'static str, &'static str, Standin)>);

impl Machines {
    /// Makes one with libcupti, and one with a dispatch table if the stand-in driver has one.
    pub fn of_both_sources() -> Self {
        let mut all = vec![("cupti", "libcupti.so.13", Standin::new().cupti())];
        if cfg!(target_arch = "x86_64") {
            all.push(("dispatch", "libcuda.so.1", Standin::new().dispatch()));
        }
        Self(all)
    }

    fn each(mut self, change: impl Fn(Standin) -> Standin) -> Self {
        for (.., machine) in &mut self.0 {
            *machine = change(machine.clone());
        }
        self
    }

    /// See [`Standin::set`].
    #[must_use]
    pub fn set(self, setting: &str) -> Self {
        self.each(|machine| machine.set(setting))
    }

    /// See [`Standin::devices`].
    #[must_use]
    pub fn devices(self, count: u32) -> Self {
        self.each(|machine| machine.devices(count))
    }

    /// See [`Standin::fail`].
    #[must_use]
    pub fn fail(self, fault: impl Into<String>) -> Self {
        let fault = fault.into();
        self.each(|machine| machine.fail(fault.clone()))
    }

    /// See [`Standin::without_symbol`].
    #[must_use]
    pub fn without_symbol(self, symbol: &str) -> Self {
        self.each(|machine| machine.without_symbol(symbol))
    }

    /// See [`Standin::env`].
    #[must_use]
    pub fn env(self, name: &str, value: &str) -> Self {
        self.each(|machine| machine.env(name, value))
    }

    /// See [`Standin::limit`].
    #[must_use]
    pub fn limit(self, limit: Duration) -> Self {
        self.each(|machine| machine.limit(limit))
    }

    /// Returns the machines, one after the other.
    pub fn all(&self) -> impl Iterator<Item = &Standin> {
        self.0.iter().map(|(.., machine)| machine)
    }

    /// [`check`] on each machine. In the answers, `SOURCE` and `LIBRARY` stand for the machine's own.
    ///
    /// # Panics
    /// Panics as [`check`] does.
    #[track_caller]
    pub fn check(&self, script: &str) -> Vec<Outcome> {
        let run = |(source, library, machine): &(&str, &str, Standin)| {
            let outcome = check(machine, &script.replace("SOURCE", source).replace("LIBRARY", library));
            // The other is not even loaded.
            assert!(*source == "cupti" || !outcome.calls.iter().any(|call| call.starts_with("cupti")), "{outcome}");
            outcome
        };
        self.0.iter().map(run).collect()
    }
}
