//! Predicts the GPU memory of a step before it runs.
//!
//! A step runs without values: each layer opens a scope, each tensor is an allocation with a class, and both are events
//! for the same ledger that counts the memory of running programs. Operations make the same allocations as PyTorch's
//! operations, in the same order, and keep the same tensors for the backward pass.
//!
//! ```
//! use gpumem_estimate::{Optimizer, Step, models};
//!
//! let model = models::vgg19();
//! let inference = Step::inference(1).estimate(&model)?;
//! assert_eq!(inference.parameters, 143_667_240);
//! let training = Step::training(32, Optimizer::Adam).estimate(&model)?;
//! assert!(training.peak > inference.peak);
//! let sum: u64 = training.parts.iter().map(|part| part.bytes.get()).sum();
//! assert_eq!(sum, training.peak.get());
//! # Ok::<(), gpumem_estimate::Error>(())
//! ```

#![forbid(unsafe_code)]

mod allocator;
mod answers;
mod class;
mod dtype;
mod eager;
mod error;
mod estimate;
mod files;
mod layer;
mod memory;
mod model;
mod model_check;
pub mod models;
mod recording;
mod settings;
mod shape;
mod step;
mod tensors;

pub use gpumem_core::model::Bytes;

pub use self::{
    allocator::{AllocatorKind, replay},
    answers::{Saving, Savings},
    class::Class,
    dtype::{Blocks, Dtype},
    eager::{Conv, Window},
    error::{Error, Result},
    estimate::{ContextSize, ConvolutionWorkspace, Estimate, OptimizerParts, PeakPart, PhasePeak},
    files::{Described, Gguf},
    layer::{
        Attention, AttentionNames, Embeddings, Experts, Function, HeadNorm, Layer, Linear, Named, RunExperts, numbered,
    },
    model::{Input, Loss, Model},
    settings::{
        Checkpointing, DataParallel, DataParallelKind, Decode, KvCache, Lora, Names, Optimizer, Quantized, Step,
    },
    shape::Shape,
    tensors::{TensorInfo, TensorSum, Tensors},
};
use self::{
    dtype::Types,
    eager::{Eager, Tensor},
    error::{Kind, ensure},
    memory::StepMemory,
};
