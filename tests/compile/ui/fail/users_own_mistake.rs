use gpumem::gpu_mem_trace;

// The compiler reports an error of the user's code at the user's code.

#[gpu_mem_trace]
fn wrong_type() -> u32 {
    "forward"
}

#[gpu_mem_trace]
fn no_value() -> u32 {
    let _ = 1;
}

#[gpu_mem_trace]
async fn wrong_type_async() -> u32 {
    "forward"
}

#[gpu_mem_trace]
fn dangling<'a>() -> &'a str {
    let text = String::new();
    &text
}

fn main() {
    wrong_type();
    no_value();
    drop(wrong_type_async());
    dangling();
}
