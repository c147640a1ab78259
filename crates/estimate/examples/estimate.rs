//! Prints the needs of a training step before it runs: the peak, the largest batch that fits, and the savings of
//! changes.
//!
//! `cargo run -p gpumem-estimate --example estimate`

use gpumem_estimate::{Bytes, Error, Model, Optimizer, Step};

/// The `config.json` of a model. Missing fields have their defaults.
const CONFIG: &str = r#"{"model_type": "gpt2"}"#;

fn main() -> Result<(), Error> {
    let model = Model::from_config(CONFIG, 512)?;
    let step = Step { limit: Some(Bytes::gib(15)), ..Step::training(8, Optimizer::Adam) };
    println!("{}\n", step.estimate(&model)?);
    println!("{}\n", step.savings(&model)?);
    println!("the largest batch of 512 tokens for {}: {}", Bytes::gib(15), step.largest_batch(&model)?);
    println!("the longest sequences with a batch of 8 for {}: {}", Bytes::gib(15), step.largest_length(&model)?);
    Ok(())
}
