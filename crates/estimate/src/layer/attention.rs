//! Self-attention.

use serde::{Deserialize, Serialize};

use super::{Built, Layer};
use crate::{Dtype, Eager, Error, Result, Shape, Tensor, ensure};

/// The sizes of a self-attention layer. Without heads, it is an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Attention {
    /// The size of a token.
    pub size: u64,
    /// The number of heads of the queries.
    pub heads: u64,
    /// The number of heads of keys and values; 0 for as many as the queries have.
    pub key_value_heads: u64,
    /// The size of a head; 0 for the size of a token divided by the heads.
    pub head_size: u64,
    /// True if queries, keys and values come from a single matrix product.
    pub is_joined: bool,
    /// True if no projection has a bias.
    pub no_bias: bool,
    /// True if the output projection has no bias.
    pub no_output_bias: bool,
    /// True if the projection of keys has no bias.
    pub no_key_bias: bool,
    /// Where cross attention gets keys and values: `encoder`, or the name of a tensor that an earlier layer has left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<String>,
    /// True if queries are scaled by a separate operation, and the heads of queries, keys and values are copied.
    pub copies_heads: bool,
    /// True if the parts of a joined product are taken one by one (`x[..., a:b]`), instead of with one split.
    pub takes_parts: bool,
    /// The normalization of queries and keys.
    pub norm: HeadNorm,
    /// True if queries and keys are rotated by their position.
    pub rotates: bool,
    /// The number of elements at the start of a head that are rotated; the rest is joined with them afterwards. 0 for
    /// all.
    pub rotated: u64,
    /// True if pairs of elements are rotated as complex numbers, in `f32`.
    pub rotates_complex: bool,
    /// True if queries are multiplied by a number for each position.
    pub scales_queries: bool,
    /// The maximum number of tokens that a token sees; 0 for all.
    pub window: u64,
    /// True if scores are limited: `cap * tanh(score / cap)`. This needs stored scores.
    pub caps_scores: bool,
    /// True if the matrix of scores is stored, because attention uses a separate operation for each step.
    pub stores_scores: bool,
    /// The dropout of the stored scores.
    pub dropout: f64,
    /// True if a bias that depends on the distance of two positions is added to the scores, which are not scaled (T5). With
    /// `reads`, the bias is 0.
    pub relative: bool,
    /// The rows of the table of biases; 0 if the layer has none and uses the bias of the first layer that has one.
    pub buckets: u64,
    /// True if the bias also masks later tokens. In other layers, the kernel does that.
    pub is_causal: bool,
    /// True if inference keeps keys and values.
    pub keeps_cache: bool,
    /// The names of the inner layers.
    pub names: AttentionNames,
}

/// A normalization over the last dimension, such as that of the queries and keys of each head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HeadNorm {
    /// No normalization.
    #[default]
    None,
    /// RMS norm.
    Rms,
    /// RMS norm as in Gemma.
    Gemma,
    /// Layer norm.
    Layer,
    /// RMS norm without a weight, after the rotation.
    WithoutWeight,
}

impl HeadNorm {
    pub(crate) fn layer(self, size: u64) -> Option<Layer> {
        match self {
            Self::None | Self::WithoutWeight => None,
            Self::Rms => Some(Layer::RmsNorm { size }),
            Self::Gemma => Some(Layer::GemmaNorm { size }),
            Self::Layer => Some(Layer::LayerNorm { size }),
        }
    }
}

/// The names of the layers inside attention.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AttentionNames {
    /// The projection of queries.
    pub queries: String,
    /// The projection of keys.
    pub keys: String,
    /// The projection of values.
    pub values: String,
    /// The joint projection of queries, keys and values.
    pub joined: String,
    /// The output projection.
    pub output: String,
    /// The norms of queries and keys.
    pub norms: [String; 2],
}

