#![forbid(unsafe_code, clippy::all, clippy::pedantic, unused, nonstandard_style, future_incompatible)]
#![deny(warnings, missing_docs, rust_2018_idioms, unused_qualifications, unreachable_pub, let_underscore_drop)]
//! The guard needs no `#[allow]`, which a `forbid` would reject.

use gpumem::gpu_mem_trace;

struct Model(u32);

#[gpu_mem_trace]
impl Model {
    fn forward(&self) -> u32 {
        self.0
    }

    async fn forward_async(&self) -> u32 {
        self.0
    }
}

#[gpu_mem_trace(ctx = "step", silent, on_exit_report = false, device = 0, gauge = "off")]
fn step() -> u32 {
    1
}

fn main() {
    let model = Model(1);
    assert_eq!(step() + model.forward(), 2);
    drop(model.forward_async());
}
