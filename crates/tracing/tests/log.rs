//! Tests that the events go to the crate `log` if there is no subscriber and the feature `log` of `tracing` is enabled.

use std::sync::Mutex;

use gpumem::{Bytes, GpuMemTrace, sim::SimGpu, sink::set_sink};
use log::{LevelFilter, Log, Metadata, Record};

static RECORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Logger;

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        RECORDS.lock().unwrap().push(format!("{} {} {}", record.target(), record.level(), record.args()));
    }

    fn flush(&self) {}
}

#[test]
fn output_goes_to_the_crate_log() {
    log::set_logger(&Logger).unwrap();
    log::set_max_level(LevelFilter::Info);
    set_sink(gpumem_tracing::sink());
    SimGpu::install(Bytes::gib(1)).unwrap();
    GpuMemTrace::with_ctx("epoch").report();
    let records = RECORDS.lock().unwrap();
    let notice = records.iter().any(|record| record.starts_with("gpumem WARN ") && record.contains("simulated GPU"));
    assert!(notice, "{records:?}");
    let line = "gpumem INFO △Used Peaked MB:      0      0 (epoch)";
    assert!(records.iter().any(|record| record.starts_with(line) && record.contains("ctx=\"epoch\"")), "{records:?}");
}
