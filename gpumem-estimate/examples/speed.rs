//! Prints how long estimates take: a training step of a model with 100,000 layers, and of a Llama with 70 B parameters. Run it with
//! `--release`.

use std::time::Instant;

use gpumem_estimate::{Input, Layer, Loss, Model, Optimizer, Shape, Step, models::Transformer, numbered};

fn main() -> Result<(), gpumem_estimate::Error> {
    let layers = (0..50_000).flat_map(|_| [Layer::linear(4, 4), Layer::relu(false)]);
    let input = Input::Numbers(Shape::from([4]));
    let deep = Model { name: "100,000 layers".to_owned(), input, layers: numbered(layers), loss: Loss::CrossEntropy };
    let sizes = Transformer {
        vocabulary: 128_256,
        size: 8192,
        blocks: 80,
        heads: 64,
        key_value_heads: 8,
        hidden: 28_672,
        positions: 0,
        dropout: 0.0,
    };
    for model in [deep, sizes.llama("70 B", 2048, false)] {
        let began = Instant::now();
        let estimate = Step::training(1, Optimizer::Adam).estimate(&model)?;
        println!("{}: {} in {:?}", model.name, estimate.peak, began.elapsed());
    }
    Ok(())
}