impl Default for AttentionNames {
    fn default() -> Self {
        let [queries, keys, values, joined, output] =
            ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"].map(str::to_owned);
        Self { queries, keys, values, joined, output, norms: ["q_norm", "k_norm"].map(str::to_owned) }
    }
}

impl Attention {
    /// Returns the number of heads of keys and values.
    pub(crate) fn key_value_heads(&self) -> u64 {
        if self.key_value_heads == 0 { self.heads } else { self.key_value_heads }
    }

    pub(crate) fn head_size(&self) -> u64 {
        if self.head_size == 0 { self.size.checked_div(self.heads).unwrap_or(0) } else { self.head_size }
    }

    /// Returns how many elements of a head are rotated.
    pub(super) fn rotated(&self) -> u64 {
        if self.rotated == 0 { self.head_size() } else { self.rotated }
    }

    /// Returns the sizes of all queries, all keys and all values of one token. `None` if they overflow.
    pub(super) fn widths(&self) -> Option<[u64; 3]> {
        let keys = self.key_value_heads().checked_mul(self.head_size())?;
        Some([self.heads.checked_mul(self.head_size())?, keys, keys])
    }

    pub(super) fn forward(&self, built: &Built, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        let fits = input.shape.rank() == 3 && input.shape.last() == self.size;
        ensure(fits, || eager.mismatch(format!("(…, …, {})", self.size), input))?;
        let (batch, length, head_size) = (input.shape[0], input.shape[1], self.head_size());
        let Some(widths) = self.widths() else { return Err(eager.too_large()) };
        let read = self.reads.as_deref().map(|slot| eager.left(slot)).transpose()?;
        let source = read.as_ref().unwrap_or(input);
        let fits = source.shape.rank() == 3 && source.shape.last() == self.size && source.shape[0] == batch;
        ensure(fits, || eager.mismatch(format!("({batch}, …, {})", self.size), source))?;
        let in_heads = |tensor: &Tensor, width: u64| {
            let heads = width.checked_div(head_size).unwrap_or(0);
            let shape = Shape::from([batch, tensor.shape[1], heads, head_size]);
            // A part of a joint projection is not contiguous, but a view of its heads needs no copy either.
            let view = if tensor.is_contiguous() { eager.reshape(tensor, &shape)? } else { eager.view(tensor, shape) };
            Ok::<_, Error>(eager.transpose(&view, 1, 2))
        };
        let normed = |tensor: Tensor, name: &str| {
            let Some(norm) = built.children.iter().find(|child| child.name == name) else { return Ok(tensor) };
            Ok::<_, Error>(eager.transpose(&norm.forward(eager, &eager.transpose(&tensor, 1, 2))?, 1, 2))
        };
        let names = &self.names;
        let [mut queries, mut keys, values];
        // If only a part of each head is rotated, a variable of the Python function holds the joined product until the
        // end.
        let mut joined = None;
        if self.is_joined {
            let all = built.child(&names.joined).forward(eager, input)?;
            let parts = if self.takes_parts {
                let last = all.shape.rank() - 1;
                widths.map(|width| eager.narrow(&all, last, width))
            } else {
                eager.split_last(&all, widths)?
            };
            joined = (self.rotated > 0).then_some(all);
            queries = in_heads(&parts[0], widths[0])?;
            keys = in_heads(&parts[1], widths[1])?;
            values = in_heads(&parts[2], widths[2])?;
        } else {
            let mut projected = built.child(&names.queries).forward(eager, input)?;
            if self.copies_heads {
                projected = eager.multiply_by_number(&projected)?;
            }
            let copied = |heads: Tensor| if self.copies_heads { eager.contiguous(&heads) } else { Ok(heads) };
            queries = copied(in_heads(&projected, widths[0])?)?;
            drop(projected);
            keys = copied(in_heads(&built.child(&names.keys).forward(eager, source)?, widths[1])?)?;
            values = copied(in_heads(&built.child(&names.values).forward(eager, source)?, widths[2])?)?;
        }
        queries = normed(queries, &names.norms[0])?;
        keys = normed(keys, &names.norms[1])?;
        (queries, keys) = self.rotate(eager, &queries, &keys, input.dtype)?;
        let [keys, values] = self.kept(eager, [keys, values])?;
        let inputs = [&queries, &keys, &values];
        let (output, weights) =
            if self.relative { self.attend_with_bias(built, eager, inputs)? } else { self.attend(eager, inputs)? };
        let output = eager.contiguous(&eager.transpose(&output, 1, 2))?;
        let output = eager.reshape(&output, &Shape::from([batch, length, widths[0]]))?;
        let result = built.child(&names.output).forward(eager, &output);
        // Variables of the Python function hold these, so they live until it returns.
        drop((joined, queries, keys, values, weights));
        result
    }

