use gpumem::gpu_mem_trace;

#[gpu_mem_trace]
/// Documented.
#[derive(Default)]
pub struct Model;

#[gpu_mem_trace]
trait Layer {}

#[gpu_mem_trace]
mod layers {}

#[gpu_mem_trace]
const LIMIT: u32 = 1;

impl Layer for Model {}

fn main() {
    fn is_layer(_: impl Layer) {}
    is_layer(Model::default());
    assert_eq!(LIMIT, 1);
}
