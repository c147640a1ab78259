//! Convolutions and pooling.

use serde::{Deserialize, Serialize};

use super::linear::Like;
use crate::{
    Dtype, Eager, Result, Shape, Tensor,
    eager::{Convolution, channels_last_strides},
    ensure,
};

/// The sizes of a convolution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv {
    /// The channels of the input.
    pub inputs: u64,
    /// The channels of the output.
    pub outputs: u64,
    /// The window, with a step of 1 if it has none.
    #[serde(flatten)]
    pub window: Window,
    /// The number of groups of channels; 0 means 1.
    #[serde(default)]
    pub groups: u64,
    /// True if there is no bias.
    #[serde(default)]
    pub no_bias: bool,
}

/// The sizes of a window. A list with one element applies to all dimensions of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// The size of the window: one number for each dimension of the image.
    pub kernel: Vec<u64>,
    /// The step of the window; that of a pooling window is its size if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stride: Vec<u64>,
    /// The padding on each side; 0 if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub padding: Vec<u64>,
}

impl Window {
    /// Creates a square window for an image with two dimensions.
    pub fn square(kernel: u64, stride: u64, padding: u64) -> Self {
        Self { kernel: vec![kernel; 2], stride: vec![stride], padding: vec![padding] }
    }
}

/// Returns the number of positions of a window: at least 1. `None` if the window does not fit or the sizes overflow.
fn positions(size: u64, kernel: u64, stride: u64, padding: u64) -> Option<u64> {
    let room = size.checked_add(padding.checked_mul(2)?)?.checked_sub(kernel)?;
    room.checked_div(stride).filter(|_| kernel > 0)?.checked_add(1)
}

impl Eager {
    /// Convolves an image with any number of dimensions. The weight has the shape (outputs, inputs / groups, …).
    pub(crate) fn convolution(
        &self,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        conv: &Conv,
    ) -> Result<Tensor> {
        let dimensions = weight.shape.rank() - 2;
        let inputs = weight.shape[1].checked_mul(conv.groups).ok_or_else(|| self.too_large())?;
        let fits = input.shape.rank() == dimensions + 2 && input.shape[1] == inputs;
        ensure(fits, || self.mismatch(format!("(…, {inputs}{})", ", …".repeat(dimensions)), input))?;
        let shape = self.windows(input, weight.shape[0], &conv.window)?;
        let (input, weight) = (self.lowered(input)?, self.lowered(weight)?);
        let bias = bias.map(|bias| self.lowered(bias)).transpose()?;
        let mut all = vec![&input, &weight];
        all.extend(&bias);
        let saved = self.save_all(&all, [&input, &weight])?;
        let channels_last = input.has_channels_last();
        // If each channel is convolved by itself, PyTorch uses its own kernel, unless the channels are last or there
        // are 32 or more in `f16` (`Convolution.cpp`, `use_cudnn_depthwise`).
        let is_depthwise = conv.groups > 1 && conv.groups == inputs;
        let is_half = input.dtype == Dtype::F16 && inputs >= 32;
        let uses_cudnn = channels_last || !is_depthwise || is_half;
        let mut output = self.output(&shape, input.dtype)?;
        if channels_last {
            output = output.with_channels_last();
        }
        let convolution = Convolution {
            images: [input.shape.clone(), output.shape.clone()],
            weight: weight.shape.clone(),
            groups: conv.groups,
            dtype: input.dtype,
            channels_last,
            is_product: weight.shape.sizes()[2..].iter().chain(&conv.window.stride).all(|size| *size == 1),
        };
        {
            let _copies = [self.in_order(&input, channels_last)?, self.in_order(&weight, channels_last)?];
            if uses_cudnn {
                self.use_cudnn(&convolution, false)?;
            }
        }
        let likes = Like::of_all(&all);
        Ok(self.recorded(&all, output, move |eager, grad| {
            let saved = eager.unpack(saved)?;
            let _grad = eager.in_order(grad, channels_last)?;
            let gradient = |(at, like): (usize, &Option<Like>)| {
                let Some(like) = like else { return Ok(None) };
                let result = like.empty(eager)?;
                if at == 2 {
                    let mut sum = vec![1; grad.shape.rank()];
                    sum[1] = grad.shape[1];
                    eager.sum_buffer(grad, &sum.into())?;
                    return Ok(Some(result));
                }
                // The gradient of the input needs the weight, and that of the weight needs the input.
                let _copy = eager.in_order(&saved[1 - at], channels_last)?;
                if uses_cudnn {
                    eager.use_cudnn(&convolution, at == 1)?;
                }
                Ok(Some(if at == 0 && channels_last { result.with_channels_last() } else { result }))
            };
            likes.iter().enumerate().map(gradient).collect()
        }))
    }

