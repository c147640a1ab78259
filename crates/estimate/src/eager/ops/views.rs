//! Views share the memory of their input. Elements are copied only if their order requires it.

use crate::{Dtype, Eager, Result, Shape, Tensor, ensure};

impl Eager {
    /// Records an operation that passes its gradient on.
    pub(crate) fn passing_on(&self, input: &Tensor, output: Tensor) -> Tensor {
        self.recorded(&[input], output, |_, grad| Ok(vec![Some(grad.clone())]))
    }

    /// Returns a view with another shape, and records it: its gradient is a view of the gradient of the result. The last dimension of the
    /// input must be in order, as in a part of a joined projection.
    pub(crate) fn view(&self, input: &Tensor, shape: Shape) -> Tensor {
        let view = input.as_view().with_shape(shape);
        let shape = input.shape.clone();
        self.recorded(&[input], view, move |_, grad| Ok(vec![Some(grad.as_view().with_shape(shape))]))
    }

    /// Returns the elements in order. If they are not in order, this is a copy.
    pub(crate) fn contiguous(&self, input: &Tensor) -> Result<Tensor> {
        if input.is_contiguous() { Ok(input.clone()) } else { self.copied(input) }
    }

    /// Runs `clone()`, which passes the gradient on.
    pub(crate) fn copied(&self, input: &Tensor) -> Result<Tensor> {
        let output = self.output(&input.shape, input.dtype)?;
        Ok(self.passing_on(input, output))
    }

    /// Returns the tensor in another shape with the same number of elements. If the elements are not in order, they are
    /// copied.
    pub(crate) fn reshape(&self, input: &Tensor, shape: &Shape) -> Result<Tensor> {
        ensure(input.shape.elements() == shape.elements(), || self.pair("a change of shape", &input.shape, shape))?;
        let input = self.contiguous(input)?;
        Ok(self.view(&input, shape.clone()))
    }

    /// Repeats a dimension of size 1 without a copy.
    pub(crate) fn expand(&self, input: &Tensor, dimension: usize, size: u64) -> Tensor {
        let mut strides = input.strides();
        strides[dimension] = 0;
        let view = input.as_view().with_shape(input.shape.with(dimension, size)).with_strides(&strides);
        // The sum over the repeated dimension is computed when the gradient is checked against the shape of the input.
        self.passing_on(input, view)
    }

    /// Copies each element of a dimension, such as heads, this many times.
    pub(crate) fn repeat(&self, input: &Tensor, dimension: usize, times: u64) -> Result<Tensor> {
        let size = input.shape[dimension].checked_mul(times).ok_or_else(|| self.too_large())?;
        let output = self.output(&input.shape.with(dimension, size), input.dtype)?;
        Ok(self.with_gradients(&[input], output, Vec::new()))
    }

    /// Swaps two dimensions.
    pub(crate) fn transpose(&self, input: &Tensor, first: usize, second: usize) -> Tensor {
        let (mut sizes, mut strides) = (input.shape.sizes().to_vec(), input.strides());
        sizes.swap(first, second);
        strides.swap(first, second);
        let view = input.as_view().with_shape(sizes.into()).with_strides(&strides);
        self.recorded(&[input], view, move |eager, grad| Ok(vec![Some(eager.transpose(grad, first, second))]))
    }

    /// Returns a view with a new first dimension of size 1.
    pub(crate) fn unsqueeze_first(&self, input: &Tensor) -> Tensor {
        let mut sizes = vec![1];
        sizes.extend(input.shape.sizes());
        let of_input = input.strides();
        let mut strides = of_input.clone();
        strides.insert(0, input.shape.sizes().first().unwrap_or(&1) * of_input.first().unwrap_or(&1));
        let view = input.as_view().with_shape(sizes.into()).with_strides(&strides);
        let shape = input.shape.clone();
        let back = move |grad: &Tensor| grad.as_view().with_shape(shape).with_strides(&of_input);
        self.recorded(&[input], view, |_, grad| Ok(vec![Some(back(grad))]))
    }

    /// Returns parts of the last dimension as views. The gradients of all parts are copied into one tensor.
    pub(crate) fn split_last<const N: usize>(&self, input: &Tensor, sizes: [u64; N]) -> Result<[Tensor; N]> {
        let fits = sizes.iter().sum::<u64>() == input.shape.last();
        ensure(fits, || self.mismatch(input.shape.with_last(sizes.iter().sum()), input))?;
        let strides = input.strides();
        let part = |size: u64| input.as_view().with_shape(input.shape.with_last(size)).with_strides(&strides);
        let parts = sizes.map(part);
        if !self.needs_grad(&[input]) {
            return Ok(parts);
        }
        let (shape, dtype) = (input.shape.clone(), input.dtype);
        Ok(self.record(&[input], parts, move |eager, grads| {
            if grads.iter().all(Option::is_none) {
                return Ok(vec![None]);
            }
            // Parts without a gradient are filled with zeros.
            Ok(vec![Some(eager.output(&shape, dtype)?)])
        }))
    }

    /// Returns a part of one dimension as a view. The gradient is padded with zeros.
    pub(crate) fn narrow(&self, input: &Tensor, dimension: usize, size: u64) -> Tensor {
        let view = input.as_view().with_shape(input.shape.with(dimension, size)).with_strides(&input.strides());
        self.with_gradients(&[input], view, Vec::new())
    }

    /// Joins several tensors along a dimension.
    pub(crate) fn concatenate(&self, inputs: &[&Tensor], dimension: usize) -> Result<Tensor> {
        let Some(first) = inputs.first() else {
            return Err(self.invalid("there is nothing to join"));
        };
        let mut sum = 0_u64;
        for input in inputs {
            let fits = input.shape.with(dimension, 0) == first.shape.with(dimension, 0);
            ensure(fits, || self.pair("joining", &first.shape, &input.shape))?;
            sum = sum.checked_add(input.shape[dimension]).ok_or_else(|| self.too_large())?;
        }
        let output = self.output(&first.shape.with(dimension, sum), first.dtype)?;
        let parts: Vec<_> = inputs.iter().map(|input| (input.shape.clone(), input.edge.is_some())).collect();
        Ok(self.recorded(inputs, output, move |_, grad| {
            // Each gradient is a view of one part.
            let part = |(shape, needs): &(Shape, bool)| {
                needs.then(|| grad.as_view().with_shape(shape.clone()).with_strides(&grad.strides()))
            };
            Ok(parts.iter().map(part).collect())
        }))
    }

    /// Allocates a tensor of integers, such as positions.
    pub(crate) fn integers(&self, shape: &Shape) -> Result<Tensor> {
        self.output(shape, Dtype::I64)
    }
}
