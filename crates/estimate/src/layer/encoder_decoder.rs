//! An encoder with a decoder that reads its output, and attention with a bias that depends on the distance between two
//! positions: T5, as written in transformers.

use serde::{Deserialize, Serialize};

use super::{Built, run_all};
use crate::{
    dtype::Dtype,
    eager::{AttentionArguments, Eager, Tensor},
    error::Error,
    shape::Shape,
};

/// The sizes of an attention layer with a relative position bias. There is no other bias, and the scores are not
/// scaled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RelativeAttention {
    /// The size of a token.
    pub size: u64,
    /// The number of heads.
    pub heads: u64,
    /// The size of a head.
    pub head_size: u64,
    /// The rows of its table of biases; 0 if the layer has none and uses the bias of the first layer that has one.
    pub buckets: u64,
    /// The dropout of the weights.
    pub dropout: f64,
    /// True if a token does not read later tokens. Inference then keeps keys and values.
    pub is_causal: bool,
    /// True if keys and values come from the output of the encoder. There is no table: the bias is 0.
    pub is_cross: bool,
}

impl RelativeAttention {
    pub(super) fn width(&self) -> Option<u64> {
        self.heads.checked_mul(self.head_size)
    }

    pub(super) fn forward(&self, built: &Built, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        if input.shape.rank() != 3 || input.shape.last() != self.size {
            return Err(eager.mismatch(format!("(…, …, {})", self.size), input));
        }
        let Some(width) = self.width() else { return Err(eager.too_large()) };
        let in_heads = |tensor: &Tensor| {
            let shape = Shape::from([tensor.shape[0], tensor.shape[1], self.heads, self.head_size]);
            Ok::<_, Error>(eager.transpose(&eager.reshape(tensor, &shape)?, 1, 2))
        };
        let queries = in_heads(&built.child("q").forward(eager, input)?)?;
        let encoded = eager.context().encoded.filter(|_| self.is_cross);
        if self.is_cross && encoded.is_none() {
            return Err(eager.invalid("cross attention needs an encoder"));
        }
        let source = encoded.as_ref().unwrap_or(input);
        let mut keys = in_heads(&built.child("k").forward(eager, source)?)?;
        let mut values = in_heads(&built.child("v").forward(eager, source)?)?;
        if (self.is_causal || self.is_cross) && !eager.settings.training {
            [keys, values] = eager.append_to_cache(&keys, &values, None)?;
        }
        let bias = self.bias(built, eager, &queries, &keys)?;
        // Each layer combines the bias with the mask for later tokens again.
        let mask = if self.is_causal { eager.select(&bias)? } else { bias };
        let arguments = AttentionArguments { mask: Some(&mask), dropout: self.dropout };
        let output = eager.masked_attention([&queries, &keys, &values], arguments)?;
        let output = eager.contiguous(&eager.transpose(&output, 1, 2))?;
        let output = eager.reshape(&output, &Shape::from([input.shape[0], input.shape[1], width]))?;
        built.child("o").forward(eager, &output)
    }

    /// Returns the bias of each head for each pair of positions. The first layer computes it for all layers.
    fn bias(&self, built: &Built, eager: &Eager, queries: &Tensor, keys: &Tensor) -> Result<Tensor, Error> {
        let mut context = eager.context();
        let known = if self.is_cross { &mut context.cross_bias } else { &mut context.bias };
        if let Some(bias) = known {
            return Ok(bias.clone());
        }
        let (length, key_length) = (queries.shape[2], keys.shape[2]);
        let bias = if self.is_cross {
            let zeros = eager.output(&Shape::from([1, self.heads, length, key_length]), queries.dtype)?;
            // Checkpointing needs an input with a gradient, so transformers gives the bias one.
            if eager.settings.checkpoints_blocks { eager.leaf(zeros) } else { zeros }
        } else {
            let buckets = buckets(eager, &Shape::from([length, key_length]))?;
            let table = built.parameters.first().copied();
            let table = table.ok_or_else(|| eager.invalid("no layer before it has a table of position biases"))?;
            let rows = eager.embedding(&buckets, &eager.parameter(table))?;
            drop(buckets);
            eager.unsqueeze_first(&eager.transpose(&eager.transpose(&rows, 1, 2), 0, 1))
        };
        *known = Some(bias.clone());
        eager.set_context(context);
        Ok(bias)
    }
}

/// Returns the bucket of each pair of positions, by their distance. Each small distance has its own bucket; larger ones
/// share buckets.
fn buckets(eager: &Eager, shape: &Shape) -> Result<Tensor, Error> {
    let distance = eager.integers(shape)?;
    let is_small = eager.output(shape, Dtype::Bool)?;
    let offset = eager.integers(shape)?;
    let large = {
        let logarithm = eager.output(shape, Dtype::F32)?;
        let scaled = eager.output(shape, Dtype::F32)?;
        drop(logarithm);
        let whole = eager.integers(shape)?;
        drop(scaled);
        let shifted = eager.integers(shape)?;
        drop(whole);
        let most = eager.integers(shape)?;
        let large = eager.integers(shape)?;
        drop((shifted, most));
        large
    };
    let chosen = eager.integers(shape)?;
    drop((distance, is_small, large, chosen));
    Ok(offset)
}

impl Built {
    /// Runs the encoder and the decoder. The encoder reads the input, and the decoder reads the target tokens. In
    /// training these are the labels, shifted by one position.
    pub(super) fn run_both(&self, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        let mut context = eager.context();
        let Some(target) = context.target.clone() else {
            return Err(eager.invalid("a decoder needs target tokens"));
        };
        (context.bias, context.cross_bias) = (None, None);
        eager.set_context(context.clone());
        let encoded = run_all(&self.children, eager, input)?;
        let target = if eager.settings.training { eager.shifted_labels(&target)? } else { target };
        context.encoded = Some(encoded);
        eager.set_context(context.clone());
        let output = run_all(&self.shortcut, eager, &target)?;
        (context.bias, context.cross_bias) = (None, None);
        // In inference, the output of the model refers to the output of the encoder.
        if eager.settings.training {
            context.encoded = None;
        }
        eager.set_context(context);
        Ok(output)
    }
}
