//! Tests the output of a program with filters. The program runs 1,000 steps and has the attribute on each layer. The expected
//! output is in the files `*.txt` next to this one, which `UPDATE=1` writes.

use std::{env, fs, path::Path};

use gpumem::{Bytes, gpu_mem_trace, sim::SimGpu};
use gpumem_tests::{OwnProcess, part};

const STEPS: u64 = 1000;

/// Allocates this amount of memory and frees it immediately.
fn need(gpu: &SimGpu, mib: u64) {
    drop(gpu.alloc(Bytes::mib(mib)).expect("there is room"));
}

mod model {
    use super::{SimGpu, gpu_mem_trace, need};

    #[gpu_mem_trace]
    pub(crate) fn embed(gpu: &SimGpu) {
        need(gpu, 8);
    }

    /// Every 250th sequence is long.
    #[gpu_mem_trace]
    pub(crate) fn attention(gpu: &SimGpu, step: u64) {
        need(gpu, if step % 250 == 249 { 512 } else { 64 });
    }

    #[gpu_mem_trace]
    pub(crate) fn head(gpu: &SimGpu) {
        need(gpu, 16);
    }
}

#[gpu_mem_trace]
fn step(gpu: &SimGpu, step: u64) {
    model::embed(gpu);
    model::attention(gpu, step);
    model::head(gpu);
}

#[gpu_mem_trace]
fn train(gpu: &SimGpu) {
    (0..STEPS).for_each(|number| step(gpu, number));
}

/// `filters_leave_what_matters` runs this test in separate processes.
#[test]
fn program() {
    if part().is_some() {
        train(&SimGpu::install(Bytes::gib(16)).expect("there is no other device"));
    }
}

fn printed(filter: &str) -> String {
    let process = OwnProcess::new("program").part("train").env("GPUMEM", filter).env("GPUMEM_REPORT", "stderr");
    process.passes().stderr.lines().map(without_time).collect()
}

/// Removes the time of the worst call at the end of a row of statistics.
fn without_time(line: &str) -> String {
    match line.strip_suffix(" s").and_then(|line| line.rsplit_once(' ')) {
        Some((rest, _)) => format!("{rest} N s\n"),
        None => format!("{line}\n"),
    }
}

#[test]
fn filters_leave_what_matters() {
    assert_eq!(printed("").lines().count(), 4001);
    for (name, filter) in [
        ("every", "every=250"),
        ("large", "train=lines,attention>=256MiB"),
        ("layers-off", "model=off"),
        ("stats", "stats"),
        ("bad", "model=off,step>=10,every=none"),
    ] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sim_output").join(name).with_extension("txt");
        let text = printed(filter);
        if env::var_os("UPDATE").is_some() {
            fs::write(&file, &text).expect("the tests run in a checkout");
        }
        assert_eq!(text, fs::read_to_string(&file).expect("it is text"), "{filter}");
    }
}
