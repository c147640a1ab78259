//! Helpers for tests on a GPU.

use std::{
    env,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use gpumem::intercept::{subscribe, unsubscribe};
use gpumem_driver::source::compare_sources::calls_of_both_sources;

use crate::Standin;

/// Returns a lock that lets only one test of a process run at a time, because each test sees the whole device. Returns `None` and prints a
/// line unless `GPUMEM_DEVICE` is set.
pub fn device() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    if env::var_os("GPUMEM_DEVICE").is_none() {
        crate::skipped("no GPU (GPUMEM_DEVICE=1 switches this test on)");
        return None;
    }
    Some(ONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// If no device is used, runs all tests of this executable once more on two devices of the stand-in driver, with each source of exact
/// values. The tests in `but_for`, which need more than the stand-in driver has, are left out.
///
/// # Panics
/// Panics if one of them fails.
pub fn on_the_standin(but_for: &[&str]) {
    if env::var_os("GPUMEM_DEVICE").is_some() {
        return;
    }
    let itself = env::current_exe().expect("a test has a path");
    // The function below runs this test.
    let mut arguments = vec!["--test-threads=1", "--skip", BOTH_SOURCES_TEST];
    arguments.extend(but_for.iter().flat_map(|test| ["--skip", test]));
    let machine = Standin::new().devices(2).env("GPUMEM_DEVICE", "1").limit(Duration::from_secs(300));
    let machines = machine.with_each_source();
    // The tests wait most of the time.
    let outcomes: Vec<_> = thread::scope(|threads| {
        let mut running = Vec::new();
        for machine in machines.all() {
            running.push(threads.spawn(|| machine.run_program(&itself, &arguments)));
        }
        running.into_iter().map(|one| one.join().expect("it does not panic")).collect()
    });
    for outcome in outcomes {
        let has_run_all = outcome.stdout.contains("test result: ok.") && !outcome.stderr.contains("skipped: ");
        assert!(outcome.succeeded() && has_run_all, "{outcome}");
        println!("{}", outcome.stdout);
    }
}

const BOTH_SOURCES: &str = "both sources";
const BOTH_SOURCES_TEST: &str = "both_sources_report_the_same";

/// If no device is used, runs the test `both_sources_report_the_same` of this executable once more, on this stand-in driver.
///
/// # Panics
/// Panics if the test fails, or has compared nothing.
pub fn on_the_standin_with_both_sources(machine: Standin) {
    if env::var_os("GPUMEM_DEVICE").is_some() {
        return;
    }
    let itself = env::current_exe().expect("a test has a path");
    let machine = machine.dispatch().cupti().env("GPUMEM_DEVICE", BOTH_SOURCES);
    let outcome = machine.run_program(&itself, &["--exact", BOTH_SOURCES_TEST, "--nocapture"]);
    assert!(outcome.succeeded() && outcome.stdout.contains("both sources recorded "), "{outcome}");
    println!("{}", outcome.stdout);
}

/// Returns the dispatch table's and CUPTI's reports about the same calls. If one of them cannot be used, this function prints the
/// reason and returns `None`.
///
/// # Panics
/// Panics on the stand-in driver with both sources, if one of them cannot be used.
pub fn reported_by_both(program: impl FnOnce()) -> Option<[Vec<String>; 2]> {
    unsubscribe();
    let reported = calls_of_both_sources(program);
    subscribe().expect("allocations can be intercepted");
    reported
        .inspect_err(|error| {
            assert_ne!(env::var("GPUMEM_DEVICE").as_deref(), Ok(BOTH_SOURCES), "{error}");
            crate::skipped(format_args!("no two sources: {error}"));
        })
        .ok()
}

/// Collects all errors and fails at the end: GPU time is rare, so one run must show all of them.
#[derive(Debug, Default)]
pub struct Mismatches(Vec<String>);

impl Mismatches {
    /// Adds an error.
    pub fn record(&mut self, result: Result<(), String>) {
        self.0.extend(result.err());
    }

    /// Adds an error unless the condition is true.
    pub fn record_unless(&mut self, right: bool, what: impl FnOnce() -> String) {
        self.record(if right { Ok(()) } else { Err(what()) });
    }

    /// Returns the number of errors.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// # Panics
    /// Panics if there was an error.
    #[track_caller]
    pub fn assert_none(self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}