    /// Rotates queries and keys by their positions, as far as the layer does this. The earlier tensors live until both
    /// results exist.
    fn rotate(&self, eager: &Eager, queries: &Tensor, keys: &Tensor, dtype: Dtype) -> Result<(Tensor, Tensor)> {
        let (mut queries, mut keys) = (queries.clone(), keys.clone());
        if self.rotates {
            // The angles have the type of the layer's input, which may be wider than that of the queries.
            let shape = Shape::from([1, 1, queries.shape[2], self.rotated()]);
            (queries, keys) = if self.rotates_complex {
                let angles = eager.shared(("angles", self.window), &shape, Dtype::F32)?;
                (rotated_complex(eager, &queries, &angles)?, rotated_complex(eager, &keys, &angles)?)
            } else {
                let cosines = eager.shared(("cosines", self.window), &shape, dtype)?;
                let sines = eager.shared(("sines", self.window), &shape, dtype)?;
                let angles = [&cosines, &sines];
                (self.rotated_part(eager, &queries, &angles)?, self.rotated_part(eager, &keys, &angles)?)
            };
        }
        if self.norm == HeadNorm::WithoutWeight {
            let normed = |tensor: &Tensor| {
                let wide = eager.normalized_by_square(&eager.to(tensor, Dtype::F32)?)?;
                eager.to(&wide, tensor.dtype)
            };
            (queries, keys) = (normed(&queries)?, normed(&keys)?);
        }
        if self.scales_queries {
            let dtype = queries.dtype;
            let scales = eager.output(&Shape::from([1, 1, queries.shape[2], 1]), Dtype::F32)?;
            queries = eager.to(&eager.multiply(&queries, &scales)?, dtype)?;
        }
        Ok((queries, keys))
    }

    fn rotated_part(&self, eager: &Eager, input: &Tensor, angles: &[&Tensor; 2]) -> Result<Tensor> {
        if self.rotated == 0 {
            return rotated(eager, input, angles);
        }
        let last = input.shape.rank() - 1;
        let part = eager.narrow(input, last, self.rotated);
        let rest = eager.narrow(input, last, input.shape.last() - self.rotated);
        let part = rotated(eager, &part, angles)?;
        eager.concatenate(&[&part, &rest], last)
    }

    /// Returns keys and values as attention uses them, after inference has added them to its cache.
    fn kept(&self, eager: &Eager, [keys, values]: [Tensor; 2]) -> Result<[Tensor; 2]> {
        if !self.keeps_cache || eager.is_training() {
            return Ok([keys, values]);
        }
        let window = (self.window > 0).then_some(self.window);
        eager.append_to_cache(&keys, &values, window)
    }

