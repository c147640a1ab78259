//! A step, as data. `step.rs` runs it.

use serde::{Deserialize, Serialize};

use super::{Checkpointing, DataParallel, Decode, Lora, Optimizer, Quantized};
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
