use gpumem::gpu_mem_trace;

#[gpu_mem_trace(lines = 3)]
fn number() {}

#[gpu_mem_trace(lines, lines)]
fn twice() {}

#[gpu_mem_trace(lines)]
fn users_own() -> u32 {
    let text = String::new();
    text
}

fn main() {
    number();
    twice();
    users_own();
}