    /// Returns the values weighted by the scores, and the scores if they are stored.
    fn attend(&self, eager: &Eager, [queries, keys, values]: [&Tensor; 3]) -> Result<(Tensor, Option<Tensor>)> {
        let repeats = self.heads.checked_div(self.key_value_heads()).unwrap_or(1);
        let dtype = eager.autocast_dtype().unwrap_or(queries.dtype);
        let (length, key_length) = (queries.shape[2], keys.shape[2]);
        // A mask of numbers is created for each sequence of the batch.
        let matrix = Shape::from([queries.shape[0], 1, length, key_length]);
        // `repeat_kv` of transformers.
        let repeated = |tensor: &Tensor| match (repeats, self.key_value_heads()) {
            (1, _) => Ok(tensor.clone()),
            (_, 1) => Ok(eager.expand(tensor, 1, repeats)),
            _ => eager.repeat(tensor, 1, repeats),
        };
        // The kernel needs no mask without a window, or while all tokens fit into the window.
        let has_mask = self.window > 0 && key_length > self.window;
        if self.stores_scores || self.caps_scores {
            let (keys, values) = (repeated(keys)?, repeated(values)?);
            let needs_mask = self.caps_scores || has_mask;
            let mask = needs_mask.then(|| eager.shared(("mask", self.window), &matrix, queries.dtype)).transpose()?;
            let (output, weights) = stored(eager, [queries, &keys, &values], mask.as_ref(), self)?;
            return Ok((output, Some(weights)));
        }
        if has_mask {
            // The model creates the mask once, and each layer converts it.
            let _mask = eager.shared(("mask", self.window), &Shape::from([1, 1, length, key_length]), Dtype::Bool)?;
            let (keys, values) = (repeated(keys)?, repeated(values)?);
            let converted = eager.output(&matrix, dtype)?;
            return Ok((eager.fused_attention([queries, &keys, &values], Some(&converted))?, None));
        }
        let output = if repeats > 1 && dtype == Dtype::F32 {
            // The kernel for `f32` needs as many heads of keys as of queries, so PyTorch does not use a kernel.
            eager.attention_without_kernel([queries, keys, values], repeats, None, self.dropout)?
        } else {
            eager.fused_attention([queries, keys, values], None)?
        };
        Ok((output, None))
    }
}

/// Runs `softmax(q @ k.T * scale + mask) @ v` with a separate operation for each step.
fn stored(
    eager: &Eager,
    [queries, keys, values]: [&Tensor; 3],
    mask: Option<&Tensor>,
    attention: &Attention,
) -> Result<(Tensor, Tensor)> {
    let mut scaled = eager.multiply_by_number(&eager.matmul(queries, &eager.transpose(keys, 2, 3))?)?;
    if attention.caps_scores {
        scaled = eager.multiply_by_number(&scaled)?;
        scaled = eager.tanh(&scaled)?;
        scaled = eager.multiply_by_number(&scaled)?;
    }
    if let Some(mask) = mask {
        scaled = eager.add(&scaled, mask)?;
    }
    if mask.is_some() {
        scaled = eager.to(&scaled, Dtype::F32)?;
    }
    let weights = eager.softmax(&scaled)?;
    drop(scaled);
    let weights = eager.dropout(&eager.to(&weights, queries.dtype)?, attention.dropout)?;
    Ok((eager.matmul(&weights, values)?, weights))
}

/// Multiplies pairs of elements by complex numbers, in `f32`.
fn rotated_complex(eager: &Eager, input: &Tensor, angles: &Tensor) -> Result<Tensor> {
    let product = eager.multiply(&eager.to(input, Dtype::F32)?, angles)?;
    eager.to(&product, input.dtype)
}

/// Runs `x * cos + cat(-x2, x1) * sin`.
fn rotated(eager: &Eager, input: &Tensor, [cosines, sines]: &[&Tensor; 2]) -> Result<Tensor> {
    let last = input.shape.rank() - 1;
    let first = eager.multiply(input, cosines)?;
    let half = input.shape.last() / 2;
    let lower = eager.narrow(input, last, half);
    let negative = eager.multiply_by_number(&eager.narrow(input, last, input.shape.last() - half))?;
    let mut second = eager.concatenate(&[&negative, &lower], last)?;
    drop((negative, lower));
    second = eager.multiply(&second, sines)?;
    eager.add(&first, &second)
}
