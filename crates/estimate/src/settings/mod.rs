//! The parts of a [`Step`](crate::Step), as data. `eager/`, `layer/` and `step/` implement them.

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
