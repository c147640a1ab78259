//! Prints the largest batches of a training step with `AdamW` that fit, and ones that are 10 % larger, as `measure/fit.py` reads them:
//!
//! ```sh
//! python3 fit.py --remain 16 $(cargo run --release -p gpumem-estimate --example fit -- 16GiB gpt2 vit-b)
//! ```

use gpumem_core::model::Bytes;
use gpumem_estimate::{ContextSize, Dtype, Model, Optimizer, Step, models};

/// A batch should run although an estimate is not exact: this part of the memory is left free, in percent.
const MARGIN: u64 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let remains: Bytes = arguments.next().ok_or("the first argument is what remains, such as 16GiB")?.parse()?;
    let context = ContextSize::measured((9, 0)).ok_or("the context was measured")?.high;
    let limit = remains.checked_sub(context).ok_or("the CUDA context alone needs more")?;
    let limit = Bytes::new(limit.get() / 100 * (100 - MARGIN));
    for name in arguments {
        let (model_name, precision) = name.split_once('/').unwrap_or((&name, "fp32"));
        let model: Model = match model_name {
            "gpt2" => models::gpt2(512),
            "vit-b" => models::vit_b_16(),
            "resnet50" => models::resnet50(),
            _ => return Err(format!("`{model_name}` is not a model of this example").into()),
        };
        let step = Step {
            autocast: (precision == "bf16").then_some(Dtype::Bf16),
            limit: Some(limit),
            ..Step::training(1, Optimizer::Adam)
        };
        let batch = step.largest_batch(&model)?;
        println!("{name}={batch},{}", (batch * 11).div_ceil(10));
    }
    Ok(())
}
