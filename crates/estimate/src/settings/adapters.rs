//! Adapters, and 4-bit weights.

use serde::{Deserialize, Serialize};

use super::Names;
use crate::dtype::Dtype;

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
///
/// ```
/// use gpumem_estimate::{Dtype, Quantized, Step, models};
///
/// let model = models::llama_1b(128);
/// let wide = Step { parameters: Dtype::Bf16, ..Step::inference(1) };
/// let narrow = Step { quantized: Some(Quantized::default()), ..wide.clone() };
/// let saved = wide.estimate(&model)?.parameter_bytes.get() - narrow.estimate(&model)?.parameter_bytes.get();
/// // One and a half bytes for each of 973 million elements of linear layers; the embedding and the head stay as they are.
/// assert_eq!(saved, 973_078_528 * 3 / 2);
/// # Ok::<(), gpumem_estimate::Error>(())
/// ```
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