    /// Copies the tensor into the order that a convolution reads, unless it already has that order.
    fn in_order(&self, tensor: &Tensor, channels_last: bool) -> Result<Option<Tensor>> {
        let is_so = if channels_last {
            tensor.has_strides(&channels_last_strides(&tensor.shape))
        } else {
            tensor.is_contiguous()
        };
        if is_so { Ok(None) } else { self.with_grad(false, || self.output(&tensor.shape, tensor.dtype)).map(Some) }
    }

    /// Runs max pooling, which also returns the positions of the largest elements, in `i64`.
    pub(crate) fn max_pool(&self, input: &Tensor, window: &Window) -> Result<Tensor> {
        self.check_image(input, window.kernel.len())?;
        let shape = self.windows(input, input.shape[1], window)?;
        let mut saved = self.save_all(&[input], [input])?;
        let output = self.output(&shape, input.dtype)?;
        let positions = self.integers(&shape)?;
        saved.extend(self.save_all(&[input], [&positions])?);
        Ok(self.with_gradients(&[input], output, saved))
    }

    /// Runs average pooling to an image of this size. For an image of one pixel, PyTorch computes a mean, which saves
    /// nothing.
    pub(crate) fn adaptive_average_pool(&self, input: &Tensor, size: &[u64]) -> Result<Tensor> {
        self.check_image(input, size.len())?;
        let mut sizes = input.shape.sizes()[..2].to_vec();
        sizes.extend(size);
        let saved = self.save_all(&[input], size.iter().any(|size| *size != 1).then_some(input))?;
        let output = self.output(&sizes.into(), input.dtype)?;
        if !self.needs_grad(&[input]) {
            return Ok(output);
        }
        Ok(self.with_gradients(&[input], output, saved).in_order_of(input))
    }

    fn check_image(&self, input: &Tensor, dimensions: usize) -> Result<()> {
        let rank = dimensions + 2;
        ensure(input.shape.rank() == rank, || self.mismatch(format!("({})", vec!["…"; rank].join(", ")), input))
    }

    /// Returns the shape of a result that has a pixel for each position of a window.
    fn windows(&self, input: &Tensor, channels: u64, window: &Window) -> Result<Shape> {
        let mut sizes = vec![input.shape[0], channels];
        for (at, kernel) in window.kernel.iter().enumerate() {
            let (stride, padding) = (window.stride[at], window.padding[at]);
            sizes.push(positions(input.shape[at + 2], *kernel, stride, padding).ok_or_else(|| {
                self.mismatch(format!("a window of {kernel} with stride {stride} and padding {padding} or more"), input)
            })?);
        }
        Ok(sizes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::positions;

    /// The values come from `torch.nn` modules with these arguments.
    #[test]
    fn sizes_are_those_of_pytorch() {
        assert_eq!(positions(224, 7, 2, 3), Some(112));
        assert_eq!(positions(5, 2, 2, 0), Some(2));
        assert_eq!(positions(2, 3, 1, 0), None);
        assert_eq!(positions(5, 0, 1, 0), None);
        assert_eq!(positions(5, 2, 0, 0), None);
        assert_eq!(positions(u64::MAX, 1, 1, 1), None);
    }
}
