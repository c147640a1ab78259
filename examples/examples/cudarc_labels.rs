//! Labels for cudarc's slices, which know their element type and size. Needs a CUDA device; `mem_tracker` does not.
//!
//! `cargo run --example cudarc_labels`

use gpumem::{
    cudarc::{AllocLabelledExt, LabelExt},
    track,
    tracker::MemTracker,
};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    let Gpu::Cuda(context) = Gpu::open()? else {
        println!("cudarc allocates on CUDA devices only");
        return Ok(());
    };
    let stream = context.default_stream();
    let mut tracker = MemTracker::new();
    track!(tracker);

    let kernel = stream.alloc_labelled::<f32>("conv1.weight", &[512, 512, 3, 3])?;
    let input = stream.clone_htod(&vec![1_u8; 3 * 224 * 224])?.labelled("input", &[3, 224, 224]);
    let _scratch = stream.alloc_zeros::<f64>(1 << 20)?; // no label: it is listed by its size
    track!(tracker);

    drop((kernel, input));
    track!(tracker);
    Ok(())
}
