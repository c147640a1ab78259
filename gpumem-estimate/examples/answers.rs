//! Prints what an estimate says of a training step of GPT-2, and what changes would save.

use gpumem_estimate::{Optimizer, Step, models};

fn main() -> Result<(), gpumem_estimate::Error> {
    let model = models::gpt2(512);
    let step = Step::training(8, Optimizer::Adam);
    println!("{}\n", step.estimate(&model)?);
    println!("{}", step.savings(&model)?);
    Ok(())
}
