#![forbid(unsafe_code, clippy::all, clippy::pedantic, unused, nonstandard_style, future_incompatible)]
#![deny(warnings, missing_docs, rust_2018_idioms, unused_qualifications, unreachable_pub, let_underscore_drop)]
//! The guard needs no `#[allow]`, which a `forbid` would refuse.

use gpumem::gpu_mem_trace;

struct Model;

#[gpu_mem_trace]
impl Model {
    fn forward(&self) -> u32 {
        1
    }

    async fn forward_async(&self) -> u32 {
        1
    }
}

#[gpu_mem_trace(ctx = "step", silent, on_exit_report = false, device = 0, gauge = "off")]
fn step() -> u32 { 1 }

fn main() {
    assert_eq!(step() + Model.forward(), 2);
    drop(Model.forward_async());
}
