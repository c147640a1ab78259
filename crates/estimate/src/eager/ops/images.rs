//! Operations of models that read images, and a loss for images.

use crate::{
    class::Class,
    eager::{Eager, Tensor},
    error::Error,
    shape::Shape,
};

impl Eager {
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
}
