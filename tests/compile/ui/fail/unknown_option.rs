use gpumem::gpu_mem_trace;

#[gpu_mem_trace(ctx = "step", name = "forward", silent)]
fn forward() {}

#[gpu_mem_trace(r#ctx = "step")]
fn raw() {}

struct Model;

#[gpu_mem_trace(loud)]
impl Model {
    #[gpu_mem_trace(quiet)]
    fn forward(&self) {}
}

fn main() {
    forward();
    raw();
    Model.forward();
}
