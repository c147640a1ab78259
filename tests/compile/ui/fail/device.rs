use gpumem::gpu_mem_trace;

#[gpu_mem_trace(device = -1)]
fn negative() {}

#[gpu_mem_trace(device = 4294967296)]
fn too_large() {}

#[gpu_mem_trace(device = "cuda:0")]
fn string() {}

#[gpu_mem_trace(device = 0.5)]
fn fraction() {}

#[gpu_mem_trace(device)]
fn alone() {}

fn main() {
    negative();
    too_large();
    string();
    fraction();
    alone();
}
