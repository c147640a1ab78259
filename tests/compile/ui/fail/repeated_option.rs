use gpumem::gpu_mem_trace;

#[gpu_mem_trace(ctx = "a", ctx = "b")]
fn ctx() {}

#[gpu_mem_trace(silent, silent = false)]
fn silent() {}

#[gpu_mem_trace(crate = gpumem, crate = gpumem)]
fn path() {}

fn main() {
    ctx();
    silent();
    path();
}
