//! Tests estimates of small steps without the rounding of an allocator. The live bytes are counted by hand.

mod adapters;
mod decode;
mod layers;
mod optimizers;
mod parallel;
mod steps;

use gpumem_estimate::{AllocatorKind, Class, Estimate, Input, Layer, Linear, Loss, Model, Named, Shape, Step};

/// Returns the same step, in which each request takes its bytes and cuBLAS has no workspace.
fn exact(step: Step) -> Step {
    Step { allocator: AllocatorKind::Exact, cublas_workspace: 0, ..step }
}

/// Returns the bytes of a class at the peak.
fn of(estimate: &Estimate, class: Class) -> u64 {
    estimate.classes().iter().find(|(of, _)| *of == class).map_or(0, |(_, bytes)| bytes.get())
}

/// Returns the peak of each phase of this name.
fn phases(estimate: &Estimate, name: &str) -> Vec<u64> {
    estimate.phases.iter().filter(|phase| phase.name == name).map(|phase| phase.peak.get()).collect()
}

/// Returns the peaks of the first forward pass, backward pass and update.
fn highest(estimate: &Estimate) -> [u64; 3] {
    ["forward", "backward", "update"].map(|name| phases(estimate, name)[0])
}

/// Returns a model of layers for vectors of this size, with a loss for classes.
pub(crate) fn classifier(size: u64, layers: Vec<Named>) -> Model {
    Model { name: "test".to_owned(), input: Input::Numbers(Shape::from([size])), layers, loss: Loss::CrossEntropy }
}

/// Returns two linear layers of 100 × 50 and 50 × 50 with biases.
fn small() -> Model {
    let layers =
        vec![Layer::linear(100, 50).named("fc1"), Layer::relu(false).named("relu"), Layer::linear(50, 50).named("fc2")];
    classifier(100, layers)
}

/// Returns a linear layer without a bias.
fn linear(inputs: u64, outputs: u64) -> Layer {
    Layer::Linear(Linear { inputs, outputs, no_bias: true, tied_to: None })
}
