use gpumem::{gpu_mem_test, sim::SimGpu};

#[gpu_mem_test(max_peak = "512 parsecs")]
fn no_unit() {}

#[gpu_mem_test(leaks = "2 MB")]
fn blocks() {}

#[gpu_mem_test(fail_on_increase = "5")]
fn no_percent() {}

#[gpu_mem_test(baseline = 5)]
fn no_file() {}

#[gpu_mem_test(max_peek = 5)]
fn unknown() {}

#[gpu_mem_test(leaks = 0, leaks = 0)]
fn twice() {}

#[gpu_mem_test]
async fn no_runtime() {}

#[gpu_mem_test]
fn two(_one: &SimGpu, _two: &SimGpu) {}

#[gpu_mem_test]
const fn constant() {}

#[gpu_mem_test]
struct NoFunction;

fn main() {
    no_unit();
    blocks();
    no_percent();
    no_file();
    unknown();
    twice();
    let _ = (no_runtime, two, NoFunction);
    constant();
}
