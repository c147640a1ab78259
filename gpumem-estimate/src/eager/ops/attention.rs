//! Scaled dot product attention with one kernel, which does not store the matrix of scores.

use super::linear::Like;
use crate::{
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

/// What attention is computed with, besides queries, keys and values.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AttentionArguments {
    /// A mask is passed to the kernel.
    pub(crate) has_mask: bool,
}

impl Eager {
    /// What PyTorch does without a kernel (`_scaled_dot_product_attention_math`), with a causal mask: queries and keys are scaled, the
    /// scores are stored.
    pub(crate) fn attention_without_kernel(
        &self,
        [queries, keys, values]: [&Tensor; 3],
        repeats: u64,
    ) -> Result<Tensor, Error> {
        let queries = self.multiply_by_number(queries)?;
        let mask = self.output(&Shape::from([queries.shape[2], keys.shape[2]]), queries.dtype)?;
        let (keys, values) = (self.repeat_heads(keys, repeats)?, self.repeat_heads(values, repeats)?);
        let scaled = self.multiply_by_number(&self.transpose(&keys, 2, 3))?;
        let scores = self.matmul(&self.contiguous(&queries)?, &self.contiguous(&scaled)?)?;
        drop(scaled);
        let scores = self.add_in_place(&scores, &mask)?;
        let weights = self.safe_softmax(&scores)?;
        drop(scores);
        self.matmul(&weights, &self.contiguous(&values)?)
    }

    /// Of queries (batch, heads, n, size), keys and values (batch, heads, m, size). Several heads of queries may share one of keys. It keeps its inputs, its output and one number
    /// for each query.
    pub(crate) fn fused_attention(
        &self,
        [queries, keys, values]: [&Tensor; 3],
        arguments: AttentionArguments,
    ) -> Result<Tensor, Error> {
        let [queries, keys, values] = [self.lowered(queries)?, self.lowered(keys)?, self.lowered(values)?];
        let fits = queries.shape.rank() == 4
            && keys.shape.rank() == 4
            && keys.shape == values.shape
            && queries.shape[0] == keys.shape[0]
            && queries.shape[1].checked_rem(keys.shape[1]) == Some(0)
            && queries.shape[3] == keys.shape[3];
        if !fits {
            let (first, second) = (queries.shape.clone(), keys.shape.clone());
            return Err(self.error(Kind::Pair { operation: "attention", first, second }));
        }
        let [batch, heads, length, size] = [0, 1, 2, 3].map(|at| queries.shape[at]);
        let all = [&queries, &keys, &values];
        let needs = self.needs_grad(&all);
        let mut saved = Vec::new();
        if needs {
            for input in all {
                saved.push(self.save(input)?);
            }
        }
        // The kernel writes (batch, n, heads, size); the result is a view of it.
        let rows = self.output(&Shape::from([batch, length, heads, size]), queries.dtype)?;
        // The kernel for `f32` and masks aligns the numbers of each head to 32.
        let is_efficient = queries.dtype == Dtype::F32 || arguments.has_mask;
        let numbers = if is_efficient { length.next_multiple_of(32) } else { length };
        let sums = needs.then(|| self.output(&Shape::from([batch, heads, numbers]), Dtype::F32)).transpose()?;
        let view = self.with_grad(false, || self.transpose(&rows, 1, 2));
        drop(rows);
        let Some(sums) = sums else { return Ok(view) };
        saved.push(self.save(&view)?);
        saved.push(self.save(&sums)?);
        drop(sums);
        let likes = all.map(Like::of);
        let [output] = self.record(&all, [view], move |eager, grads| {
            if grads[0].is_none() {
                return Ok(vec![None; 3]);
            }
            let _saved = saved.into_iter().map(|saved| saved.unpack(eager)).collect::<Result<Vec<_>, _>>()?;
            let grads = likes.iter().map(|like| Ok(Some(like.empty(eager)?))).collect::<Result<Vec<_>, Error>>()?;
            // The sum of output times gradient for each query.
            let _delta = eager.output(&Shape::from([batch, heads, length]), Dtype::F32)?;
            // The other kernels add up the gradient of the queries in `f32`.
            let is_wide = likes[0].dtype() == Dtype::F32;
            let shape = Shape::from([batch, heads, length, size]);
            let _wide = if is_wide { None } else { Some(eager.output(&shape, Dtype::F32)?) };
            // They have the order (batch, n, heads, size) as well.
            let ordered = |grad: Option<Tensor>| {
                grad.map(|grad| {
                    let [batch, heads, length, size] = [0, 1, 2, 3].map(|at| grad.shape[at]);
                    let rows = Shape::from([batch, length, heads, size]);
                    let strides = super::super::contiguous_strides(&rows);
                    eager.transpose(&Tensor { shape: rows, strides, ..grad }, 1, 2)
                })
            };
            Ok(grads.into_iter().map(ordered).collect())
        });
        Ok(output)
    }
}
