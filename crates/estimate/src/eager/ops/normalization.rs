//! Normalization.

use crate::{Dtype, Eager, Result, Shape, Tensor, ensure};

impl Eager {
    /// Runs `layer_norm` over the last dimension. The input is kept, and a mean and a deviation in `f32` for each row.
    pub(crate) fn layer_norm(&self, input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let input = self.contiguous(&self.raised(input)?)?;
        self.check_last(&input, weight)?;
        let all = [&input, weight, bias];
        let mut saved = self.save_all(&all, [&input])?;
        let output = self.output(&input.shape, input.dtype)?;
        let rows = input.shape.with_last(1);
        let statistics = [self.output(&rows, Dtype::F32)?, self.output(&rows, Dtype::F32)?];
        saved.extend(self.save_all(&all, &statistics)?);
        Ok(self.with_gradients(&all, output, saved))
    }

    /// Runs RMS norm as transformers writes it out: in `f32`, `weight * (x * rsqrt(mean(x ** 2) + eps)).to(type of x)`.
    pub(crate) fn rms_norm_written_out(&self, input: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.check_last(input, weight)?;
        let normalized = self.normalized_by_square(&self.to(input, Dtype::F32)?)?;
        let narrow = self.to(&normalized, input.dtype)?;
        drop(normalized);
        self.multiply(weight, &narrow)
    }

    /// Runs RMS norm as Gemma writes it out: in `f32`, `(x * rsqrt(mean(x ** 2) + eps) * (1 + weight)).to(type of x)`.
    pub(crate) fn gemma_norm(&self, input: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.check_last(input, weight)?;
        let normalized = self.normalized_by_square(&self.to(input, Dtype::F32)?)?;
        let factor = self.add_number(&self.to(weight, Dtype::F32)?)?;
        let output = self.multiply(&normalized, &factor)?;
        drop((normalized, factor));
        self.to(&output, input.dtype)
    }

    /// Runs `x * rsqrt(mean(x ** 2) + eps)`, with an operation for each step.
    pub(crate) fn normalized_by_square(&self, input: &Tensor) -> Result<Tensor> {
        let variance = self.mean_of_last(&self.power(input)?)?;
        let factor = self.rsqrt(&self.add_number(&variance)?)?;
        self.multiply(input, &factor)
    }

    /// Divides each row by its length: `x / x.pow(2).sum(-1, keepdim=True).pow(0.5)`.
    pub(crate) fn unit_vectors(&self, input: &Tensor) -> Result<Tensor> {
        let sums = self.mean_of_last(&self.power(input)?)?;
        let lengths = self.power(&sums)?;
        self.multiply(input, &lengths)
    }

    /// Returns the mean over the last dimension, which then has size 1.
    pub(crate) fn mean_of_last(&self, input: &Tensor) -> Result<Tensor> {
        let output = self.output(&input.shape.with_last(1), input.dtype)?;
        Ok(self.with_gradients(&[input], output, Vec::new()))
    }

    /// Runs batch norm over dimension 1. The input is kept and, in training, a mean and a deviation for each channel.
    pub(crate) fn batch_norm(&self, input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let channels = weight.shape.last();
        ensure(input.shape.rank() >= 2, || self.mismatch(format!("(…, {channels}, …)"), input))?;
        ensure(input.shape[1] == channels, || self.mismatch(input.shape.with(1, channels), input))?;
        let all = [input, weight, bias];
        let mut saved = self.save_all(&all, [input])?;
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        if self.is_training() {
            for _ in 0..2 {
                let statistics = self.output(&Shape::from([channels]), Dtype::F32)?;
                saved.extend(self.save_all(&all, [&statistics])?);
            }
        }
        Ok(self.with_gradients(&all, output, saved))
    }

    /// Checks that the last dimension of an input has the size of a weight.
    fn check_last(&self, input: &Tensor, weight: &Tensor) -> Result<()> {
        let size = weight.shape.last();
        ensure(size == input.shape.last(), || self.mismatch(input.shape.with_last(size), input))
    }
}
