//! Parts that many models share.

use crate::layer::{Function, Layer, Linear, Named};

/// Creates a sequence without a name, whose layers belong to the layer around it.
pub(super) fn inline(layers: Vec<Named>) -> Named {
    Layer::Sequential { layers }.named("")
}

/// Creates a layer that adds the output of these layers to their input.
pub(super) fn residual(layers: Vec<Named>) -> Named {
    Layer::Residual { layers, shortcut: vec![], in_place: false }.named("")
}

pub(super) fn linear(name: &str, inputs: u64, outputs: u64, has_bias: bool) -> Named {
    Layer::Linear(Linear { inputs, outputs, no_bias: !has_bias, tied_to: None }).named(name)
}

pub(super) fn activation(function: Function) -> Named {
    Layer::Activation { function, in_place: false }.named("")
}

/// Creates two linear layers with a function between them.
pub(super) fn mlp(names: [&str; 2], size: u64, hidden: u64, function: Function) -> Named {
    inline(vec![linear(names[0], size, hidden, true), activation(function), linear(names[1], hidden, size, true)])
}

/// Creates dropout. Returns `None` if the probability is 0.
pub(super) fn dropout(probability: f64) -> Option<Named> {
    (probability != 0.0).then(|| Layer::Dropout { probability }.named(""))
}

/// Returns these layers, followed by dropout unless the probability is 0.
pub(super) fn dropped(mut layers: Vec<Named>, probability: f64) -> Vec<Named> {
    layers.extend(dropout(probability));
    layers
}

pub(super) fn layer_norm(name: &str, size: u64) -> Named {
    Layer::LayerNorm { size }.named(name)
}

pub(super) fn rms_norm(name: &str, size: u64) -> Named {
    Layer::RmsNorm { size }.named(name)
}
