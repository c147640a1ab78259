//! torchvision's models for images of 224 × 224 and 1000 classes.

use crate::{
    layer::{Conv, Function, Layer, Named, numbered},
    model::{Input, Loss, Model},
    shape::Shape,
};

fn classifier_of_images(name: &str, layers: Vec<Named>) -> Model {
    let input = Input::Numbers(Shape::from([3, 224, 224]));
    Model { name: name.to_owned(), input, layers, loss: Loss::CrossEntropy }
}

/// Returns VGG with these numbers of output channels, with or without batch norm. 0 means max pooling.
pub fn vgg(name: &str, plan: &[u64], has_norm: bool) -> Model {
    let mut layers = Vec::new();
    let mut inputs = 3;
    for &outputs in plan {
        if outputs == 0 {
            layers.push(Layer::max_pool2d(2, 2, 0));
        } else {
            layers.push(Layer::conv2d(inputs, outputs, 3, 1, 1));
            layers.extend(has_norm.then_some(Layer::BatchNorm { channels: outputs }));
            layers.push(Layer::relu(true));
            inputs = outputs;
        }
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
    let layers = vec![
        Layer::sequence(layers).named("features"),
        Layer::AdaptiveAveragePool { size: vec![7, 7] }.named("avgpool"),
        Layer::Flatten.named("flatten"),
        Layer::sequence(classifier).named("classifier"),
    ];
    classifier_of_images(name, layers)
}

/// The output channels of VGG11's convolutions, see [`vgg`].
pub const VGG11: &[u64] = &[64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0];
/// The output channels of VGG13's convolutions, see [`vgg`].
pub const VGG13: &[u64] = &[64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0];
/// The output channels of VGG16's convolutions, see [`vgg`].
pub const VGG16: &[u64] = &[64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0];
/// The output channels of VGG19's convolutions, see [`vgg`].
pub const VGG19: &[u64] =
    &[64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0];

/// Returns VGG19 without batch norm.
pub fn vgg19() -> Model {
    vgg("vgg19", VGG19, false)
}

/// Returns `AlexNet`.
pub fn alexnet() -> Model {
    let features = [
        Layer::conv2d(3, 64, 11, 4, 2),
        Layer::relu(true),
        Layer::max_pool2d(3, 2, 0),
        Layer::conv2d(64, 192, 5, 1, 2),
        Layer::relu(true),
        Layer::max_pool2d(3, 2, 0),
        Layer::conv2d(192, 384, 3, 1, 1),
        Layer::relu(true),
        Layer::conv2d(384, 256, 3, 1, 1),
        Layer::relu(true),
        Layer::conv2d(256, 256, 3, 1, 1),
        Layer::relu(true),
        Layer::max_pool2d(3, 2, 0),
    ];
    let classifier = [
        Layer::Dropout { probability: 0.5 },
        Layer::linear(256 * 6 * 6, 4096),
        Layer::relu(true),
        Layer::Dropout { probability: 0.5 },
        Layer::linear(4096, 4096),
        Layer::relu(true),
        Layer::linear(4096, 1000),
    ];
    let layers = vec![
        Layer::sequence(features).named("features"),
        Layer::AdaptiveAveragePool { size: vec![6, 6] }.named("avgpool"),
        Layer::Flatten.named("flatten"),
        Layer::sequence(classifier).named("classifier"),
    ];
    classifier_of_images("alexnet", layers)
}

/// Returns a convolution without a bias, and its batch norm.
fn normalized(conv: Conv) -> [Layer; 2] {
    let channels = conv.outputs;
    [Layer::Conv(Conv { no_bias: true, ..conv }), Layer::BatchNorm { channels }]
}

fn square(inputs: u64, outputs: u64, kernel: u64, stride: u64, padding: u64) -> Conv {
    let (stride, padding) = (vec![stride], vec![padding]);
    Conv { inputs, outputs, kernel: vec![kernel; 2], stride, padding, ..Conv::default() }
}

/// The sizes of a `ResNet`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResNet {
    /// The number of blocks of each stage.
    pub blocks: [usize; 4],
    /// True if a block has three convolutions instead of two.
    pub has_bottleneck: bool,
    /// The number of groups of the second of three convolutions.
    pub groups: u64,
    /// The channels of a group in the first stage: 64 in a plain `ResNet`.
    pub width: u64,
}

impl ResNet {
    /// Creates a plain `ResNet`.
    pub const fn new(blocks: [usize; 4], has_bottleneck: bool) -> Self {
        Self { blocks, has_bottleneck, groups: 1, width: 64 }
    }
}

/// Returns ResNet-50.
pub fn resnet50() -> Model {
    resnet("resnet50", ResNet::new([3, 4, 6, 3], true))
}

