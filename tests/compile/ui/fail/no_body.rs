use gpumem::gpu_mem_trace;

trait Layer {
    #[gpu_mem_trace]
    fn forward(&self);
}

struct Model;

impl Layer for Model {
    fn forward(&self) {}
}

fn main() {
    Model.forward();
}
