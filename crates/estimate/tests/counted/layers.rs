//! Tests single layers with sums by hand, and layers that do not fit together.

use gpumem_estimate::{
    Attention, Experts, Function, HeadNorm, Input, Layer, Loss, Model, Optimizer, RunExperts, Shape, Step, numbered,
};

use super::exact;

fn model(layers: impl IntoIterator<Item = Layer>, input: Input) -> Model {
    Model { name: "test".to_owned(), input, layers: numbered(layers), loss: Loss::MeanSquares }
}

fn peak(layers: impl IntoIterator<Item = Layer>, input: Input, step: Step) -> u64 {
    exact(step).estimate(&model(layers, input)).unwrap().peak.get()
}

fn message(layers: impl IntoIterator<Item = Layer>, input: Input) -> String {
    Step::inference(2).estimate(&model(layers, input)).unwrap_err().to_string()
}

fn tokens() -> Input {
    Input::Numbers(Shape::from([5, 8]))
}

fn experts() -> Experts {
    Experts {
        size: 8,
        hidden: 4,
        experts: 3,
        per_token: 2,
        function: Function::Silu,
        shared: 0,
        gates_shared: false,
        run: RunExperts::Grouped,
    }
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
    let found = peak([Layer::Experts(experts())], tokens(), Step::inference(2));
    assert_eq!(found, weights + input + scores + choice + chosen + last);
    // All experts get all tokens, so their size does not depend on how many of them are chosen.
    let all = |per_token| {
        let experts = Experts { per_token, shared: 4, run: RunExperts::All, ..experts() };
        peak([Layer::Experts(experts)], tokens(), Step::inference(2))
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

#[test]
fn what_does_not_fit_names_the_layer_and_the_shapes() {
    let wide = Layer::Experts(Experts { size: 9, ..experts() });
    assert_eq!(message([wide], tokens()), "layer `0`: expects an input of shape (…, …, 9) and gets (2, 5, 8)");
    for per_token in [0, 4] {
        let none = Layer::Experts(Experts { per_token, ..experts() });
        let expected = format!("layer `0`: a token cannot pass through {per_token} of 3 experts");
        assert_eq!(message([none], tokens()), expected);
    }
    let cross = || {
        let reads = Some("text".to_owned());
        Layer::Attention(Attention { size: 8, heads: 2, reads, ..Attention::default() })
    };
    assert_eq!(message([cross()], tokens()), "layer `0`: no layer before it leaves `text`");
    let text = |size| {
        let (slot, sizes) = ("text".to_owned(), vec![3, size]);
        Layer::Provide { slot, sizes, integers: false, is_next: false, layers: vec![] }
    };
    let expected = "layer `1`: expects an input of shape (2, …, 8) and gets (2, 3, 7)";
    assert_eq!(message([text(7), cross()], tokens()), expected);
    assert!(Step::inference(2).estimate(&model([text(8), cross()], tokens())).is_ok());
    let rotated = Layer::Attention(Attention { size: 8, heads: 2, rotates: true, rotated: 5, ..Attention::default() });
    assert_eq!(message([rotated], tokens()), "layer `0`: heads of 4 cannot rotate 5 elements");
    let positions = Layer::Positions { rows: 4, size: 8, is_fixed: false };
    let expected = "layer `0`: expects an input of shape (…, 4 or less, 8) and gets (2, 5, 8)";
    assert_eq!(message([positions], tokens()), expected);
    let norm = HeadNorm::Rms;
    let normed = Layer::Attention(Attention { size: 8, heads: 2, head_size: 3, norm, ..Attention::default() });
    assert!(Step::inference(2).estimate(&model([normed], tokens())).is_ok());
}