/// Returns a `ResNet`, a wide `ResNet` or a `ResNeXt`.
pub fn resnet(name: &str, ResNet { blocks, has_bottleneck, groups, width: width_of_group }: ResNet) -> Model {
    let expansion = if has_bottleneck { 4 } else { 1 };
    let mut layers = Vec::new();
    let [conv, norm] = normalized(square(3, 64, 7, 2, 3));
    layers.extend([conv.named("conv1"), norm.named("bn1"), Layer::relu(true).named("relu")]);
    layers.push(Layer::max_pool2d(3, 2, 1).named("maxpool"));
    let mut inputs = 64;
    for (stage, count) in blocks.into_iter().enumerate() {
        let planes = 64 << stage;
        let width = if has_bottleneck { planes * width_of_group / 64 * groups } else { planes };
        let stage_layers = (0..count).map(|block| {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let outputs = planes * expansion;
            let mut main = Vec::new();
            if has_bottleneck {
                main.extend(normalized(square(inputs, width, 1, 1, 0)));
                main.push(Layer::relu(true));
                main.extend(normalized(Conv { groups, ..square(width, width, 3, stride, 1) }));
                main.push(Layer::relu(true));
                main.extend(normalized(square(width, outputs, 1, 1, 0)));
            } else {
                main.extend(normalized(square(inputs, width, 3, stride, 1)));
                main.push(Layer::relu(true));
                main.extend(normalized(square(width, width, 3, 1, 1)));
            }
            let changes = stride != 1 || inputs != outputs;
            let shortcut = if changes { numbered(normalized(square(inputs, outputs, 1, stride, 0))) } else { vec![] };
            inputs = outputs;
            let sum = Layer::Residual { layers: numbered(main), shortcut, in_place: true };
            Layer::sequence([sum, Layer::relu(true)])
        });
        let stage_layers: Vec<_> = stage_layers.collect();
        layers.push(Layer::sequence(stage_layers).named(format!("layer{}", stage + 1)));
    }
    layers.push(Layer::AdaptiveAveragePool { size: vec![1, 1] }.named("avgpool"));
    layers.push(Layer::Flatten.named("flatten"));
    layers.push(Layer::linear(inputs, 1000).named("fc"));
    classifier_of_images(name, layers)
}

/// Returns `MobileNetV2`.
pub fn mobilenet_v2() -> Model {
    let relu6 = || Layer::Activation { function: Function::Relu6, in_place: true };
    let unit = |conv: Conv| {
        let [conv, norm] = normalized(conv);
        [conv, norm, relu6()]
    };
    let mut layers = vec![Layer::sequence(unit(square(3, 32, 3, 2, 1)))];
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
                main.extend(unit(square(inputs, hidden, 1, 1, 0)));
            }
            main.extend(unit(Conv { groups: hidden, ..square(hidden, hidden, 3, stride, 1) }));
            main.extend(normalized(square(hidden, outputs, 1, 1, 0)));
            layers.push(if stride == 1 && inputs == outputs {
                Layer::Residual { layers: numbered(main), shortcut: vec![], in_place: false }
            } else {
                Layer::sequence(main)
            });
            inputs = outputs;
        }
    }
    layers.push(Layer::sequence(unit(square(inputs, 1280, 1, 1, 0))));
    let classifier = [Layer::Dropout { probability: 0.2 }, Layer::linear(1280, 1000)];
    let layers = vec![
        Layer::sequence(layers).named("features"),
        Layer::AdaptiveAveragePool { size: vec![1, 1] }.named("avgpool"),
        Layer::Flatten.named("flatten"),
        Layer::sequence(classifier).named("classifier"),
    ];
    classifier_of_images("mobilenet_v2", layers)
}

/// Returns `ConvNeXt` with these numbers of blocks and channels in each stage. Stochastic depth, a multiplication by a
/// random number, is left out.
pub fn convnext(name: &str, blocks: [usize; 4], channels: [u64; 4]) -> Model {
    // Layer norm over the channels of an image.
    let image_norm = |size| [Layer::ChannelsToLast, Layer::LayerNorm { size }, Layer::ChannelsToFirst];
    let mut stem = vec![Layer::conv2d(3, channels[0], 4, 4, 0)];
    stem.extend(image_norm(channels[0]));
    let mut layers = vec![Layer::sequence(stem)];
    for (stage, (count, size)) in blocks.into_iter().zip(channels).enumerate() {
        let block = || {
            let depthwise = Conv { groups: size, ..square(size, size, 7, 1, 3) };
            let main = [
                Layer::Conv(depthwise),
                Layer::ChannelsToLast,
                Layer::LayerNorm { size },
                Layer::linear(size, 4 * size),
                Layer::Activation { function: Function::Gelu, in_place: false },
                Layer::linear(4 * size, size),
                Layer::ChannelsToFirst,
                Layer::ChannelScale { size },
            ];
            Layer::Residual { layers: numbered(main), shortcut: vec![], in_place: false }
        };
        layers.push(Layer::sequence((0..count).map(|_| block())));
        if let Some(next) = channels.get(stage + 1) {
            let mut downsample = Vec::from(image_norm(size));
            downsample.push(Layer::conv2d(size, *next, 2, 2, 0));
            layers.push(Layer::sequence(downsample));
        }
    }
    let last = channels[3];
    let mut classifier = Vec::from(image_norm(last));
    classifier.extend([Layer::Flatten, Layer::linear(last, 1000)]);
    let layers = vec![
        Layer::sequence(layers).named("features"),
        Layer::AdaptiveAveragePool { size: vec![1, 1] }.named("avgpool"),
        Layer::sequence(classifier).named("classifier"),
    ];
    classifier_of_images(name, layers)
}
