//! Tests the items that `#[gpu_mem_trace]` accepts, and the output of each use.
//!
//! The attribute must cause no warning in the strictest crate, so this crate denies all warnings and the pedantic lints.
#![deny(warnings, clippy::pedantic)]
#![forbid(unsafe_code)]

mod amounts;
mod functions;
mod futures;
mod impl_blocks;
mod methods;
mod options;
mod results;
mod shadowed;

use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::task::{Context, Waker};

use gpumem::sim::{SimBlock, SimGpu};
use gpumem::{Bytes, Gauge, gpu_mem_trace, report::Report};
use gpumem_tests::{Yield, reports_of};
use pollster::block_on;

/// Returns the simulated devices 0 and 1.
fn gpus() -> &'static [SimGpu; 2] {
    static GPUS: OnceLock<[SimGpu; 2]> = OnceLock::new();
    let install = || [0, 1].map(|_| SimGpu::install(Bytes::gib(1)).expect("no GPUMEM_SIM in the environment"));
    // A device becomes the current one of the thread that installs it. The thread that does this here ends, so device 0 stays the
    // current device of all tests.
    GPUS.get_or_init(|| std::thread::spawn(install).join().expect("it does not panic"))
}

/// Returns the reports of this thread while `run` ran. Only one test runs at a time, because a trace also counts the threads that
/// are in no scope.
fn reports<T>(run: impl FnOnce() -> T) -> Vec<Report> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    gpus();
    reports_of(run)
}

fn lines<T>(run: impl FnOnce() -> T) -> Vec<String> {
    reports(run).iter().map(ToString::to_string).collect()
}

/// Returns the line of a trace's exit. The lines of nested traces are indented, as their contexts are in this list.
fn exit(ctx: &str) -> String {
    let name = ctx.trim_start();
    format!("△Used Peaked MB:      0      0{} ({name}: exit)", &ctx[..ctx.len() - name.len()])
}

/// Checks that `run` prints one line for each of `contexts`, in this order.
#[track_caller]
fn check<const N: usize, T>(run: impl FnOnce() -> T, contexts: [&str; N]) {
    assert_eq!(lines(run), contexts.map(exit));
}

mod gpumem_here {
    pub(super) use ::gpumem as renamed;
}
