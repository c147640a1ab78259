use gpumem::gpu_mem_trace;

struct Model;

#[gpu_mem_trace(silent, ctx = "model")]
impl Model {
    fn forward(&self) {}
}

fn main() {
    Model.forward();
}
