use gpumem::gpu_mem_trace;

#[gpu_mem_trace(silent = "yes")]
fn string() {}

#[gpu_mem_trace(on_exit_report = 0)]
fn number() {}

#[gpu_mem_trace(skip(self))]
fn parentheses() {}

#[gpu_mem_trace(stats = 1)]
fn counted() {}

fn main() {
    counted();
    string();
    number();
    parentheses();
}
