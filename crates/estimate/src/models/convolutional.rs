//! torchvision's models for images of 224 × 224 and 1000 classes.

use crate::{
    eager::Conv,
    layer::{Function, Layer, Named, numbered},
    model::{Input, Loss, Model},
    shape::Shape,
};

/// The sizes of a model that consists of stages.
enum Stages {
    /// The number of convolutions before each pooling.
    Vgg([usize; 5]),
    /// The blocks of each stage. A block has two convolutions.
    Plain([usize; 4]),
    /// The blocks of each stage, and the groups and the channels of a group of the second of three convolutions.
    Bottleneck([usize; 4], u64, u64),
    /// The blocks and the channels of each stage.
    ConvNext([usize; 4], [u64; 4]),
}

const NAMES: &[(&str, Stages)] = &[
    ("vgg11", Stages::Vgg([1, 1, 2, 2, 2])),
    ("vgg13", Stages::Vgg([2, 2, 2, 2, 2])),
    ("vgg16", Stages::Vgg([2, 2, 3, 3, 3])),
    ("vgg19", Stages::Vgg([2, 2, 4, 4, 4])),
    ("resnet18", Stages::Plain([2, 2, 2, 2])),
    ("resnet34", Stages::Plain([3, 4, 6, 3])),
    ("resnet50", Stages::Bottleneck([3, 4, 6, 3], 1, 64)),
    ("resnet101", Stages::Bottleneck([3, 4, 23, 3], 1, 64)),
    ("resnet152", Stages::Bottleneck([3, 8, 36, 3], 1, 64)),
    ("wide_resnet50_2", Stages::Bottleneck([3, 4, 6, 3], 1, 128)),
    ("wide_resnet101_2", Stages::Bottleneck([3, 4, 23, 3], 1, 128)),
    ("resnext50_32x4d", Stages::Bottleneck([3, 4, 6, 3], 32, 4)),
    ("resnext101_32x8d", Stages::Bottleneck([3, 4, 23, 3], 32, 8)),
    ("resnext101_64x4d", Stages::Bottleneck([3, 4, 23, 3], 64, 4)),
    ("convnext_tiny", Stages::ConvNext([3, 3, 9, 3], [96, 192, 384, 768])),
    ("convnext_small", Stages::ConvNext([3, 3, 27, 3], [96, 192, 384, 768])),
    ("convnext_base", Stages::ConvNext([3, 3, 27, 3], [128, 256, 512, 1024])),
    ("convnext_large", Stages::ConvNext([3, 3, 27, 3], [192, 384, 768, 1536])),
];

/// Returns a convolutional model by its name. `None` if the name is not known.
pub(super) fn named(name: &str) -> Option<Model> {
    let plain = name.strip_suffix("_bn");
    let stages = NAMES.iter().find(|(known, _)| *known == plain.unwrap_or(name)).map(|(_, stages)| stages);
    let layers = match (name, stages) {
        ("alexnet", _) => alexnet(),
        ("mobilenet_v2", _) => mobilenet_v2(),
        (_, Some(Stages::Vgg(convolutions))) => vgg(*convolutions, plain.is_some()),
        (_, Some(Stages::Plain(blocks))) => resnet(*blocks, None),
        (_, Some(Stages::Bottleneck(blocks, groups, width))) => resnet(*blocks, Some((*groups, *width))),
        (_, Some(Stages::ConvNext(blocks, channels))) => convnext(*blocks, *channels),
        _ => return None,
    };
    let input = Input::Numbers(Shape::from([3, 224, 224]));
    Some(Model { name: name.to_owned(), input, layers, loss: Loss::CrossEntropy })
}

/// Returns features, which are pooled to a square of this size, and a classifier.
fn classified(features: Vec<Layer>, size: u64, classifier: impl IntoIterator<Item = Layer>) -> Vec<Named> {
    vec![
        Layer::sequence(features).named("features"),
        Layer::AdaptiveAveragePool { size: vec![size; 2] }.named("avgpool"),
        Layer::Flatten.named("flatten"),
        Layer::sequence(classifier).named("classifier"),
    ]
}

