//! Operations on each element.

use super::linear::Like;
use crate::{Dtype, Eager, Error, Result, Shape, Tensor, eager::Saved, ensure};

/// The tensor that an operation with one input saves for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saves {
    Nothing,
    Input,
    Output,
}

/// Operations on each element, with the tensors that their backward passes need.
macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident: $saves:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name(&self, input: &Tensor) -> Result<Tensor> {
            self.unary(input, Saves::$saves, 0)
        }
    )*};
}

impl Eager {
    /// Runs an operation. In the backward pass, this many temporary tensors are live together with the gradient, which is
    /// a new tensor.
    pub(crate) fn unary(&self, input: &Tensor, saves: Saves, temporaries: usize) -> Result<Tensor> {
        let mut kept = self.save_all(&[input], (saves == Saves::Input).then_some(input))?;
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        kept.extend(self.save_all(&[input], (saves == Saves::Output).then_some(&output))?);
        Ok(self.with_gradient_of_result(input, output, kept, temporaries))
    }

    /// Records an operation whose gradient is a new tensor like the gradient of its result.
    fn with_gradient_of_result(&self, input: &Tensor, output: Tensor, saved: Vec<Saved>, temporaries: usize) -> Tensor {
        self.recorded(&[input], output, move |eager, grad| {
            let _saved = eager.unpack(saved)?;
            let new = || Ok::<_, Error>(eager.output(&grad.shape, grad.dtype)?.in_order_of(grad));
            let _temporaries = (0..temporaries).map(|_| new()).collect::<Result<Vec<_>, _>>()?;
            Ok(vec![Some(new()?)])
        })
    }

    /// Records a sum of two tensors. The gradient is passed on to the inputs that need one.
    fn sum(&self, inputs: [&Tensor; 2], output: Tensor) -> Tensor {
        let needs = inputs.map(|input| input.edge.is_some());
        self.recorded(&inputs, output, move |_, grad| Ok(needs.map(|needs| needs.then(|| grad.clone())).to_vec()))
    }

    /// Returns a result in the memory of the input. The backward pass of `relu_` needs the result. That of `relu6_` (`hardtanh_`) needs
    /// the input, so it is copied first. Nothing is kept or copied unless there will be a backward pass.
    pub(crate) fn overwritten(&self, input: &Tensor, needs_copy: bool) -> Result<Tensor> {
        if !self.needs_grad(&[input]) {
            return Ok(input.clone());
        }
        let copy = needs_copy.then(|| self.output(&input.shape, input.dtype)).transpose()?;
        let kept = copy.map_or_else(|| input.clone(), |copy| copy.in_order_of(input));
        let saved = vec![self.save(&kept)?];
        drop(kept);
        Ok(self.with_gradient_of_result(input, input.detached(), saved, 0))
    }

    unary! {
        tanh: Output;
        sigmoid: Output;
        /// Returns the logarithms of a softmax over the last dimension.
        log_softmax: Output;
        /// Multiplies by a number.
        multiply_by_number: Nothing;
    }

    /// Adds a number. The gradient is passed on.
    pub(crate) fn add_number(&self, input: &Tensor) -> Result<Tensor> {
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        Ok(self.passing_on(input, output))
    }

    /// Raises elements to a fixed power, in `f32` under autocast. The backward pass is
    /// `grad * (exponent * input ** (exponent - 1))`.
    pub(crate) fn power(&self, input: &Tensor) -> Result<Tensor> {
        self.unary(&self.raised(input)?, Saves::Input, 2)
    }

    /// Runs `rsqrt`. The backward pass is `-0.5 * grad * result ** 3`.
    pub(crate) fn rsqrt(&self, input: &Tensor) -> Result<Tensor> {
        self.unary(&self.raised(input)?, Saves::Output, 2)
    }

