//! The operations of a mixture of experts: choosing experts, sorting rows by expert, and products with many weights at
//! once.

use super::linear::Like;
use crate::{
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Eager {
    /// Returns the largest elements of each row, and their positions.
    pub(crate) fn top_k(&self, input: &Tensor, count: u64) -> Result<[Tensor; 2], Error> {
        if count > input.shape.last() {
            let expected = input.shape.with_last(count).to_string();
            return Err(self.mismatch(format!("{expected} or more"), input));
        }
        let shape = input.shape.with_last(count);
        let values = self.output(&shape, input.dtype)?;
        let positions = self.integers(&shape)?;
        let saved = self.save_all(&[input], [&positions])?;
        Ok([self.with_gradients(&[input], values, saved), positions])
    }

    /// Returns rows of a tensor in another order: `input[index]`. The index is kept. The gradient is a new tensor,
    /// first filled with zeros.
    pub(crate) fn rows(&self, input: &Tensor, index: &Tensor) -> Result<Tensor, Error> {
        let mut sizes = index.shape.sizes().to_vec();
        sizes.extend(&input.shape[1..]);
        let saved = self.save_all(&[input], [index])?;
        let output = self.output(&sizes.into(), input.dtype)?;
        let likes = Like::of_all(&[input]);
        let indices = index.shape.clone();
        Ok(self.recorded(&[input], output, move |eager, _| {
            let _index = eager.unpack(saved)?;
            let grads = eager.gradients(&likes)?;
            // `index_put_` with accumulation sorts the index: copies of the index and of the positions, before and
            // after sorting.
            let _sorted = (0..4).map(|_| eager.integers(&indices)).collect::<Result<Vec<_>, _>>()?;
            Ok(grads)
        }))
    }

    /// Runs `grouped_mm`: groups of rows (n, inputs) are multiplied by their weights (groups, outputs, inputs).
    /// Autocast does not cover this operation: the rows get the type of the weights.
    pub(crate) fn grouped_product(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor, Error> {
        if rows.shape.rank() != 2 || weights.shape.rank() != 3 || rows.shape[1] != weights.shape[2] {
            return Err(self.product_of(rows, weights));
        }
        let rows = self.to(rows, weights.dtype)?;
        self.product(&rows, weights, &Shape::from([rows.shape[0], weights.shape[1]]))
    }

    /// Runs `bmm` of (groups, n, inputs) and weights (groups, inputs, outputs).
    pub(crate) fn batched_product(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor, Error> {
        let fits = rows.shape.rank() == 3 && weights.shape.rank() == 3;
        if !fits || rows.shape[0] != weights.shape[0] || rows.shape[2] != weights.shape[1] {
            return Err(self.product_of(rows, weights));
        }
        let (rows, weights) = (self.lowered(rows)?, self.lowered(weights)?);
        self.use_cublas()?;
        self.product(&rows, &weights, &rows.shape.with_last(weights.shape[2]))
    }

    fn product_of(&self, rows: &Tensor, weights: &Tensor) -> Error {
        self.pair("a product with the weights of experts", &rows.shape, &weights.shape)
    }

    fn product(&self, rows: &Tensor, weights: &Tensor, shape: &Shape) -> Result<Tensor, Error> {
        let saved = self.save_factors(rows, weights)?;
        let output = self.output(shape, rows.dtype)?;
        Ok(self.with_gradients(&[rows, weights], output, saved))
    }

    /// Sums over one dimension, which is removed. The gradient of the input is the gradient of the sum, repeated
    /// without a copy.
    pub(crate) fn sum_over(&self, input: &Tensor, dimension: usize) -> Result<Tensor, Error> {
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

    /// Copies a tensor several times, one after the other.
    pub(crate) fn repeat(&self, input: &Tensor, times: u64) -> Result<Tensor, Error> {
        let rows = input.shape[0].checked_mul(times).ok_or_else(|| self.error(Kind::TooLarge))?;
        let output = self.output(&input.shape.with(0, rows), input.dtype)?;
        Ok(self.with_gradients(&[input], output, Vec::new()))
    }
}
