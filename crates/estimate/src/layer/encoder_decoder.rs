//! An encoder with a decoder that reads its output, and the bias of attention that depends on the distance between two
//! positions: T5, as written in transformers.

use super::{Attention, Built, run_all};
use crate::{Dtype, Eager, Result, Shape, Tensor};

/// The slots of the biases of self-attention and of cross attention, which the first block computes and the others share.
const BIASES: [&str; 2] = ["self-attention bias", "cross attention bias"];

impl Attention {
    /// Attends with a relative position bias. Each layer combines the bias with the mask for later tokens again. Also
    /// returns that mask.
    pub(super) fn attend_with_bias(
        &self,
        built: &Built,
        eager: &Eager,
        inputs: [&Tensor; 3],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let bias = self.bias(built, eager, inputs[0], inputs[1])?;
        let mask = if self.is_causal { eager.select(&bias)? } else { bias };
        Ok((eager.masked_attention(inputs, &mask, self.dropout)?, Some(mask)))
    }

    /// Returns the bias of each head for each pair of positions. The first layer computes it for all layers.
    fn bias(&self, built: &Built, eager: &Eager, queries: &Tensor, keys: &Tensor) -> Result<Tensor> {
        let is_cross = self.reads.is_some();
        let slot = BIASES[usize::from(is_cross)];
        if let Ok(bias) = eager.left(slot) {
            return Ok(bias);
        }
        let (length, key_length) = (queries.shape[2], keys.shape[2]);
        let bias = if is_cross {
            let zeros = eager.output(&Shape::from([1, self.heads, length, key_length]), queries.dtype)?;
            // Checkpointing needs an input with a gradient, so transformers gives the bias one.
            if eager.checkpoints_blocks() { eager.leaf(zeros) } else { zeros }
        } else {
            let buckets = buckets(eager, &Shape::from([length, key_length]))?;
            let table = built.parameters.first().copied();
            let table = table.ok_or_else(|| eager.invalid("no layer before it has a table of position biases"))?;
            let rows = eager.embedding(&buckets, &eager.parameter(table))?;
            drop(buckets);
            eager.unsqueeze_first(&eager.transpose(&eager.transpose(&rows, 1, 2), 0, 1))
        };
        eager.leave(slot, bias.clone());
        Ok(bias)
    }
}

/// Returns the bucket of each pair of positions, by their distance. Each small distance has its own bucket; larger ones
/// share buckets.
fn buckets(eager: &Eager, shape: &Shape) -> Result<Tensor> {
    let _distance = eager.integers(shape)?;
    let _is_small = eager.output(shape, Dtype::Bool)?;
    let offset = eager.integers(shape)?;
    // The logarithm, scaled, as whole numbers, and shifted: each is freed when the next one exists.
    let mut shifted = None;
    for dtype in [Dtype::F32, Dtype::F32, Dtype::I64, Dtype::I64] {
        shifted = Some(eager.output(shape, dtype)?);
    }
    let most = eager.integers(shape)?;
    let _large = eager.integers(shape)?;
    drop((shifted, most));
    let _chosen = eager.integers(shape)?;
    Ok(offset)
}

impl Built {
    /// Runs the encoder and the decoder. The encoder reads the input, and the decoder reads the target tokens. In
    /// training these are the labels, shifted by one position.
    pub(super) fn run_both(&self, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        let target = eager.left("target").map_err(|_| eager.invalid("a decoder needs target tokens"))?;
        let forget = |slots: &[&str]| eager.slots.borrow_mut().retain(|name, _| !slots.contains(&name.as_str()));
        let encoded = run_all(&self.children, eager, input)?;
        forget(&BIASES);
        let target = if eager.is_training() { eager.shifted_labels(&target)? } else { target };
        eager.leave("encoder", encoded);
        let output = run_all(&self.shortcut, eager, &target)?;
        // In inference, the output of the model refers to the output of the encoder.
        forget(if eager.is_training() { &["encoder", BIASES[0], BIASES[1]] } else { &BIASES });
        Ok(output)
    }
}