    /// Runs GELU with `tanh` as transformers writes it out (`NewGELUActivation`):
    /// `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`.
    pub(crate) fn gelu_written_out(&self, input: &Tensor) -> Result<Tensor> {
        let half = self.multiply_by_number(input)?;
        // Each assignment frees the tensor before it.
        let mut factor = self.multiply_by_number(&self.power(input)?)?;
        factor = self.add(input, &factor)?;
        factor = self.multiply_by_number(&factor)?;
        factor = self.tanh(&factor)?;
        factor = self.add_number(&factor)?;
        self.multiply(&half, &factor)
    }

    /// Returns the type of an operation on two tensors.
    fn common_dtype(first: Dtype, second: Dtype) -> Dtype {
        let rank = |dtype| match dtype {
            Dtype::F64 => 3,
            Dtype::F32 => 2,
            Dtype::F16 | Dtype::Bf16 => 1,
            _ => 0,
        };
        if rank(second) > rank(first) { second } else { first }
    }

    fn result_of_two(&self, operation: &'static str, first: &Tensor, second: &Tensor) -> Result<Tensor> {
        let shape = first.shape.broadcast(&second.shape);
        let shape = shape.ok_or_else(|| self.pair(operation, &first.shape, &second.shape))?;
        let output = self.output(&shape, Self::common_dtype(first.dtype, second.dtype))?;
        Ok(output.in_order_of(if first.shape == shape { first } else { second }))
    }

    pub(crate) fn add(&self, first: &Tensor, second: &Tensor) -> Result<Tensor> {
        let output = self.result_of_two("a sum", first, second)?;
        Ok(self.sum([first, second], output))
    }

    /// Runs `first += second`.
    pub(crate) fn add_in_place(&self, first: &Tensor, second: &Tensor) -> Result<Tensor> {
        let fits = first.shape.broadcast(&second.shape).as_ref() == Some(&first.shape);
        ensure(fits, || self.pair("a sum in place", &first.shape, &second.shape))?;
        Ok(self.sum([first, second], first.detached()))
    }

    pub(crate) fn multiply(&self, first: &Tensor, second: &Tensor) -> Result<Tensor> {
        let saved = self.save_factors(first, second)?;
        let output = self.result_of_two("a product", first, second)?;
        let needs = [first, second].map(|input| input.edge.is_some());
        Ok(self.recorded(&[first, second], output, move |eager, grad| {
            let _saved = eager.unpack(saved)?;
            let product = || Ok(eager.output(&grad.shape, grad.dtype)?.in_order_of(grad));
            needs.iter().map(|needs| needs.then(product).transpose()).collect()
        }))
    }

    /// Runs dropout, which keeps a mask with one byte for each element.
    pub(crate) fn dropout(&self, input: &Tensor, probability: f64) -> Result<Tensor> {
        let is_probability = (0.0..=1.0).contains(&probability);
        ensure(is_probability, || self.invalid(format!("{probability} is not a probability")))?;
        if probability == 0.0 || !self.is_training() {
            return Ok(input.clone());
        }
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        let mask = self.output(&input.shape, Dtype::Bool)?;
        let saved = self.save_all(&[input], [&mask])?;
        Ok(self.with_gradient_of_result(input, output, saved, 0))
    }

    /// Runs `where(condition, input, number)` with a condition for the last two dimensions. It keeps the condition.
    pub(crate) fn select(&self, input: &Tensor) -> Result<Tensor> {
        let sizes = input.shape.sizes();
        let condition = self.output(&Shape::from(sizes[sizes.len().saturating_sub(2)..].to_vec()), Dtype::Bool)?;
        let saved = self.save_all(&[input], [&condition])?;
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        Ok(self.with_gradient_of_result(input, output, saved, 0))
    }

    /// Converts to another type. The gradient is converted back.
    pub(crate) fn to(&self, input: &Tensor, dtype: Dtype) -> Result<Tensor> {
        if input.dtype == dtype {
            return Ok(input.clone());
        }
        let output = self.output(&input.shape, dtype)?.in_order_of(input);
        let like = Like::of(input);
        Ok(self.recorded(&[input], output, move |eager, grad| Ok(vec![Some(like.empty(eager)?.in_order_of(grad))])))
    }
}
