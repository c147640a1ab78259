//! The parts of a [`Step`](crate::Step), as data. `eager/`, `layer/` and `step/` implement them.

mod names;
mod step;

use serde::{Deserialize, Serialize};

pub(crate) use self::step::COMPUTE;
pub use self::{names::Names, step::Step};
use crate::Dtype;

/// The optimizer of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Optimizer {
    /// SGD without momentum. It has no state.
    Sgd,
    /// SGD with momentum (`torch.optim.SGD` with `foreach`): a copy of the gradients.
    Momentum,
    /// Adam and `AdamW` (`torch.optim`, with `foreach`): two tensors for each parameter, and temporary tensors for all
    /// parameters at the same time. `adamw` is another name for it.
    #[serde(alias = "adamw")]
    Adam,
    /// `torch.optim.Adafactor` with its default settings, which processes one parameter after the other. The state of a
    /// matrix is a number for each row and each column, and that of a vector is as large as the vector. The temporary
    /// tensors are as large as two consecutive parameters.
    Adafactor,
    /// Lion as in `lion-pytorch`: one tensor for each parameter, and two temporary ones for the parameter being
    /// updated.
    Lion,
    /// 8-bit Adam of bitsandbytes: two bytes for each element, and two scales for each block of 256 elements.
    /// Parameters with fewer than 4096 elements have Adam's state in `f32`. There are no temporary tensors. `adamw8bit`
    /// is another name for it.
    #[serde(alias = "adamw8bit")]
    Adam8bit,
}

/// Low-rank adapters (`LoRA`, as in peft): the parameters of the model are frozen, and the chosen linear layers get two small matrices
/// each, which are trained instead.
///
/// A linear layer of `inputs` and `outputs` gets matrices of the shapes (rank, inputs) and (outputs, rank), without a bias. They are
/// `f32` if the parameters of the model are `f16` or `bf16`, as with peft's default `autocast_adapter_dtype`. The factor `alpha`
/// changes no size.
///
/// A frozen layer keeps no tensors for the gradient of its own weight, only those for the gradient of its input.
///
/// ```
/// use gpumem_estimate::{Lora, Optimizer, Step, models};
///
/// let lora = Lora { rank: 8, targets: ["c_attn"].into(), dropout: 0.0 };
/// let step = Step { adapters: Some(lora), ..Step::training(1, Optimizer::Adam) };
/// let estimate = step.estimate(&models::gpt2(128))?;
/// // 12 layers, each with 8 × 768 and 2304 × 8 more elements than in the model.
/// assert_eq!(estimate.parameters, 124_439_808 + 12 * 8 * (768 + 2304));
/// # Ok::<(), gpumem_estimate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// The number of columns of the first matrix and of rows of the second. 0 is an error.
    pub rank: u64,
    /// The linear layers that get an adapter. A name that matches no linear layer is an error.
    pub targets: Names,
    /// The dropout probability for the input of an adapter.
    #[serde(default)]
    pub dropout: f64,
}

/// 4-bit weights of linear layers (`Linear4bit` of bitsandbytes with `nf4` or `fp4`): half a byte for each element and a scale for
/// each block of 64 elements. Each matrix product, in the forward and in the backward pass, first converts the weight to the wider type,
/// and frees the copy afterwards.
///
/// Such weights have no gradients, so training needs adapters: [`Lora`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quantized {
    /// True if the scales are quantized as well (`bnb_4bit_use_double_quant`): each takes one byte instead of four,
    /// with four more bytes for each block of 256 scales.
    pub double: bool,
    /// The type of the products and of their inputs (`bnb_4bit_compute_dtype`), and of the temporary weights.
    pub compute: Dtype,
    /// The linear layers that are left unchanged. transformers does not change the head of a model.
    pub except: Names,
}

impl Default for Quantized {
    fn default() -> Self {
        Self { double: true, compute: Dtype::Bf16, except: ["lm_head"].into() }
    }
}

/// The layers that the backward pass runs again, so that their tensors need not stay in memory.
///
/// This is `torch.utils.checkpoint` with `use_reentrant=False`: the input of the layers that run again stays in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Checkpointing {
    /// No layer runs again.
    #[default]
    Off,
    /// Each block by itself, as `gradient_checkpointing_enable` of transformers does.
    Blocks,
}

/// `true` means each block.
impl From<bool> for Checkpointing {
    fn from(is_on: bool) -> Self {
        if is_on { Self::Blocks } else { Self::Off }
    }
}

/// Tokens that a language model generates after it has read its input, the prompt: `generate` of transformers.
///
/// The first token comes from the pass over the prompt (the phase `prefill`), every other token from a pass over the previous one
/// (the phase `decode`). Logits are computed for the last position only. All passes are run, so an estimate takes longer with more tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decode {
    /// The number of generated tokens. 0 is an error.
    pub tokens: u64,
    /// How the keys and values of earlier tokens are kept.
    #[serde(default)]
    pub cache: KvCache,
}

/// How attention keeps the keys and values of earlier tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KvCache {
    /// `DynamicCache` of transformers: each pass joins the old keys with the new ones in a new tensor, so that a
    /// layer's keys exist twice for a moment. The same then happens to the values.
    #[default]
    Dynamic,
    /// `StaticCache`: the first pass allocates room for this many tokens. It is an error if the prompt and the tokens
    /// do not fit.
    Static(u64),
}

/// Several GPUs, each with its own batch. An estimate is for the GPU that needs the most memory.
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
