//! Measures each round of a loop: with `reset`, and with `report_n_reset`, which reports and resets in one reading.
//!
//! `cargo run --example loop_reset`

use std::{thread, time::Duration};

use gpumem::{Bytes, GpuMemTrace};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let mut kept = Vec::new();
    let mut some_code = |i: u64| -> Result<()> {
        let _scratch = gpu.alloc(Bytes::mib(32 * (i + 1)))?;
        if i.is_multiple_of(2) {
            kept.push(gpu.alloc(Bytes::mib(8))?);
        }
        thread::sleep(Duration::from_millis(10));
        Ok(())
    };

    let mut trace = GpuMemTrace::builder().on_exit_report(false).start()?;
    for i in 0..3 {
        trace.reset();
        some_code(i)?;
        trace.report_with(format!("i={i}"));
    }

    trace.reset();
    for i in 3..6 {
        some_code(i)?;
        trace.report_n_reset_with(format!("i={i}"));
    }

    // After `stop`, the numbers do not change. `data()` returns them.
    some_code(6)?;
    trace.stop();
    some_code(8)?;
    let data = trace.data();
    println!("{} bytes used, {} peaked, gauge {}", data.used.get(), data.peaked.get(), data.gauge);
    Ok(())
}
