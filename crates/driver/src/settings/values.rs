//! The values of the environment variables.

use std::{fmt, path::PathBuf, time::Duration};

use super::{filter::Filter, parse::with_pid};
use crate::{
    error::{Error, Result},
    export::Sink,
    model::{Bytes, Gauge, Source, Threads},
};

pub(super) const GAUGE: &str = "GPUMEM_GAUGE";
pub(super) const SOURCE: &str = "GPUMEM_SOURCE";
pub(super) const SIM: &str = "GPUMEM_SIM";
pub(super) const DRY: &str = "GPUMEM_DRY";
pub(super) const LIMIT: &str = "GPUMEM_LIMIT";

/// A device that replaces the real ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// The variable that requests it.
    pub variable: &'static str,
    /// Its total memory.
    pub size: Bytes,
    /// True for a dry run, which computes nothing.
    pub is_dry: bool,
}

/// The allocations whose stacks are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stacks {
    /// Records the stacks of allocations of 1 MiB or more.
    #[default]
    Large,
    /// Records the same stacks, with Python functions.
    Python,
    /// Records all stacks.
    All,
    /// Records no stacks.
    None,
}

/// The values of all variables. If a value cannot be used, its field keeps the default and `problems` returns the error.
#[expect(clippy::struct_excessive_bools, reason = "each is a variable of its own")]
pub struct Settings {
    /// The target of output, unless the program chooses one (`GPUMEM_REPORT`).
    pub report: Sink,
    /// The filter for the output of traces (`GPUMEM`).
    pub filter: Filter,
    /// True for output without colours (`NO_COLOR`).
    pub no_color: bool,
    /// The gauge of traces; `None` for the best. See [`gauge`](Self::gauge).
    pub(super) gauge: Option<Gauge>,
    /// The source of allocations; `None` for the best. See [`source`](Self::source).
    pub(super) source: Option<Source>,
    /// The time between two readings of a sampled trace (`GPUMEM_SAMPLE_MS`).
    pub sample_every: Duration,
    /// The threads that traces adopt (`GPUMEM_ADOPT`).
    pub adopt: Option<Threads>,
    /// The path of `libcupti` (`GPUMEM_CUPTI`).
    pub cupti: Option<PathBuf>,
    /// The allocations whose stacks are recorded (`GPUMEM_BACKTRACE`).
    pub stacks: Stacks,
    /// True to report memory that was not freed (`GPUMEM_LEAKS`).
    pub leaks: bool,
    /// True to report the allocations that made up the peaks (`GPUMEM_PEAK`).
    pub peak: bool,
    /// The path of the recording (`GPUMEM_CAPTURE`) as the user wrote it. See [`recording`](Self::recording).
    pub recording: Option<PathBuf>,
    /// True if a budget that cannot be measured does not fail (`GPUMEM_BUDGETS`).
    pub skip_budgets: bool,
    /// The file of earlier peaks (`GPUMEM_BASELINE`).
    pub baseline: Option<PathBuf>,
    /// True to write the peaks to that file (`GPUMEM_BASELINE_UPDATE`).
    pub update_baseline: bool,
    /// The memory of each simulated device. See [`sim`](Self::sim).
    pub(super) sim: Vec<Bytes>,
    /// The device that replaces the real ones. See [`card`](Self::card).
    pub(super) card: Option<Card>,
    /// True if the program was not built for gpumem. Then neither NVML nor CUPTI is loaded into it, so that a program that loads them
    /// itself, such as a profiler, is not disturbed.
    pub is_foreign: bool,
    /// The variables that are set.
    pub(super) set: Vec<SetVariable>,
}

/// A variable that is set.
pub(super) struct SetVariable {
    pub(super) name: &'static str,
    /// The effect of the variable.
    pub(super) meaning: &'static str,
    pub(super) text: String,
    /// The meaning of the text, or the reason why it cannot be used.
    pub(super) stands_for: String,
    /// If the value cannot be used: the error, and a text about the replacement value.
    pub(super) problem: Option<(Error, &'static str)>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            report: Sink::default(),
            filter: Filter::default(),
            no_color: false,
            gauge: None,
            source: None,
            sample_every: Duration::from_millis(1),
            adopt: None,
            cupti: None,
            stacks: Stacks::default(),
            leaks: false,
            peak: false,
            recording: None,
            skip_budgets: false,
            baseline: None,
            update_baseline: false,
            sim: Vec::new(),
            card: None,
            is_foreign: false,
            set: Vec::new(),
        }
    }
}

/// Shows the variables that are set.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.set()).finish()
    }
}

impl Settings {
    /// Returns the gauge of traces; `None` for the best.
    ///
    /// # Errors
    /// Returns an error if `GPUMEM_GAUGE` has a value that cannot be used.
    pub fn gauge(&self) -> Result<Option<Gauge>> {
        self.check(GAUGE).map(|()| self.gauge)
    }

    /// Returns the source of allocations; `None` for the best.
    ///
    /// # Errors
    /// Returns an error if `GPUMEM_SOURCE` has a value that cannot be used.
    pub fn source(&self) -> Result<Option<Source>> {
        self.check(SOURCE).map(|()| self.source)
    }

    /// Returns the memory of each simulated device.
    ///
    /// # Errors
    /// Returns an error if `GPUMEM_SIM` has a value that cannot be used.
    pub fn sim(&self) -> Result<&[Bytes]> {
        self.check(SIM).map(|()| &*self.sim)
    }

    /// Returns the device that replaces the real ones, if one is requested.
    ///
    /// # Errors
    /// Returns an error if `GPUMEM_DRY` or `GPUMEM_LIMIT` has a value that cannot be used.
    pub fn card(&self) -> Result<Option<Card>> {
        self.check(DRY).and_then(|()| self.check(LIMIT)).map(|()| self.card)
    }

    /// Returns the path of the recording, if one is requested.
    pub fn recording(&self) -> Option<PathBuf> {
        self.recording.as_deref().map(with_pid)
    }

    fn check(&self, variable: &str) -> Result<()> {
        let set = self.set.iter().find(|set| set.name == variable);
        set.and_then(|set| set.problem.as_ref()).map_or(Ok(()), |(error, _)| Err(error.clone()))
    }

    fn errors(&self) -> impl Iterator<Item = &(Error, &'static str)> {
        self.set.iter().filter_map(|set| set.problem.as_ref())
    }

    /// Returns whether this error is about a value that cannot be used. [`problems`](Self::problems) returns its text.
    pub fn is_problem(&self, error: &Error) -> bool {
        self.errors().any(|(problem, _)| problem == error)
    }

    /// Returns a text for each value that cannot be used: the error, and the replacement value.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        self.errors().map(|(error, instead)| format!("{error}; {instead}"))
    }

    /// Returns a line for each variable that is set: its text, the effect of the variable, and the meaning of the text.
    pub fn set(&self) -> impl Iterator<Item = String> {
        let line = |SetVariable { name, meaning, text, stands_for, .. }: &SetVariable| {
            format!("{name}={text} ({meaning}): {stands_for}")
        };
        self.set.iter().map(line)
    }
}

/// A variable and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The name of the variable.
    pub name: &'static str,
    /// The effect of the variable.
    pub meaning: &'static str,
    /// The default, which applies if the variable is not set.
    pub default: &'static str,
    /// The meaning of the text in the environment. If the text cannot be used: the reason, and the value that applies instead. `None` if
    /// the variable is not set.
    pub stands_for: Option<String>,
    /// True if the text can be used.
    pub is_usable: bool,
}
