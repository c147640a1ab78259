//! A simulated device for one test of many in a process.

use std::cell::RefCell;

use gpumem::{Bytes, sim::SimGpu, sink::Sink};

thread_local! {
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// A simulated device of its own for the calling test, current on its thread. Reports are not printed: [`reported_lines`] has them.
///
/// # Panics
/// Under `GPUMEM_SIM`.
pub fn simulated_gpu() -> SimGpu {
    gpumem::sink::set_sink(Sink::custom(|output| match output.report() {
        Some(report) => LINES.with_borrow_mut(|lines| lines.push(report.to_string())),
        None => eprintln!("{output}"),
    }));
    let gpu = SimGpu::install(Bytes::gib(64)).expect("GPUMEM_SIM is not set");
    gpumem::intercept::subscribe().expect("simulated devices report their allocations");
    gpu
}

/// What the calling thread reported since the last call.
pub fn reported_lines() -> Vec<String> {
    LINES.take()
}
