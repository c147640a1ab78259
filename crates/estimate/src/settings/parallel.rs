//! Data parallelism over several GPUs.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

/// Several GPUs, each with its own batch. An estimate is for the GPU that needs the most memory.
///
/// ```
/// use gpumem_estimate::{DataParallel, DataParallelKind, Dtype, Optimizer, Step, models};
///
/// let shards = DataParallel { kind: DataParallelKind::Zero3, ranks: 8, gathered: Some(Dtype::Bf16) };
/// let alone = Step::training(1, Optimizer::Adam);
/// let model = models::gpt2(128);
/// let with_others = Step { data_parallel: Some(shards), ..alone.clone() };
/// assert!(with_others.estimate(&model)?.peak < alone.estimate(&model)?.peak);
/// # Ok::<(), gpumem_estimate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataParallel {
    /// The distribution of parameters, gradients and optimizer state over the ranks.
    pub kind: DataParallelKind,
    /// The number of ranks: 2 or more.
    pub ranks: u64,
    /// The type as which shards are gathered and in which the model computes (`MixedPrecisionPolicy(param_dtype=…)`).
    /// Shards, their gradients and the state of the optimizer keep [`Step::parameters`](crate::Step::parameters). This
    /// needs shards of the parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gathered: Option<Dtype>,
}

/// How parameters, gradients and the optimizer's state are distributed: the stages of `ZeRO`, as PyTorch implements
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DataParallelKind {
    /// `DistributedDataParallel`: each rank keeps everything. Gradients are added up in buckets, which together are as
    /// large as all gradients.
    Replicas,
    /// `DistributedDataParallel` with `ZeroRedundancyOptimizer`: each rank keeps the state for some of the parameters,
    /// chosen so that all ranks have roughly the same number of elements.
    Zero1,
    /// `fully_shard` with `reshard_after_forward=False`: each rank keeps a shard of each parameter, of its gradient and
    /// of its state. The forward pass gathers a block's parameters, and the backward pass frees them.
    Zero2,
    /// `fully_shard` (FSDP2) with its defaults: parameters are also freed after each block's forward pass, and gathered
    /// again in the backward pass, one block ahead. Parameters outside all blocks stay until the end of the backward
    /// pass.
    Zero3,
}

impl DataParallelKind {
    /// Returns whether each rank keeps shards of the parameters.
    pub(crate) fn has_shards(self) -> bool {
        matches!(self, Self::Zero2 | Self::Zero3)
    }
}
