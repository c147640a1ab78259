//! A [`Step`] and its parts, as data. `eager/`, `layer/` and `step.rs` implement them.

mod names;

use serde::{Deserialize, Serialize};

pub use self::names::Names;
use crate::{AllocatorKind, Bytes, Dtype};

/// The settings of a step. Fields that are missing in a file have the values of [`Step::default`]: inference in `f32` with one input.
///
/// For a combination that makes no sense, [`estimate`](Self::estimate) returns an error that explains it.
///
/// ```
/// use gpumem_estimate::{Checkpointing, Dtype, Optimizer, Step, models};
///
/// let step = Step { checkpointing: Checkpointing::Blocks, ..Step::training(8, Optimizer::Adam) };
/// let plain = Step::training(8, Optimizer::Adam);
/// let model = models::gpt2(128);
/// assert!(step.estimate(&model)?.peak < plain.estimate(&model)?.peak);
///
/// let senseless = Step { master_weights: true, ..plain };
/// let error = senseless.estimate(&model).unwrap_err();
/// assert_eq!(error.to_string(), "copies of the parameters in f32 are for parameters of a smaller type");
/// # Ok::<(), gpumem_estimate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Step {
    /// The number of inputs that are read at once.
    pub batch: u64,
    /// The optimizer of a training step, which has a forward pass, a backward pass and an update. `None` for inference.
    pub optimizer: Option<Optimizer>,
    /// The number of forward and backward passes before an update, each with its own batch: 1 or more. Their gradients
    /// are added up. Passes from the fifth on allocate the same as the fourth, so they are not run.
    pub micro_batches: u64,
    /// The tokens that the model generates in inference. `None` if the model only reads the prompt and computes logits
    /// for all of its positions.
    pub decode: Option<Decode>,
    /// The type of the parameters. If it [is only stored](Dtype::is_only_stored), it applies to the weights of linear
    /// layers and experts and to embedding tables, as in llama.cpp, whose kernels read them directly. Everything else
    /// has the type `compute`. `i8` applies only to linear layers other than `lm_head`, as with `load_in_8bit` of
    /// bitsandbytes.
    pub parameters: Dtype,
    /// If the type of the parameters is only stored, the type of activations, of the cache, of logits and of small
    /// parameters: `f16`, `bf16` or `f32`. `None` for the type of autocast, else `bf16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<Dtype>,
    /// True if the optimizer updates `f32` copies of the parameters and keeps its state in `f32`, as Megatron-LM does
    /// (`Float16OptimizerWithFloat16Params`). All gradients are converted before the update, and each one is freed in
    /// the smaller type. It is an error if the parameters are `f32` already.
    pub master_weights: bool,
    /// Adapters to train, while the model is frozen.
    pub adapters: Option<Lora>,
    /// 4-bit weights of linear layers.
    pub quantized: Option<Quantized>,
    /// Several GPUs, each with its own batch. The estimate is for one of them.
    pub data_parallel: Option<DataParallel>,
    /// Autocast to this type.
    pub autocast: Option<Dtype>,
    /// The layers that the backward pass runs again.
    pub checkpointing: Checkpointing,
    /// The allocator.
    pub allocator: AllocatorKind,
    /// The memory that the allocator may take from the driver: that of the GPU, without the CUDA context and other
    /// processes. It is an error if a step needs more.
    pub limit: Option<Bytes>,
    /// The workspace that PyTorch allocates for cuBLAS: once for the forward pass and once for the backward pass. It has
    /// 32 MiB on GPUs of compute capability 9.0, and 8.125 MiB on others. cuBLASLt gets another 1 MiB.
    pub cublas_workspace: u64,
    /// The number of multiprocessors of the GPU: 132 for an H100 or H200. A convolution may use a part of its workspace
    /// for each.
    pub multiprocessors: u64,
}

impl Default for Step {
    fn default() -> Self {
        Self {
            batch: 1,
            optimizer: None,
            micro_batches: 1,
            decode: None,
            parameters: Dtype::F32,
            compute: None,
            master_weights: false,
            adapters: None,
            quantized: None,
            data_parallel: None,
            autocast: None,
            checkpointing: Checkpointing::Off,
            allocator: AllocatorKind::PyTorch,
            limit: None,
            cublas_workspace: 32 << 20,
            multiprocessors: 132,
        }
    }
}

/// The type of computation if the type of the parameters is only stored and no other type is given.
pub(crate) const COMPUTE: Dtype = Dtype::Bf16;

impl Step {
    /// Creates an inference step with a batch.
    pub fn inference(batch: u64) -> Self {
        Self { batch, ..Self::default() }
    }

    /// Creates a training step with a batch.
    pub fn training(batch: u64, optimizer: Optimizer) -> Self {
        Self { batch, optimizer: Some(optimizer), ..Self::default() }
    }

    /// Returns the type of activations and of the cache, and of parameters that are not weights of products.
    pub fn computes_in(&self) -> Dtype {
        if self.parameters.is_only_stored() {
            self.compute.or(self.autocast).unwrap_or(COMPUTE)
        } else {
            self.parameters
        }
    }
}

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
    /// Shards, their gradients and the state of the optimizer keep [`Step::parameters`]. This
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
