//! Prints how long estimates take: inference and training with a model of 100,000 layers, and with a Llama of 70 B parameters. Run it
//! with `--release`.

use std::time::Instant;

use gpumem_estimate::{Input, Layer, Loss, Model, Optimizer, Shape, Step, numbered};

fn main() -> Result<(), gpumem_estimate::Error> {
    let layers = (0..50_000).flat_map(|_| [Layer::linear(4, 4), Layer::relu(false)]);
    let input = Input::Numbers(Shape::from([4]));
    let deep = Model { name: "100,000 layers".to_owned(), input, layers: numbered(layers), loss: Loss::CrossEntropy };
    let config = r#"{
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8
    }"#;
    let began = Instant::now();
    let llama = Model { name: "70 B".to_owned(), ..Model::from_config(config, 2048)? };
    println!("its layers: {:?}", began.elapsed());
    for model in [deep, llama] {
        for (what, step) in [("inference", Step::inference(1)), ("training", Step::training(1, Optimizer::Adam))] {
            let began = Instant::now();
            let estimate = step.estimate(&model)?;
            println!("{}, {what}: {} in {:?}", model.name, estimate.peak, began.elapsed());
        }
    }
    Ok(())
}
