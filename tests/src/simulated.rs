//! Creates a simulated device for one of many tests in a process.

use std::cell::RefCell;

use gpumem::{Bytes, report::Report, sim::SimGpu, sink::Sink};

thread_local! {
    static REPORTS: RefCell<Vec<Report>> = const { RefCell::new(Vec::new()) };
}

fn keep_reports() {
    gpumem::sink::set_sink(Sink::custom(|output| match output.report() {
        Some(report) => REPORTS.with_borrow_mut(|reports| reports.push(report.clone())),
        None => eprintln!("{output}"),
    }));
}

/// Creates a simulated device for the calling test only, and makes it current on its thread. Reports are not printed: [`reported_lines`]
/// returns them.
///
/// # Panics
/// Panics under `GPUMEM_SIM`.
pub fn simulated_gpu() -> SimGpu {
    keep_reports();
    let gpu = SimGpu::install(Bytes::gib(64)).expect("GPUMEM_SIM is not set");
    gpumem::intercept::subscribe().expect("simulated devices report their allocations");
    gpu
}

/// Returns the reports of the calling thread since the last call.
pub fn reported_lines() -> Vec<String> {
    REPORTS.take().iter().map(Report::to_string).collect()
}

/// Returns the reports of the calling thread while `run` runs.
pub fn reports_of<T>(run: impl FnOnce() -> T) -> Vec<Report> {
    keep_reports();
    REPORTS.take();
    drop(run());
    REPORTS.take()
}
