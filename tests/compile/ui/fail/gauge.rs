use gpumem::gpu_mem_trace;

#[gpu_mem_trace(gauge = "precise")]
fn unknown() {}

#[gpu_mem_trace(gauge = "Exact")]
fn capital() {}

#[gpu_mem_trace(gauge = exact)]
fn word() {}

#[gpu_mem_trace(gauge)]
fn alone() {}

fn main() {
    unknown();
    capital();
    word();
    alone();
}
