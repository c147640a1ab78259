//! The operations of a mixture of experts: choosing experts, sorting rows by expert, and products with many weights at
//! once.

use crate::{
    eager::{Eager, Tensor},
    error::Error,
    shape::Shape,
};

impl Eager {
    /// Returns the largest elements of each row, and their positions.
    pub(crate) fn top_k(&self, input: &Tensor, count: u64) -> Result<[Tensor; 2], Error> {
        if count > input.shape.last() {
            return Err(self.mismatch(format!("{} or more", input.shape.with_last(count)), input));
        }
        let shape = input.shape.with_last(count);
        let values = self.output(&shape, input.dtype)?;
        let positions = self.integers(&shape)?;
        let saved = self.save_all(&[input], [&positions])?;
        Ok([self.with_gradients(&[input], values, saved), positions])
    }

    /// Returns rows of a tensor in another order: `input[index]`. Its gradient is always sorted (`index_put_` with
    /// accumulation).
    pub(crate) fn rows(&self, input: &Tensor, index: &Tensor) -> Result<Tensor, Error> {
        self.rows_at(index, input, 0)
    }

    /// Runs `grouped_mm`: groups of rows (n, inputs) are multiplied by their weights (groups, outputs, inputs).
    /// Autocast does not cover this operation: the rows get the type of the weights.
    pub(crate) fn grouped_product(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor, Error> {
        if rows.shape.rank() != 2 || weights.shape.rank() != 3 || rows.shape[1] != weights.shape[2] {
            return Err(self.pair("a product with the weights of experts", &rows.shape, &weights.shape));
        }
        let rows = self.to(rows, weights.dtype)?;
        let saved = self.save_factors(&rows, weights)?;
        let output = self.output(&Shape::from([rows.shape[0], weights.shape[1]]), rows.dtype)?;
        Ok(self.with_gradients(&[&rows, weights], output, saved))
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
}
