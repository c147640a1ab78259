//! What a mixture of experts needs: the choice of experts, rows in the order of the experts, and products with many weights at once.

use super::linear::Like;
use crate::{
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Eager {
    /// The largest elements of each row, and their positions.
    pub(crate) fn top_k(&self, input: &Tensor, count: u64) -> Result<[Tensor; 2], Error> {
        if count > input.shape.last() {
            let expected = input.shape.with_last(count).to_string();
            return Err(self.mismatch(format!("{expected} or more"), input));
        }
        let shape = input.shape.with_last(count);
        let values = self.output(&shape, input.dtype)?;
        let positions = self.integers(&shape)?;
        if !self.needs_grad(&[input]) {
            return Ok([values, positions]);
        }
        let saved = self.save(&positions)?;
        let like = Like::of(input);
        let [values] = self.record(&[input], [values], move |eager, grads| {
            let _positions = saved.unpack(eager)?;
            Ok(vec![grads[0].as_ref().map(|_| like.empty(eager)).transpose()?])
        });
        Ok([values, positions])
    }

    /// Rows of a tensor in another order: `input[index]`. It keeps the index. The gradient begins with zeros.
    pub(crate) fn rows(&self, input: &Tensor, index: &Tensor) -> Result<Tensor, Error> {
        let mut sizes = index.shape.sizes().to_vec();
        sizes.extend(&input.shape[1..]);
        let needs = self.needs_grad(&[input]);
        let saved = needs.then(|| self.save(index)).transpose()?;
        let output = self.output(&sizes.into(), input.dtype)?;
        let Some(saved) = saved else { return Ok(output) };
        let like = Like::of(input);
        let [output] = self.record(&[input], [output], move |eager, grads| {
            let index = saved.unpack(eager)?;
            if grads[0].is_none() {
                return Ok(vec![None]);
            }
            let grad = like.empty(eager)?;
            // `index_put_` with accumulation sorts the index: copies of it and of the positions, before and after.
            let _sorted = (0..4).map(|_| eager.integers(&index.shape)).collect::<Result<Vec<_>, _>>()?;
            Ok(vec![Some(grad)])
        });
        Ok(output)
    }

    /// `grouped_mm`: groups of rows (n, inputs) are multiplied with their weights (groups, outputs, inputs), or (groups, inputs, outputs)
    /// if they are transposed. Autocast does not know it: the rows get the type of the weights.
    pub(crate) fn grouped_product(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor, Error> {
        if rows.shape.rank() != 2 || weights.shape.rank() != 3 || rows.shape[1] != weights.shape[2] {
            return Err(self.product_of(rows, weights));
        }
        let rows = self.to(rows, weights.dtype)?;
        self.product(&rows, weights, &Shape::from([rows.shape[0], weights.shape[1]]))
    }

    /// `bmm` of (groups, n, inputs) and weights (groups, inputs, outputs).
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
        let (first, second) = (rows.shape.clone(), weights.shape.clone());
        self.error(Kind::Pair { operation: "a product with the weights of experts", first, second })
    }

    fn product(&self, rows: &Tensor, weights: &Tensor, shape: &Shape) -> Result<Tensor, Error> {
        let needs = self.needs_grad(&[rows, weights]);
        let weights_saved = (needs && rows.edge.is_some()).then(|| self.save(weights)).transpose()?;
        let rows_saved = (needs && weights.edge.is_some()).then(|| self.save(rows)).transpose()?;
        let output = self.output(shape, rows.dtype)?;
        if !needs {
            return Ok(output);
        }
        let likes = [Like::of(rows), Like::of(weights)];
        let [output] = self.record(&[rows, weights], [output], move |eager, grads| {
            let unpack = |saved: Option<super::super::Saved>| saved.map(|saved| saved.unpack(eager)).transpose();
            let saved = [unpack(weights_saved)?, unpack(rows_saved)?];
            if grads[0].is_none() {
                return Ok(vec![None, None]);
            }
            let grad = |(saved, like): (&Option<Tensor>, &Like)| saved.as_ref().map(|_| like.empty(eager)).transpose();
            saved.iter().zip(&likes).map(grad).collect()
        });
        Ok(output)
    }

    /// The sum over one dimension, which is gone afterwards. Its gradient is the gradient of the sum, repeated without a copy.
    pub(crate) fn sum_over(&self, input: &Tensor, dimension: usize) -> Result<Tensor, Error> {
        let mut sizes = input.shape.sizes().to_vec();
        sizes.remove(dimension);
        let output = self.output(&sizes.into(), input.dtype)?;
        let shape = input.shape.clone();
        Ok(self.recorded(&[input], output, move |_, grads| {
            let repeated = |grad: &Tensor| {
                let mut strides = grad.strides();
                strides.insert(dimension, 0);
                grad.as_view().with_shape(shape.clone()).with_strides(&strides)
            };
            Ok(vec![grads[0].as_ref().map(repeated)])
        }))
    }

    /// A tensor several times, one after the other: a copy.
    pub(crate) fn repeat(&self, input: &Tensor, times: u64) -> Result<Tensor, Error> {
        let mut sizes = input.shape.sizes().to_vec();
        sizes[0] = sizes[0].checked_mul(times).ok_or_else(|| self.error(Kind::TooLarge))?;
        self.copied_to(input, &sizes.into())
    }

    /// A new tensor of elements of another type that no gradient flows through, such as sorted numbers.
    pub(crate) fn new_like(&self, input: &Tensor, dtype: Dtype) -> Result<Tensor, Error> {
        self.output(&input.shape, dtype)
    }
}
