//! What this machine has: GPUs, their processes, and recordings that run. `gpumem info`, `ps`, `watch` and `doctor` show it.

mod gpus;
mod injection;

pub(crate) use self::{
    gpus::{Gpu, Machine, Memory},
    injection::leave_out_injection,
};