fn vgg(convolutions: [usize; 5], has_norm: bool) -> Vec<Named> {
    let mut features = Vec::new();
    let mut inputs = 3;
    for (count, outputs) in convolutions.into_iter().zip([64, 128, 256, 512, 512]) {
        for _ in 0..count {
            features.push(Layer::conv2d(inputs, outputs, 3, 1, 1));
            features.extend(has_norm.then_some(Layer::BatchNorm { channels: outputs }));
            features.push(Layer::relu(true));
            inputs = outputs;
        }
        features.push(Layer::max_pool2d(2, 2, 0));
    }
    let classifier = [
        Layer::linear(512 * 7 * 7, 4096),
        Layer::relu(true),
        Layer::Dropout { probability: 0.5 },
        Layer::linear(4096, 4096),
        Layer::relu(true),
        Layer::Dropout { probability: 0.5 },
        Layer::linear(4096, 1000),
    ];
    classified(features, 7, classifier)
}

fn alexnet() -> Vec<Named> {
    let mut features = Vec::new();
    // The channels, the window, the stride and the padding of a convolution, and whether pooling follows it.
    for (inputs, outputs, kernel, stride, padding, is_pooled) in [
        (3, 64, 11, 4, 2, true),
        (64, 192, 5, 1, 2, true),
        (192, 384, 3, 1, 1, false),
        (384, 256, 3, 1, 1, false),
        (256, 256, 3, 1, 1, true),
    ] {
        features.extend([Layer::conv2d(inputs, outputs, kernel, stride, padding), Layer::relu(true)]);
        features.extend(is_pooled.then(|| Layer::max_pool2d(3, 2, 0)));
    }
    let classifier = [
        Layer::Dropout { probability: 0.5 },
        Layer::linear(256 * 6 * 6, 4096),
        Layer::relu(true),
        Layer::Dropout { probability: 0.5 },
        Layer::linear(4096, 4096),
        Layer::relu(true),
        Layer::linear(4096, 1000),
    ];
    classified(features, 6, classifier)
}

/// Returns a convolution without a bias, and its batch norm.
fn normalized(conv: Conv) -> [Layer; 2] {
    let channels = conv.outputs;
    [Layer::Conv(Conv { no_bias: true, ..conv }), Layer::BatchNorm { channels }]
}

/// Returns a convolution whose padding keeps the size of the image, unless a stride reduces it.
fn square(inputs: u64, outputs: u64, kernel: u64, stride: u64) -> Conv {
    let (stride, padding) = (vec![stride], vec![kernel / 2]);
    Conv { inputs, outputs, kernel: vec![kernel; 2], stride, padding, ..Conv::default() }
}

fn residual(layers: Vec<Layer>) -> Layer {
    Layer::Residual { layers: numbered(layers), shortcut: vec![], in_place: false }
}

/// Returns a `ResNet`, a wide `ResNet` or a `ResNeXt`.
fn resnet(blocks: [usize; 4], bottleneck: Option<(u64, u64)>) -> Vec<Named> {
    let [conv, norm] = normalized(square(3, 64, 7, 2));
    let mut layers = vec![conv.named("conv1"), norm.named("bn1"), Layer::relu(true).named("relu")];
    layers.push(Layer::max_pool2d(3, 2, 1).named("maxpool"));
    let mut inputs = 64;
    for (stage, count) in blocks.into_iter().enumerate() {
        let planes = 64 << stage;
        let stage_layers = (0..count).map(|block| {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let (outputs, convolutions) = match bottleneck {
                Some((groups, width)) => {
                    let (outputs, width) = (planes * 4, planes * width / 64 * groups);
                    let middle = Conv { groups, ..square(width, width, 3, stride) };
                    (outputs, vec![square(inputs, width, 1, 1), middle, square(width, outputs, 1, 1)])
                }
                None => (planes, vec![square(inputs, planes, 3, stride), square(planes, planes, 3, 1)]),
            };
            let mut main: Vec<_> = convolutions
                .into_iter()
                .flat_map(|conv| normalized(conv).into_iter().chain([Layer::relu(true)]))
                .collect();
            // The last activation comes after the sum.
            let relu = main.pop();
            let changes = stride != 1 || inputs != outputs;
            let shortcut = if changes { numbered(normalized(square(inputs, outputs, 1, stride))) } else { vec![] };
            inputs = outputs;
            let sum = Layer::Residual { layers: numbered(main), shortcut, in_place: true };
            Layer::sequence([sum].into_iter().chain(relu))
        });
        let stage_layers: Vec<_> = stage_layers.collect();
        layers.push(Layer::sequence(stage_layers).named(format!("layer{}", stage + 1)));
    }
    layers.push(Layer::AdaptiveAveragePool { size: vec![1, 1] }.named("avgpool"));
    layers.push(Layer::Flatten.named("flatten"));
    layers.push(Layer::linear(inputs, 1000).named("fc"));
    layers
}

