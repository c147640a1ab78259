//! Sums over layers: the figures of the article that gpumem began with, and VGG19 line by line.

use gpumem_core::model::Bytes;
use gpumem_estimate::{Dtype, Input, Layer, Loss, Model, Shape, models};

fn article() -> Model {
    let layers = [
        Layer::conv2d(3, 64, 3, 1, 1),
        Layer::relu(true),
        Layer::conv2d(64, 64, 3, 1, 1),
        Layer::relu(true),
        Layer::max_pool2d(2, 2, 0),
        Layer::conv2d(64, 128, 3, 1, 1),
    ];
    let input = Input::Numbers(Shape::from([3, 682, 700]));
    Model { name: "Sequential".to_owned(), input, layers: gpumem_estimate::numbered(layers), loss: Loss::default() }
}

#[test]
fn the_figures_of_the_article() {
    let size = article().size(1, Dtype::F32).unwrap();
    assert_eq!(size.parameters, 112_576);
    assert_eq!(size.parameter_bytes, Bytes::new(450_304), "0.450304 MB");
    assert_eq!(size.outputs, Bytes::new(336_089_600), "336.089600 MB");
    assert_eq!(size.with_backward(), Bytes::new(672_179_200), "672.179200 MB");
    let in_place: Vec<_> = size.layers.iter().map(|layer| layer.bytes == Bytes::ZERO).collect();
    assert_eq!(in_place, [false, true, false, true, false, false]);
}

#[test]
fn bf16_halves_the_figures() {
    let size = article().size(1, Dtype::Bf16).unwrap();
    assert_eq!((size.parameter_bytes, size.outputs), (Bytes::new(225_152), Bytes::new(168_044_800)));
}

/// The elements of each output, as torchvision's model has them. `relu` overwrites its input; dropout does nothing in inference.
#[test]
fn vgg19_line_by_line() {
    let size = models::vgg19().size(1, Dtype::F32).unwrap();
    assert_eq!((size.parameters, size.parameter_bytes), (143_667_240, Bytes::new(574_668_960)));
    let lines: Vec<_> =
        size.layers.iter().map(|layer| format!("{} {} {}", layer.path, layer.output, layer.bytes.get())).collect();
    let expected = include_str!("vgg19.txt").lines().collect::<Vec<_>>();
    assert_eq!(lines, expected);
}
