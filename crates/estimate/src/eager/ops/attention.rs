//! Scaled dot product attention in a single kernel, which does not store the matrix of scores.

use super::linear::Like;
use crate::{Dtype, Eager, Result, Shape, Tensor, ensure};

/// Returns whether PyTorch chooses cuDNN's kernel (`_scaled_dot_product_cudnn_attention`) and not the one from CUTLASS
/// (`_scaled_dot_product_efficient_attention`). On GPUs of compute capability 9.0 or 10.0 with cuDNN 9.15 or later, PyTorch
/// prefers cuDNN (`sdp_utils.cpp`, `check_prefer_cudnn_attention`). It does not support `f32`, and it cannot compute the
/// gradient of a mask.
fn uses_cudnn(dtype: Dtype, mask: Option<&Tensor>) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16) && mask.is_none_or(|mask| mask.edge.is_none())
}

impl Eager {
    /// Computes attention with a mask. No kernel accepts a mask whose last dimension is not in order
    /// (`sdp_utils_cpp.h`, `check_last_dim_stride_equals_1_dense`).
    pub(crate) fn masked_attention(&self, inputs: [&Tensor; 3], mask: &Tensor, dropout: f64) -> Result<Tensor> {
        let mask = self.lowered(mask)?;
        if mask.strides().last() == Some(&1) {
            self.fused_attention(inputs, Some(&mask))
        } else {
            self.attention_without_kernel(inputs, 1, Some(&mask), dropout)
        }
    }

    /// Computes attention without a fused kernel, as PyTorch does in `_scaled_dot_product_attention_math`: queries and
    /// keys are scaled in `f32`, and the scores are stored. Without another mask, the mask is causal.
    pub(crate) fn attention_without_kernel(
        &self,
        [queries, keys, values]: [&Tensor; 3],
        repeats: u64,
        mask: Option<&Tensor>,
        dropout: f64,
    ) -> Result<Tensor> {
        let [queries, keys, values] = [self.lowered(queries)?, self.lowered(keys)?, self.lowered(values)?];
        let dtype = queries.dtype;
        self.with_autocast(None, || {
            let wide = |tensor: &Tensor| self.to(tensor, Dtype::F32);
            let [narrow, keys, values] = [wide(&queries)?, wide(&keys)?, wide(&values)?];
            let queries = self.multiply_by_number(&narrow)?;
            let causal = match mask {
                Some(mask) => mask.clone(),
                None => self.output(&Shape::from([queries.shape[2], keys.shape[2]]), queries.dtype)?,
            };
            let [keys, values] = if repeats > 1 {
                [self.repeat(&keys, 1, repeats)?, self.repeat(&values, 1, repeats)?]
            } else {
                [keys, values]
            };
            let scaled = self.multiply_by_number(&self.transpose(&keys, 2, 3))?;
            let scores = self.matmul(&self.contiguous(&queries)?, &self.contiguous(&scaled)?)?;
            drop(scaled);
            let scores = self.add_in_place(&scores, &causal)?;
            let weights = self.safe_softmax(&scores)?;
            drop(scores);
            let weights = self.dropout(&weights, dropout)?;
            let output = self.to(&self.matmul(&weights, &self.contiguous(&values)?)?, dtype)?;
            // The weights are a result too, which is not used.
            drop(self.with_grad(false, || self.to(&weights, dtype))?);
            Ok(output)
        })
    }

    /// Computes attention of queries (batch, heads, n, size), and keys and values (batch, heads, m, size). Several
    /// heads of queries may share one head of keys. The inputs, the output and one number for each query are kept.
    pub(crate) fn fused_attention(&self, inputs: [&Tensor; 3], mask: Option<&Tensor>) -> Result<Tensor> {
        let [queries, keys, values] = inputs.map(|input| self.lowered(input));
        let (queries, keys, values) = (queries?, keys?, values?);
        let fits = queries.shape.rank() == 4
            && keys.shape.rank() == 4
            && keys.shape == values.shape
            && queries.shape[0] == keys.shape[0]
            && queries.shape[1].checked_rem(keys.shape[1]) == Some(0)
            && queries.shape[3] == keys.shape[3];
        ensure(fits, || self.pair("attention", &queries.shape, &keys.shape))?;
        let sizes = Sizes::of(&queries, &keys);
        let Sizes { batch, heads, length, size, .. } = sizes;
        let mask = mask.map(|mask| self.lowered(mask)).transpose()?;
        let is_cudnn = uses_cudnn(queries.dtype, mask.as_ref());
        let mask = mask.map(|mask| if is_cudnn { Ok(mask) } else { self.aligned(&mask) }).transpose()?;
        let mut all = vec![&queries, &keys, &values];
        all.extend(&mask);
        let mut saved = self.save_all(&all, all.iter().copied())?;
        // The kernel writes (batch, n, heads, size), and the result is a view of that. cuDNN uses the order of the
        // queries (`alloc_with_matching_layout`).
        let heads_first = is_cudnn && heads > 1 && queries.strides()[1] > queries.strides()[2];
        let rows = if heads_first { [batch, heads, length, size] } else { [batch, length, heads, size] };
        let rows = self.output(&Shape::from(rows), queries.dtype)?;
        // CUTLASS aligns the numbers of each head to 32.
        let numbers = if is_cudnn { length } else { length.next_multiple_of(32) };
        let needs = self.needs_grad(&all);
        let sums = needs.then(|| self.output(&Shape::from([batch, heads, numbers]), Dtype::F32)).transpose()?;
        let view = if heads_first { rows.clone() } else { self.with_grad(false, || self.transpose(&rows, 1, 2)) };
        drop(rows);
        let Some(sums) = sums else { return Ok(view) };
        saved.extend(self.save_all(&all, [&view, &sums])?);
        drop(sums);
        let likes = [&queries, &keys, &values].map(Like::of);
        let mask_dtype = mask.as_ref().filter(|mask| mask.edge.is_some()).map(|mask| mask.dtype);
        let (count, dtype) = (all.len(), queries.dtype);
        Ok(self.recorded(&all, view, move |eager, _| {
            let _saved = eager.unpack(saved)?;
            let grads = likes.iter().map(|like| like.empty(eager)).collect::<Result<Vec<_>>>()?;
            // The gradient has a part for each sequence, even if the mask is broadcast.
            let shape = Shape::from([batch, heads, length, sizes.keys.next_multiple_of(16)]);
            let mask_grad = mask_dtype.map(|dtype| eager.output(&shape, dtype)).transpose()?;
            if is_cudnn {
                eager.work_in(sizes.cudnn_workspace())?;
            } else {
                eager.efficient_backward(&sizes, dtype)?;
            }
            // The gradients have the order (batch, n, heads, size) as well.
            let ordered = |grad: Tensor| {
                let [batch, heads, length, size] = [0, 1, 2, 3].map(|at| grad.shape[at]);
                let rows = Shape::from([batch, length, heads, size]);
                Some(eager.transpose(&grad.with_shape(rows), 1, 2))
            };
            let mut grads: Vec<_> = grads.into_iter().map(ordered).collect();
            grads.push(mask_grad);
            grads.truncate(count);
            Ok(grads)
        }))
    }

