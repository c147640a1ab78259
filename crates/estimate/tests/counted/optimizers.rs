//! Tests the kept and the temporary tensors of optimizers, counted by hand.

use gpumem_estimate::{Class, Estimate, Input, Layer, Model, Optimizer, Shape, Step, models, numbered};

use super::{classifier, exact, phases, small};

/// The parameters of [`small`] have the shapes (50, 100), (50), (50, 50) and (50).
const ELEMENTS: u64 = 5000 + 50 + 2500 + 50;

fn training(optimizer: Optimizer) -> Step {
    exact(Step::training(8, optimizer))
}

/// Returns the peak of the second update, without parameters, gradients, input, labels and loss.
fn update(optimizer: Optimizer) -> u64 {
    let estimate = training(optimizer).estimate(&small()).unwrap();
    last(&estimate, "update") - 2 * ELEMENTS * 4 - 8 * 100 * 4 - 8 * 8 - 4
}

/// Returns the peak of the last phase of this name.
fn last(estimate: &Estimate, name: &str) -> u64 {
    phases(estimate, name).pop().unwrap()
}

#[test]
fn adafactor_keeps_rows_and_columns() {
    let states = (50 + 100) + 50 + (50 + 50) + 50;
    // While the first vector is updated, the tensors for the matrix before it still exist: the means of 50 rows and 100 columns,
    // and the update of 5000 elements. The vector's squares and its update are added.
    let temporary = (50 + 100 + 5000) + 50 + 50;
    assert_eq!(update(Optimizer::Adafactor), (states + temporary) * 4);
    // A convolution of the shape (64, 3, 3, 3) has three columns and three rows for each of its 64 × 3 matrices: `row_var` has
    // the shape (64, 3, 3, 1), and `col_var` the shape (64, 3, 1, 3). The bias has 64 elements.
    let conv = Layer::conv2d(3, 64, 3, 1, 1);
    let layers = numbered([conv, Layer::Flatten, Layer::linear(64 * 16, 10)]);
    let model = Model { input: Input::Numbers(Shape::from([3, 4, 4])), ..classifier(0, layers) };
    let estimate = training(Optimizer::Adafactor).estimate(&model).unwrap();
    let states = 64 * 3 * 3 + 64 * 3 * 3 + 64 + (10 + 1024) + 10;
    // These are live at the highest moment: the means and the update of the last layer's weight; the squares of the bias before
    // it, and its update, to which one name still refers; then the mean of all rows, which is a number.
    let temporary = (10 + 1024 + 10_240) + (64 + 64) + 1;
    let elements = 64 * 27 + 64 + 10 * 1024 + 10;
    let constant = 2 * elements * 4 + 8 * 48 * 4 + 8 * 8 + 4;
    assert_eq!(last(&estimate, "update") - constant, (states + temporary) * 4);
}

#[test]
fn eight_bits_have_scales() {
    // The weight of 5000 elements has two bytes for each element, and two scales for each of 20 blocks. All other parameters have
    // less than 4096 elements. Two tables of 256 numbers give the value of each byte.
    let states = 2 * 5000 + 2 * 20 * 4 + 2 * (50 + 2500 + 50) * 4 + 2 * 256 * 4;
    assert_eq!(update(Optimizer::Adam8bit), states);
    // VGG19 needs a quarter of Adam's state and a little more. It has 143,667,240 parameters. The weight of the first convolution
    // and the biases of all layers except two are small.
    let model = models::vgg19();
    let of_optimizer = |optimizer| {
        let estimate = training(optimizer).estimate(&model).unwrap();
        estimate.parts.iter().filter(|part| part.class == Class::Optimizer).map(|part| part.bytes.get()).sum::<u64>()
    };
    let small = 64 * 3 * 9 + 2 * 64 + 2 * 128 + 4 * 256 + 8 * 512 + 1000;
    let large = 143_667_240 - small;
    // Each large parameter has a multiple of 256 elements.
    assert_eq!(of_optimizer(Optimizer::Adam8bit), 2 * large + 2 * 4 * (large / 256) + 8 * small + 2048);
}

/// The state belongs to the layers of its parameters.
#[test]
fn states_belong_to_layers() {
    let estimate = training(Optimizer::Adam).estimate(&small()).unwrap();
    let state = |layer| {
        let of_layer = estimate.parts.iter().find(|part| part.class == Class::Optimizer && part.layer == layer);
        of_layer.map(|part| part.bytes.get())
    };
    assert_eq!(
        [state("fc1"), state("fc2"), state("")],
        [2 * 5050, 2 * 2550, ELEMENTS].map(|elements| Some(elements * 4))
    );
}
