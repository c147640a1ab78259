//! What only a GPU can show.

use std::{
    env,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::Machines;

/// `None`, and a line that says so, unless `GPUMEM_DEVICE` is set. One test of a process at a time: each sees the whole device.
pub fn device() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    if env::var_os("GPUMEM_DEVICE").is_none() {
        println!("skipped: no device (GPUMEM_DEVICE=1 switches this test on)");
        return None;
    }
    Some(ONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Where no device is used, all tests of this executable are run once more on two of the stand-in driver, with each source of exact
/// figures, but for these, which need more than it has.
///
/// # Panics
/// When one of them fails.
pub fn on_the_standin(but_for: &[&str]) {
    if env::var_os("GPUMEM_DEVICE").is_some() {
        return;
    }
    let itself = env::current_exe().expect("a test has a path");
    let mut arguments = vec!["--test-threads=1"];
    arguments.extend(but_for.iter().flat_map(|test| ["--skip", test]));
    let machines = Machines::heard().devices(2).env("GPUMEM_DEVICE", "1").limit(Duration::from_secs(300));
    for machine in machines.all() {
        let outcome = machine.run_program(&itself, &arguments);
        assert!(outcome.succeeded() && outcome.stdout.contains("test result: ok."), "{outcome}");
        println!("{}", outcome.stdout);
    }
}
