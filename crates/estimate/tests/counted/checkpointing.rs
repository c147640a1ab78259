//! Tests checkpointing. The live bytes are counted by hand.

use gpumem_estimate::{Checkpointing, Input, Layer, Loss, Model, Optimizer, Step, numbered};

use super::{exact, linear};

fn step(checkpointing: Checkpointing) -> Step {
    exact(Step { checkpointing, ..Step::training(10, Optimizer::Sgd) })
}

/// The blocks are next to the head of a language model, which is not in a block. The input of the head lives until the loss is
/// computed.
#[test]
fn blocks_keep_their_inputs() {
    let block = || Layer::Block { layers: numbered([linear(8, 8), linear(8, 8)]) };
    let layers = numbered([Layer::Embedding { rows: 16, size: 8 }, block(), block(), block(), linear(8, 16)]);
    let model = Model { name: "tokens".to_owned(), input: Input::Tokens(100), layers, loss: Loss::NextToken };
    let peak = |checkpointing| step(checkpointing).estimate(&model).unwrap().phases[0].peak.get();
    let output = 10 * 100 * 8 * 4;
    // Each of the three blocks keeps two inputs without checkpointing, and one input with it. The head always keeps its own
    // input.
    assert_eq!(peak(Checkpointing::Off) - peak(Checkpointing::Blocks), 3 * output);
}
