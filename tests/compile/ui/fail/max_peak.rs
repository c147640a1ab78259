use gpumem::gpu_mem_trace;

#[gpu_mem_trace(max_peak = "512 parsecs")]
fn no_unit() {}

#[gpu_mem_trace(max_peak = "100")]
fn bytes_or_mb() {}

#[gpu_mem_trace(max_peak = "-1 MB")]
fn negative() {}

#[gpu_mem_trace(max_peak = 1.5)]
fn decimal() {}

#[gpu_mem_trace(max_peak)]
fn alone() {}

#[gpu_mem_trace(max_peak = "1 MB", gauge = "sampled")]
fn not_exact() {}

#[gpu_mem_trace(thread_local, gauge = "off")]
fn one_thread() {}

fn main() {
    no_unit();
    bytes_or_mb();
    negative();
    decimal();
    alone();
    not_exact();
}
