//! The parts of a [`Step`](crate::Step), as data: what each of them does is in `eager/`, `layer/` and `step/`.

mod adapters;
mod checkpointing;
mod decode;
mod names;
mod parallel;

pub use self::{
    adapters::{Lora, Quantized},
    checkpointing::Checkpointing,
    decode::{Decode, KvCache},
    names::Names,
    parallel::{DataParallel, DataParallelKind},
};
