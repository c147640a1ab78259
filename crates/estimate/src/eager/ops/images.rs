//! Operations of models that generate images.

use super::linear::Like;
use crate::{
    class::Class,
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Eager {
    /// Runs `group_norm` over dimension 1, in `f32` under autocast. The input, and a mean and a deviation for each
    /// group are kept.
    pub(crate) fn group_norm(
        &self,
        input: &Tensor,
        groups: u64,
        [weight, bias]: [&Tensor; 2],
    ) -> Result<Tensor, Error> {
        if input.shape.rank() < 2 || input.shape[1] != weight.shape.last() {
            return Err(self.channels(weight.shape.last(), input));
        }
        let input = self.contiguous(&self.raised(input)?)?;
        let all = [&input, weight, bias];
        let mut saved = self.save_all(&all, [&input])?;
        let output = self.output(&input.shape, input.dtype)?;
        let statistics = Shape::from([input.shape[0], groups]);
        let statistics = [self.output(&statistics, input.dtype)?, self.output(&statistics, input.dtype)?];
        saved.extend(self.save_all(&all, &statistics)?);
        let likes = Like::of_all(&all);
        let sums = Shape::from([input.shape[0], input.shape[1]]);
        Ok(self.recorded(&all, output, move |eager, _| {
            let _saved = eager.unpack(saved)?;
            let grads = eager.gradients(&likes)?;
            // The sums over the pixels of each channel.
            let _sums = [eager.output(&sums, Dtype::F32)?, eager.output(&sums, Dtype::F32)?];
            Ok(grads)
        }))
    }

    /// Runs `interpolate(mode="nearest")` of an image.
    pub(crate) fn upsample(&self, input: &Tensor, factor: u64) -> Result<Tensor, Error> {
        if input.shape.rank() != 4 {
            return Err(self.mismatch("(…, …, …, …)", input));
        }
        let mut sizes = input.shape.sizes().to_vec();
        for size in &mut sizes[2..] {
            *size = size.checked_mul(factor).ok_or_else(|| self.error(Kind::TooLarge))?;
        }
        self.copied_to(input, &sizes.into())
    }

    /// Divides each row by its length: `x / x.pow(2).sum(-1, keepdim=True).pow(0.5)`.
    pub(crate) fn unit_vectors(&self, input: &Tensor) -> Result<Tensor, Error> {
        let squares = self.power(input)?;
        let sums = self.mean_of_last(&squares)?;
        drop(squares);
        let lengths = self.power(&sums)?;
        self.multiply(input, &lengths)
    }

    /// Runs `mse_loss` with a target of the same shape, in `f32` under autocast. Both are kept.
    pub(crate) fn mean_squares(&self, input: &Tensor) -> Result<Tensor, Error> {
        let input = self.raised(input)?;
        let target = self.empty(&input.shape, input.dtype, Class::Inputs)?;
        let saved = self.save_all(&[&input], [&input, &target])?;
        let loss = self.output(&Shape::default(), input.dtype)?;
        // The squares are a tensor before the mean is computed.
        drop(self.output(&input.shape, input.dtype)?);
        Ok(self.with_gradient_like(&input, loss, saved))
    }

    /// Returns a tensor with the same elements and strides, extended to this rank by dimensions of size 1 at the end.
    pub(crate) fn with_rank(&self, input: &Tensor, rank: usize) -> Result<Tensor, Error> {
        if input.shape.rank() >= rank {
            return Ok(input.clone());
        }
        let mut sizes = input.shape.sizes().to_vec();
        sizes.resize(rank, 1);
        self.reshape(input, &sizes.into())
    }
}
