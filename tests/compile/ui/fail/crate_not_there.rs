#[gpumem::gpu_mem_trace(crate = elsewhere::gpumem, gauge = "exact")]
fn nowhere() {}

fn main() {
    nowhere();
}
