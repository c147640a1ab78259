//! Dry runs of a program with different settings.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ffi::OsString,
};

use gpumem_core::model::Bytes;
use gpumem_driver::settings::CONTEXT;

use super::{
    answer::{ALLOCATOR, Answer, AnswerRow, By, SETTINGS},
    dry_run::{Outcome, Trials},
    search::{PRECISION, in_parallel, smallest},
};
use crate::failure::Failure;

/// A program, and the settings to try with it.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) command: Vec<OsString>,
    /// Environments, such as `BATCH=16 LENGTH=512`. If empty, PyTorch's settings are tried.
    pub(crate) tries: Vec<String>,
    /// The memory of the card on which everything is tried.
    pub(crate) card: Bytes,
    /// The number of dry runs at a time.
    pub(crate) jobs: usize,
}

/// Runs the program dry with each environment.
pub(crate) fn ask(question: &Question) -> Result<Answer, Failure> {
    let trials = Trials::new(&question.command)?;
    let mut environments = vec![String::new()];
    if question.tries.is_empty() {
        environments.extend(SETTINGS.iter().map(|setting| format!("{ALLOCATOR}={setting}")));
    } else {
        environments.extend(question.tries.iter().cloned());
    }
    // If the unchanged program fails, the results of other settings mean nothing.
    let own = trials.run("", question.card)?;
    if let (Outcome { failed: Some(why), rejected: 0, .. }, true) = (&own, question.tries.is_empty()) {
        return Err(Failure::new(
            "the program cannot be tried",
            why,
            "run it with `gpumem run --dry` to see its output",
        ));
    }
    let rows = in_parallel(question.jobs, &environments, |environment| {
        let outcome = if environment.is_empty() { own.clone() } else { trials.run(environment, question.card)? };
        trials.row(environment, outcome)
    })?;
    Ok(Answer::of(rows, By::DryRuns(trials.count())))
}

/// The result of a search for the largest value of a variable.
pub(crate) struct Largest {
    /// The largest value that was tried and with which the program succeeds. `None` if there is none.
    pub(crate) value: Option<u64>,
    /// The next value, with the reason why the program fails with it, if that is not memory.
    pub(crate) other_failure: Option<(u64, String)>,
    /// The most values that one of the dry runs has read although they were not computed.
    pub(crate) unknown_values: u64,
}

/// Searches for the largest value of a variable with which the program succeeds. With larger values, a program may also
/// fail for reasons other than memory, such as too few inputs for a batch.
pub(crate) fn largest(question: &Question, name: &str) -> Result<Largest, Failure> {
    let trials = Trials::new(&question.command)?;
    let (other_failures, most_unknown) = (RefCell::new(BTreeMap::new()), Cell::new(0));
    let fits = |value: u64| {
        let outcome = trials.run(&format!("{name}={value}"), question.card)?;
        let Outcome { failed, rejected, unknown_values, .. } = outcome;
        most_unknown.set(most_unknown.get().max(unknown_values));
        let is_fitting = failed.is_none();
        if let Some(why) = failed.filter(|_| rejected == 0) {
            other_failures.borrow_mut().insert(value, why);
        }
        Ok(is_fitting)
    };
    let (mut fitting, mut failing) = (0, 1);
    while fits(failing)? {
        (fitting, failing) = (failing, failing * 2);
        if failing > 1 << 30 {
            let what = format!("{name}={fitting} fits");
            return Err(Failure::new(what, "so does any smaller value", "the program may not read this variable"));
        }
    }
    let failing = smallest(fitting, failing, |_| 1, |value| Ok(!fits(value)?))?;
    let other_failure = other_failures.take().remove(&failing);
    match other_failure {
        Some(why) if failing == 1 => {
            let what = format!("the program cannot be tried with {name}=1");
            Err(Failure::new(what, why, "the program must read this variable, as a whole number"))
        }
        other => {
            let value = (failing > 1).then(|| failing - 1);
            let other_failure = other.map(|why| (failing, why));
            Ok(Largest { value, other_failure, unknown_values: most_unknown.get() })
        }
    }
}

impl Trials {
    /// Returns what the program needs, with the smallest card on which it succeeds.
    fn row(&self, environment: &str, outcome: Outcome) -> Result<AnswerRow, Failure> {
        let Outcome { most, enough, rejected, unknown_values, failed } = outcome;
        let most_bytes = failed.is_none().then_some(most);
        let environment_name = environment.to_owned();
        let mut row = AnswerRow {
            environment: environment_name,
            most_bytes,
            rejected,
            unknown_values,
            failed,
            ..AnswerRow::default()
        };
        if row.failed.is_some() {
            return Ok(row);
        }
        let fits = |card| Ok(self.run(environment, Bytes::new(card))?.failed.is_none());
        row.smallest_card_bytes = Some(smallest(CONTEXT.get().min(enough / 2), enough, |card| card / PRECISION, fits)?);
        Ok(row)
    }
}
