//! Self-attention.

use serde::{Deserialize, Serialize};

use super::Built;
use crate::{
    dtype::Dtype,
    eager::{AttentionArguments, Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

/// The sizes of a self-attention layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Attention {
    /// The size of a token.
    pub size: u64,
    /// How many heads the queries have.
    pub heads: u64,
    /// How many heads keys and values have; 0: as many as the queries.
    #[serde(default)]
    pub key_value_heads: u64,
    /// The size of a head; 0: the size of a token divided by the heads.
    #[serde(default)]
    pub head_size: u64,
    /// Queries, keys and values are one matrix product together.
    #[serde(default)]
    pub is_joined: bool,
    /// The projections have no bias.
    #[serde(default)]
    pub no_bias: bool,
    /// Queries and keys are rotated by their position.
    #[serde(default)]
    pub rotates: bool,
    /// The matrix of scores is stored: attention with one operation for each step.
    #[serde(default)]
    pub stores_scores: bool,
    /// The dropout of the stored scores.
    #[serde(default)]
    pub dropout: f64,
    /// Inference keeps keys and values.
    #[serde(default)]
    pub keeps_cache: bool,
}

impl Attention {
    /// The heads of keys and values.
    pub(super) fn key_value_heads(&self) -> u64 {
        if self.key_value_heads == 0 { self.heads } else { self.key_value_heads }
    }

    pub(super) fn head_size(&self) -> u64 {
        if self.head_size == 0 { self.size.checked_div(self.heads).unwrap_or(0) } else { self.head_size }
    }

    /// The sizes of all queries, of all keys and of all values of one token. `None` if they overflow.
    pub(super) fn widths(&self) -> Option<[u64; 3]> {
        let keys = self.key_value_heads().checked_mul(self.head_size())?;
        Some([self.heads.checked_mul(self.head_size())?, keys, keys])
    }

    pub(super) fn forward(&self, built: &Built, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        if input.shape.rank() != 3 || input.shape.last() != self.size {
            return Err(eager.mismatch(format!("(…, …, {})", self.size), input));
        }
        let (batch, length, head_size) = (input.shape[0], input.shape[1], self.head_size());
        let Some(widths) = self.widths() else { return Err(eager.error(Kind::TooLarge)) };
        let in_heads = |tensor: &Tensor, width: u64| {
            let heads = width.checked_div(head_size).unwrap_or(0);
            let shape = Shape::from([batch, length, heads, head_size]);
            // A part of a joined projection is not contiguous; a view of its heads needs no copy either.
            let view = if tensor.is_contiguous() { eager.reshape(tensor, &shape)? } else { eager.view(tensor, &shape) };
            Ok::<_, Error>(eager.transpose(&view, 1, 2))
        };
        let [mut queries, mut keys, mut values];
        if self.is_joined {
            let all = built.child("c_attn").forward(eager, input)?;
            let parts = eager.split_last(&all, widths)?;
            drop(all);
            queries = in_heads(&parts[0], widths[0])?;
            keys = in_heads(&parts[1], widths[1])?;
            values = in_heads(&parts[2], widths[2])?;
        } else {
            queries = in_heads(&built.child("q").forward(eager, input)?, widths[0])?;
            keys = in_heads(&built.child("k").forward(eager, input)?, widths[1])?;
            values = in_heads(&built.child("v").forward(eager, input)?, widths[2])?;
        }
        if self.rotates {
            // The angles have the type of the layer's input, which may be wider than that of the queries.
            let angles = rotations(eager, length, head_size, input.dtype)?;
            queries = rotated(eager, &queries, &angles)?;
            keys = rotated(eager, &keys, &angles)?;
        }
        if self.keeps_cache && !eager.training.get() {
            [keys, values] = eager.append_to_cache(&keys, &values, None)?;
        }
        let repeats = self.heads.checked_div(self.key_value_heads()).unwrap_or(1);
        let dtype = eager.autocast_dtype().unwrap_or(queries.dtype);
        let mut output = if self.stores_scores {
            if repeats > 1 {
                keys = eager.repeat_heads(&keys, repeats)?;
                values = eager.repeat_heads(&values, repeats)?;
            }
            stored(eager, [&queries, &keys, &values], self.dropout)?
        } else if repeats > 1 && dtype == Dtype::F32 {
            // The kernel for `f32` needs as many heads of keys as of queries, so PyTorch does without a kernel.
            eager.attention_without_kernel([&queries, &keys, &values], repeats, AttentionArguments::default())?
        } else {
            eager.fused_attention([&queries, &keys, &values], AttentionArguments::default())?
        };
        output = eager.contiguous(&eager.transpose(&output, 1, 2))?;
        output = eager.reshape(&output, &Shape::from([batch, length, widths[0]]))?;
        built.child("o").forward(eager, &output)
    }
}

/// `softmax(q @ k.T * scale) @ v` with one operation for each step.
fn stored(eager: &Eager, [queries, keys, values]: [&Tensor; 3], dropout: f64) -> Result<Tensor, Error> {
    let scores = eager.matmul(queries, &eager.transpose(keys, 2, 3))?;
    let scaled = eager.multiply_by_number(&scores)?;
    drop(scores);
    let weights = eager.softmax(&scaled)?;
    drop(scaled);
    let weights = eager.dropout(&eager.to(&weights, queries.dtype)?, dropout)?;
    eager.matmul(&weights, values)
}

/// The cosines and sines of all positions.
fn rotations(eager: &Eager, length: u64, head_size: u64, dtype: Dtype) -> Result<[Tensor; 2], Error> {
    let shape = Shape::from([1, 1, length, head_size]);
    Ok([eager.output(&shape, dtype)?, eager.output(&shape, dtype)?])
}

/// `x * cos + cat(-x2, x1) * sin`.
fn rotated(eager: &Eager, input: &Tensor, [cosines, sines]: &[Tensor; 2]) -> Result<Tensor, Error> {
    let last = input.shape.rank() - 1;
    let first = eager.multiply(input, cosines)?;
    let half = input.shape.last() / 2;
    let (lower, upper) = (eager.narrow(input, last, half), eager.narrow(input, last, input.shape.last() - half));
    let negative = eager.multiply_by_number(&upper)?;
    let turned = eager.concatenate(&[&negative, &lower], last)?;
    drop((negative, lower, upper));
    let second = eager.multiply(&turned, sines)?;
    drop(turned);
    eager.add(&first, &second)
}
