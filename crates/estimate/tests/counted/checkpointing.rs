//! Tests checkpointing. The live bytes are counted by hand.

use gpumem_estimate::{Checkpointing, Estimate, Input, Layer, Loss, Model, Named, Optimizer, Step, models, numbered};

use super::{classifier, exact, linear, phases};

const BATCH: u64 = 1000;
/// The output of each layer.
const OUTPUT: u64 = BATCH * 50 * 4;
const WEIGHT: u64 = 50 * 50 * 4;

/// 16 linear layers without a bias, each of which keeps its input.
fn chain() -> Vec<Named> {
    numbered((0..16).map(|_| linear(50, 50)))
}

fn step(checkpointing: Checkpointing) -> Step {
    exact(Step { checkpointing, ..Step::training(BATCH, Optimizer::Sgd) })
}

/// Returns the bytes that the forward and the backward pass add to weights, input and labels.
fn added(estimate: &Estimate) -> [u64; 2] {
    let constant = 16 * WEIGHT + OUTPUT + BATCH * 8;
    ["forward", "backward"].map(|name| phases(estimate, name)[0] - constant)
}

fn of(checkpointing: Checkpointing) -> [u64; 2] {
    added(&step(checkpointing).estimate(&classifier(50, chain())).unwrap())
}

#[test]
fn segments_keep_their_inputs() {
    // These are live: the outputs of the layers 0 to 14, which the next layer keeps; the logits and the logarithms of the probabilities;
    // the loss and its total weight. The backward pass of the logarithms has two gradients, and the logits are free; the loss and its
    // gradient are live.
    assert_eq!(of(Checkpointing::Off), [17 * OUTPUT + 8, 18 * OUTPUT + 8]);
    // There are four segments of four layers. Their inputs are the model's input and the outputs 3, 7 and 11. The last segment keeps the
    // outputs 12, 13 and 14 as well.
    assert_eq!(of(Checkpointing::SquareRoot), [8 * OUTPUT + 8, 9 * OUTPUT + 8]);
    assert_eq!(of(Checkpointing::Segments(4)), of(Checkpointing::SquareRoot));
    // The last segment runs again as well. It keeps its input alone, so that the forward pass ends with the outputs 3, 7, 11, the
    // logits and the logarithms. In the backward pass of the last layer, the outputs 12 to 14 are there again, with the gradients of
    // its output, of its input and of its weight.
    assert_eq!(of(Checkpointing::Every(4)), [5 * OUTPUT + 8, 8 * OUTPUT + WEIGHT + 8]);
    // The segments are the layers 0 to 4, 5 to 9, 10 to 14, and 15. The outputs 4, 9 and 14, the logits and the logarithms are live. The
    // highest moment is when layer 14 runs backward: then the gradient of layer 15's output is there; the outputs 10 to 13 again, the
    // outputs 4 and 9, two gradients.
    assert_eq!(of(Checkpointing::Every(5)), [5 * OUTPUT + 8, 8 * OUTPUT + 2 * WEIGHT + 8]);
}

#[test]
fn layers_with_a_name() {
    let group = |layers: &[Named]| Layer::Sequential { layers: layers.to_vec() };
    let chain = chain();
    let halves = classifier(50, vec![group(&chain[..8]).named("first"), group(&chain[8..]).named("second")]);
    let of = |names| {
        let checkpointing = Checkpointing::Layers(names);
        step(checkpointing).estimate(&halves).map(|estimate| added(&estimate)[0])
    };
    // The first half keeps its input alone. The second half keeps the outputs 7 to 14; the logits and the logarithms.
    assert_eq!(of(["first"].into()).unwrap(), 10 * OUTPUT + 8);
    assert_eq!(
        of(["f*"].into()).unwrap(),
        10 * OUTPUT + 8,
        "what is inside of a layer that runs again changes nothing"
    );
    assert_eq!(of(["first", "second"].into()).unwrap(), 3 * OUTPUT + 8);
    // A layer keeps its input whether it runs again or not.
    assert_eq!(of(["first.3"].into()).unwrap(), 17 * OUTPUT + 8);
    assert_eq!(of(["third"].into()).unwrap_err().to_string(), "checkpointing: no layer has the name `third`");
}

#[test]
fn blocks_alone_are_units_where_there_are_some() {
    let model = models::gpt2(64);
    let forward = |checkpointing| {
        let step = Step { batch: 8, ..step(checkpointing) };
        step.estimate(&model).unwrap().phases[0].peak.get()
    };
    let (blocks, every) = (forward(Checkpointing::Blocks), forward(Checkpointing::Every(1)));
    assert_eq!(blocks, every);
    // 12 blocks keep 12 inputs, or 3 of them.
    assert_eq!(forward(Checkpointing::Every(4)), blocks - 9 * 8 * 64 * 768 * 4);
}

/// The blocks are beside the head of a language model, which runs by itself: its input lives until the loss is there.
#[test]
fn groups_of_the_outermost_layers() {
    let block = || Layer::Block { layers: numbered([linear(8, 8), linear(8, 8)]) };
    let layers = numbered([Layer::Embedding { rows: 16, size: 8 }, block(), block(), block(), linear(8, 16)]);
    let model = Model { name: "tokens".to_owned(), input: Input::Tokens(100), layers, loss: Loss::NextToken };
    let peak = |checkpointing| {
        let step = Step { batch: 10, ..step(checkpointing) };
        step.estimate(&model).unwrap().phases[0].peak.get()
    };
    let output = 10 * 100 * 8 * 4;
    // Three blocks keep two inputs each; two groups keep one input each. The head keeps its own.
    assert_eq!(peak(Checkpointing::Off) - peak(Checkpointing::Every(2)), 4 * output);
    assert_eq!(peak(Checkpointing::Off) - peak(Checkpointing::Blocks), 3 * output);
}

#[test]
fn what_makes_no_sense_is_an_error() {
    let error = |checkpointing| step(checkpointing).estimate(&classifier(50, chain())).unwrap_err().to_string();
    assert_eq!(error(Checkpointing::Blocks), "the model has no blocks that checkpointing could run again");
    assert_eq!(error(Checkpointing::Every(0)), "checkpointing of every 0 blocks makes no sense");
    assert_eq!(error(Checkpointing::Segments(0)), "checkpointing with 0 segments makes no sense");
    // A measurement showed this: the seventh segment of VGG19 would begin with a convolution, but the fourth one begins with
    // `relu` in place, and PyTorch's backward pass fails with "modified by an inplace operation".
    let error = step(Checkpointing::SquareRoot).estimate(&models::vgg19()).unwrap_err();
    assert_eq!(error.layer(), "features.15");
    assert!(error.to_string().contains("it overwrites its input, which checkpointing keeps"), "{error}");
}

#[test]
fn a_step_is_read_from_json() {
    let step: Step = serde_json::from_str(r#"{"batch": 8, "optimizer": "adam", "checkpointing": "blocks"}"#).unwrap();
    assert_eq!(step, Step { checkpointing: Checkpointing::Blocks, ..Step::training(8, Optimizer::Adam) });
    let step: Step = serde_json::from_str(r#"{"checkpointing": {"layers": ["h.*"]}, "parameters": "bf16"}"#).unwrap();
    assert_eq!(step.checkpointing, Checkpointing::Layers(["h.*"].into()));
    assert_eq!(serde_json::from_str::<Step>(&serde_json::to_string(&step).unwrap()).unwrap(), step);
    let error = serde_json::from_str::<Step>(r#"{"bach": 8}"#).unwrap_err().to_string();
    assert!(error.starts_with("unknown field `bach`"), "{error}");
}
