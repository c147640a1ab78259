//! Known models. Their parameters are those of torchvision and transformers.

mod convolutional;
mod transformers;

pub use self::{
    convolutional::{
        ResNet, VGG11, VGG13, VGG16, VGG19, alexnet, convnext, mobilenet_v2, resnet, resnet50, vgg, vgg19,
    },
    transformers::{bert_base, gpt2, gpt2_medium, llama_1b, t5_small, vit_b_16},
};