    /// Copies a mask so that its rows start at multiples of 8 elements (`preprocess_mask`).
    fn aligned(&self, mask: &Tensor) -> Result<Tensor> {
        let strides = mask.strides();
        let Some((1, others)) = strides.split_last() else { return self.contiguous(mask) };
        if others.iter().all(|stride| stride % 8 == 0) {
            return Ok(mask.clone());
        }
        let last = mask.shape.last();
        let padded = self.output(&mask.shape.with_last(last + 8 - last % 8), mask.dtype)?;
        let strides = padded.strides();
        let padded = padded.as_view().with_shape(mask.shape.clone()).with_strides(&strides);
        Ok(self.recorded(&[mask], padded, |_, grad| Ok(vec![Some(grad.clone())])))
    }

    /// Allocates the temporary tensors of `_efficient_attention_backward` (`attention_backward.cu`).
    fn efficient_backward(&self, sizes: &Sizes, dtype: Dtype) -> Result<()> {
        let Sizes { batch, heads, length, size, .. } = *sizes;
        // The sum of output times gradient for each query, which the kernels for `f32` do not compute.
        let is_wide = dtype == Dtype::F32;
        let product = is_wide.then(|| self.output(&Shape::from([batch, length, heads, size]), dtype)).transpose()?;
        let sum = is_wide.then(|| self.output(&Shape::from([batch, length, heads]), dtype)).transpose()?;
        let _delta = self.output(&Shape::from([batch, heads, length]), Dtype::F32)?;
        drop((product, sum));
        self.work_in(sizes.efficient_workspace())
    }
}

/// The sizes of an attention operation.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: u64,
    heads: u64,
    key_heads: u64,
    length: u64,
    keys: u64,
    size: u64,
}

impl Sizes {
    fn of(queries: &Tensor, keys: &Tensor) -> Self {
        let [batch, heads, length, size] = [0, 1, 2, 3].map(|at| queries.shape[at]);
        Self { batch, heads, key_heads: keys.shape[1], length, keys: keys.shape[2], size }
    }

    /// Returns the workspace of the efficient kernel's backward pass. The gradient of the queries is added up in tiles
    /// of `f32`, each with 16 bytes for its lock (`kernel_backward.h`, `workspace_size`; the sizes of tiles are in
    /// `generate_kernels.py`).
    fn efficient_workspace(&self) -> Option<u64> {
        let (rows, columns) = if self.size <= 64 { (64, 64) } else { (128, 64) };
        let tiles = [self.batch, self.heads, self.length.div_ceil(rows), self.size.div_ceil(columns)];
        Shape::from(tiles).elements()?.checked_mul(16 + 4 * rows * columns)
    }

    /// Returns the workspace of cuDNN, as in `get_fe_workspace_size_node` of cudnn-frontend: the gradient of the
    /// queries in `f32`, a number for each query, and, if heads of queries share keys and values, their gradients for
    /// each head of the queries.
    fn cudnn_workspace(&self) -> Option<u64> {
        let Self { batch, heads, key_heads, length, keys, size } = *self;
        let queries = Shape::from([batch, heads, length, size + 1, 4]).elements()?;
        let copies = if heads == key_heads { 0 } else { 2 };
        queries.checked_add(Shape::from([copies, batch, heads, keys, size, 2]).elements()?)
    }
}

#[cfg(test)]
mod tests {
    use super::Sizes;

    const MIB: u64 = 1 << 20;

    /// The values come from torch's allocation histories on an H200, without what the allocator added.
    #[test]
    fn workspaces_are_those_of_an_h200() {
        let gpt2 = Sizes { batch: 32, heads: 12, key_heads: 12, length: 512, keys: 512, size: 64 };
        assert_eq!(gpt2.cudnn_workspace(), Some(48 * MIB + 768 * 1024));
        let llama = Sizes { batch: 32, heads: 32, key_heads: 8, length: 256, keys: 256, size: 64 };
        assert_eq!(llama.cudnn_workspace(), Some(129 * MIB));
        let vit = Sizes { batch: 32, heads: 12, key_heads: 12, length: 197, keys: 197, size: 64 };
        assert_eq!(vit.efficient_workspace(), Some(25_190_400));
    }
}