fn mobilenet_v2() -> Vec<Named> {
    let unit = |conv: Conv| {
        let [conv, norm] = normalized(conv);
        [conv, norm, Layer::Activation { function: Function::Relu6, in_place: true }]
    };
    let mut layers = vec![Layer::sequence(unit(square(3, 32, 3, 2)))];
    let mut inputs = 32;
    // Expansion, channels, number of blocks, and the stride of the first block.
    let stages =
        [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)];
    for (expansion, outputs, blocks, first_stride) in stages {
        for block in 0..blocks {
            let stride = if block == 0 { first_stride } else { 1 };
            let hidden = inputs * expansion;
            let mut main = Vec::new();
            if expansion != 1 {
                main.extend(unit(square(inputs, hidden, 1, 1)));
            }
            main.extend(unit(Conv { groups: hidden, ..square(hidden, hidden, 3, stride) }));
            main.extend(normalized(square(hidden, outputs, 1, 1)));
            let is_residual = stride == 1 && inputs == outputs;
            layers.push(if is_residual { residual(main) } else { Layer::sequence(main) });
            inputs = outputs;
        }
    }
    layers.push(Layer::sequence(unit(square(inputs, 1280, 1, 1))));
    classified(layers, 1, [Layer::Dropout { probability: 0.2 }, Layer::linear(1280, 1000)])
}

/// Returns `ConvNeXt`. Stochastic depth, a multiplication by a random number, is left out.
fn convnext(blocks: [usize; 4], channels: [u64; 4]) -> Vec<Named> {
    // Layer norm over the channels of an image.
    let image_norm = |size| [Layer::ChannelsToLast, Layer::LayerNorm { size }, Layer::ChannelsToFirst];
    let mut layers = Vec::new();
    // What leads to a stage: a smaller image with more channels.
    let mut before = vec![Layer::conv2d(3, channels[0], 4, 4, 0)];
    before.extend(image_norm(channels[0]));
    for (stage, (count, size)) in blocks.into_iter().zip(channels).enumerate() {
        let block = || {
            residual(vec![
                Layer::Conv(Conv { groups: size, ..square(size, size, 7, 1) }),
                Layer::ChannelsToLast,
                Layer::LayerNorm { size },
                Layer::linear(size, 4 * size),
                Layer::Activation { function: Function::Gelu, in_place: false },
                Layer::linear(4 * size, size),
                Layer::ChannelsToFirst,
                Layer::ChannelScale { size },
            ])
        };
        layers.push(Layer::sequence(before));
        layers.push(Layer::sequence((0..count).map(|_| block())));
        before = Vec::from(image_norm(size));
        before.extend(channels.get(stage + 1).map(|next| Layer::conv2d(size, *next, 2, 2, 0)));
    }
    // After the last stage, only the norm remains.
    before.extend([Layer::Flatten, Layer::linear(channels[3], 1000)]);
    vec![
        Layer::sequence(layers).named("features"),
        Layer::AdaptiveAveragePool { size: vec![1, 1] }.named("avgpool"),
        Layer::sequence(before).named("classifier"),
    ]
}
