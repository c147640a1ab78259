use gpumem::gpu_mem_trace;

#[gpu_mem_trace(crate = "gpumem")]
fn string() {}

#[gpu_mem_trace(crate)]
fn alone() {}

fn main() {
    string();
    alone();
}
