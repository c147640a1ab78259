//! Tests single layers with sums by hand.

use gpumem_estimate::{Input, Layer, Loss, Model, Optimizer, Shape, Step, numbered};

use super::exact;
use crate::errors::layers;

fn peak(layers: impl IntoIterator<Item = Layer>, input: Input, step: Step) -> u64 {
    let (name, layers) = ("test".to_owned(), numbered(layers));
    exact(step).estimate(&Model { name, input, layers, loss: Loss::MeanSquares }).unwrap().peak.get()
}

fn tokens() -> Input {
    Input::Numbers(Shape::from([5, 8]))
}

/// There are 10 tokens, and each passes through 2 of 3 experts, which makes 20 rows.
#[test]
fn experts_keep_what_grouped_products_need() {
    let weights = 4 * (3 * 8 + 3 * 8 * 8 + 3 * 8 * 4);
    let (input, scores, choice) = (10 * 8 * 4, 10 * 2 * 4, 10 * 2 * 8);
    // The choice of experts consists of the sorted choice, the order of the rows, the rows, and their scores.
    let chosen = 2 * 20 * 8 + 20 * 8 * 4 + 20 * 4;
    // These are live at the end: the outputs of the experts, the outputs times the scores, the reverse order, and the same rows
    // in that order.
    let last = 3 * 20 * 8 * 4 + 20 * 8;
    let found =
        peak(layers("experts size=8 hidden=4 experts=3 per_token=2 function=silu"), tokens(), Step::inference(2));
    assert_eq!(found, weights + input + scores + choice + chosen + last);
    // All experts get all tokens, so their size does not depend on how many of them are chosen.
    let all = |per_token| {
        let text = format!("experts size=8 hidden=4 experts=3 per_token={per_token} function=silu shared=4 run=all");
        peak(layers(&text), tokens(), Step::inference(2))
    };
    assert_eq!(all(2), all(1));
    assert!(all(1) > found);
}

/// Branches read the same input. Without training, an idle layer costs only its parameters.
#[test]
fn branches_and_idle_layers() {
    let linear = || Layer::linear(8, 8);
    let weights = 4 * (8 * 8 + 8);
    let rows = 2 * 5 * 8 * 4;
    let branches = Layer::Branches { layers: numbered([linear(), linear()]) };
    assert_eq!(peak([branches], tokens(), Step::inference(2)), 2 * weights + rows + 3 * rows);
    let idle = Layer::Idle { layers: numbered([Layer::linear(100, 100)]) };
    let plain = peak([linear()], tokens(), Step::training(2, Optimizer::Adam));
    assert_eq!(peak([idle, linear()], tokens(), Step::training(2, Optimizer::Adam)), plain + 4 * 100 * 101);
}
