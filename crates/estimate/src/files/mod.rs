//! Reads descriptions of models from files, without their weights.

mod config;
mod described;
mod gguf;
mod gguf_model;
mod input;
mod safetensors;

pub(crate) use self::{
    config::torchvision,
    input::{file_error, text},
};
pub use self::{described::Described, gguf::Gguf};
