//! Sums over many elements, and the largest of many. PyTorch splits a sum among several blocks of threads, which write their parts into
//! a buffer.

use crate::{Dtype, Eager, Result, Shape, Tensor, ensure};

/// The threads of a block (`mnt_wrapper`), the threads of a multiprocessor of an A100, H100 or H200, and the threads of a warp.
const BLOCK: u64 = 512;
const MULTIPROCESSOR: u64 = 2048;
const WARP: u64 = 32;
/// A thread adds up between 16 and 256 elements.
const FEWEST: u64 = 16;
const MOST: u64 = 256;

/// Returns the largest power of two that does not exceed a number.
fn last_power(number: u64) -> u64 {
    1 << number.max(1).ilog2()
}

/// Returns the bytes of the buffer for `outputs` sums in `f32` of `inputs` elements each: `setReduceConfig` and
/// `global_memory_size` in `Reduce.cuh`. Either the elements of a sum are adjacent in memory, or those of different
/// sums are.
fn buffer(outputs: u64, inputs: u64, sums_neighbours: bool, multiprocessors: u64) -> Option<u64> {
    let vector =
        if sums_neighbours { 1 } else { [4, 2].into_iter().find(|size| outputs.is_multiple_of(*size)).unwrap_or(1) };
    let (first, second) = if sums_neighbours { (inputs, outputs) } else { (outputs / vector, inputs) };
    let most = BLOCK / vector;
    let [first, second] = [first, second].map(|size| if size < most { last_power(size) } else { most });
    let height = second.min(most / first.min(WARP));
    let width = first.min(most / height);
    let (mut step_input, mut step_output) = if sums_neighbours { (width, 1) } else { (1, width) };
    let each = inputs.div_ceil(step_input);
    let splits_block = each >= height * FEWEST || each >= MOST;
    if splits_block {
        step_input *= height;
    } else {
        step_output *= height;
    }
    let each = inputs.div_ceil(step_input);
    let grid = (outputs / vector).div_ceil(step_output).max(1);
    let target = multiprocessors.checked_mul(MULTIPROCESSOR / (width * height))?;
    if !splits_block || each < MOST || grid > target {
        return Some(0);
    }
    let blocks = target.div_ceil(grid).min(each.div_ceil(FEWEST)).max(each.div_ceil(MOST));
    if blocks < 2 {
        return Some(0);
    }
    let parts = if sums_neighbours { 1 } else { width * vector };
    outputs.checked_mul(4)?.checked_mul(blocks)?.checked_mul(parts)
}

impl Eager {
    /// Returns the largest elements of each row, and their positions.
    pub(crate) fn top_k(&self, input: &Tensor, count: u64) -> Result<[Tensor; 2]> {
        let fits = count <= input.shape.last();
        ensure(fits, || self.mismatch(format!("{} or more", input.shape.with_last(count)), input))?;
        let shape = input.shape.with_last(count);
        let values = self.output(&shape, input.dtype)?;
        let positions = self.integers(&shape)?;
        let saved = self.save_all(&[input], [&positions])?;
        Ok([self.with_gradients(&[input], values, saved), positions])
    }

    /// Sums over one dimension, which is removed. The gradient of the input is the gradient of the sum, repeated
    /// without a copy.
    pub(crate) fn sum_over(&self, input: &Tensor, dimension: usize) -> Result<Tensor> {
        let mut sizes = input.shape.sizes().to_vec();
        sizes.remove(dimension);
        let output = self.output(&sizes.into(), input.dtype)?;
        let shape = input.shape.clone();
        Ok(self.recorded(&[input], output, move |_, grad| {
            let mut strides = grad.strides();
            strides.insert(dimension, 0);
            Ok(vec![Some(grad.as_view().with_shape(shape).with_strides(&strides))])
        }))
    }

    /// Allocates the buffer for a sum over all dimensions that a result of this shape does not have. The buffer lives
    /// while the kernel is started.
    pub(crate) fn sum_buffer(&self, input: &Tensor, result: &Shape) -> Result<()> {
        let (Some(all), Some(outputs @ 1..)) = (input.shape.elements(), result.elements()) else { return Ok(()) };
        // The buffer depends on whether the sum is over the dimension whose elements are adjacent.
        let strides = input.strides();
        let fastest = (0..input.shape.rank()).filter(|at| input.shape[*at] > 1).min_by_key(|at| strides[*at]);
        let offset = input.shape.rank().saturating_sub(result.rank());
        let sums_neighbours = fastest.is_some_and(|at| at < offset || result[at - offset] == 1);
        let bytes = buffer(outputs, all / outputs, sums_neighbours, self.step.multiprocessors).unwrap_or(0);
        self.output(&Shape::from([bytes]), Dtype::U8).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::buffer;

    /// The values come from torch's allocation history of ViT-B on an H200: the gradients of the biases with a batch of
    /// 32.
    #[test]
    fn buffers_are_those_of_pytorch() {
        const KIB: u64 = 1024;
        assert_eq!(buffer(768, 32 * 197, false, 132), Some(38_016 * KIB));
        assert_eq!(buffer(3072, 32 * 197, false, 132), Some(135_168 * KIB));
        assert_eq!(buffer(768, 197, false, 132), Some(0), "a block is enough");
        assert_eq!(buffer(32 * 197, 768, true, 132), Some(0), "there are enough sums for all multiprocessors");
    }
}
