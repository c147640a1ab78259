//! Operations of models that make images.

use super::linear::Like;
use crate::{
    class::Class,
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Eager {
    /// `group_norm` over dimension 1, which autocast runs in `f32`. It keeps its input, and a mean and a deviation of each group.
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
        let needs = self.needs_grad(&all);
        let input_saved = needs.then(|| self.save(&input)).transpose()?;
        let output = self.output(&input.shape, input.dtype)?;
        let statistics = Shape::from([input.shape[0], groups]);
        let statistics = [self.output(&statistics, input.dtype)?, self.output(&statistics, input.dtype)?];
        let Some(input_saved) = input_saved else { return Ok(output) };
        let statistics = statistics.iter().map(|tensor| self.save(tensor)).collect::<Result<Vec<_>, _>>()?;
        let likes = all.map(|input| input.edge.map(|_| Like::of(input)));
        let sums = Shape::from([input.shape[0], input.shape[1]]);
        let [output] = self.record(&all, [output], move |eager, grads| {
            let _saved = (
                input_saved.unpack(eager)?,
                statistics.into_iter().map(|saved| saved.unpack(eager)).collect::<Result<Vec<_>, _>>()?,
            );
            if grads[0].is_none() {
                return Ok(vec![None; 3]);
            }
            let grads = likes.iter().map(|like| like.as_ref().map(|like| like.empty(eager)).transpose()).collect();
            // Two sums over the pixels of each channel.
            let _sums = [eager.output(&sums, Dtype::F32)?, eager.output(&sums, Dtype::F32)?];
            grads
        });
        Ok(output)
    }

    /// `interpolate(mode="nearest")` of an image.
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

    /// Each row divided by its length: `x / x.pow(2).sum(-1, keepdim=True).pow(0.5)`.
    pub(crate) fn unit_vectors(&self, input: &Tensor) -> Result<Tensor, Error> {
        let squares = self.power(input)?;
        let sums = self.mean_of_last(&squares)?;
        drop(squares);
        let lengths = self.power(&sums)?;
        self.multiply(input, &lengths)
    }

    /// `mse_loss` with a target of the same shape, which autocast runs in `f32`. It keeps both.
    pub(crate) fn mean_squares(&self, input: &Tensor) -> Result<Tensor, Error> {
        let input = self.raised(input)?;
        let target = self.empty(&input.shape, input.dtype, Class::Inputs)?;
        let needs = self.needs_grad(&[&input]);
        let saved = if needs { vec![self.save(&input)?, self.save(&target)?] } else { vec![] };
        let loss = self.output(&Shape::default(), input.dtype)?;
        // The squares, before their mean.
        drop(self.output(&input.shape, input.dtype)?);
        if !needs {
            return Ok(loss);
        }
        let like = Like::of(&input);
        let [loss] = self.record(&[&input], [loss], move |eager, grads| {
            let _saved = saved.into_iter().map(|saved| saved.unpack(eager)).collect::<Result<Vec<_>, _>>()?;
            Ok(vec![grads[0].as_ref().map(|_| like.empty(eager)).transpose()?])
        });
        Ok(loss)
    }

    /// A tensor with the same elements and strides. Dimensions of size 1 at its end give it this rank.
    pub(crate) fn with_rank(&self, input: &Tensor, rank: usize) -> Result<Tensor, Error> {
        if input.shape.rank() >= rank {
            return Ok(input.clone());
        }
        let mut sizes = input.shape.sizes().to_vec();
        sizes.resize(rank, 1);
        self.reshape(input, &sizes.into())
    }
}
