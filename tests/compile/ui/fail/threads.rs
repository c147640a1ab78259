use gpumem::{assert_gpu_mem, gpu_mem_test, gpu_mem_trace};

#[gpu_mem_trace(max_peak = "1 MB", threads = "own")]
fn another_value() {}

#[gpu_mem_trace(max_peak = "1 MB", threads = "all", thread_local)]
fn all_and_one() {}

#[gpu_mem_test(max_peak = "1 MB", threads)]
fn alone() {}

fn main() {
    another_value();
    all_and_one();
    assert_gpu_mem!(threads == "all", peak == 0, {});
    assert_gpu_mem!(peak < "100", {});
}
