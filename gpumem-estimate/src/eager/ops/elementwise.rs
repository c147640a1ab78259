//! Operations on each element.

use crate::{
    dtype::Dtype,
    eager::{Eager, Saved, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

/// What an operation with one input saves for its backward pass, and what that needs besides its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Saves {
    /// Nothing; the gradient is passed on as it is.
    Nothing,
    /// Nothing; the gradient is a new tensor.
    NothingNew,
    Input,
    Output,
    /// The input; this many temporary tensors are live together with the gradient.
    InputWith(usize),
    /// The output, as above.
    OutputWith(usize),
}

/// The gradient of an operation that keeps something: a new tensor like the gradient of its result.
fn new_gradient(saved: Saved) -> impl FnOnce(&Eager, &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, Error> {
    move |eager, grads| {
        let Some(grad) = &grads[0] else { return Ok(vec![None]) };
        let _saved = saved.unpack(eager)?;
        Ok(vec![Some(eager.output(&grad.shape, grad.dtype)?.in_order_of(grad))])
    }
}

/// The gradient of a sum, for the inputs that need one.
#[expect(clippy::unnecessary_wraps, reason = "other operations allocate here")]
fn passed_on(needs: [bool; 2], grads: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, Error> {
    Ok(needs.iter().map(|needs| grads[0].clone().filter(|_| *needs)).collect())
}

impl Eager {
    fn unary(&self, input: &Tensor, saves: Saves) -> Result<Tensor, Error> {
        let needs = self.needs_grad(&[input]);
        let mut kept = match saves {
            Saves::Input | Saves::InputWith(_) if needs => Some(self.save(input)?),
            _ => None,
        };
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        if !needs {
            return Ok(output);
        }
        if matches!(saves, Saves::Output | Saves::OutputWith(_)) {
            kept = Some(self.save(&output)?);
        }
        let temporaries = match saves {
            Saves::InputWith(count) | Saves::OutputWith(count) => count,
            _ => 0,
        };
        let [output] = self.record(&[input], [output], move |eager, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None]) };
            let _kept = kept.map(|saved| saved.unpack(eager)).transpose()?;
            if saves == Saves::Nothing {
                return Ok(vec![Some(grad.clone())]);
            }
            let new = || Ok::<_, Error>(eager.output(&grad.shape, grad.dtype)?.in_order_of(grad));
            let _temporaries = (0..temporaries).map(|_| new()).collect::<Result<Vec<_>, _>>()?;
            Ok(vec![Some(new()?)])
        });
        Ok(output)
    }

    pub(crate) fn relu(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Output)
    }

    /// `hardtanh`, which `relu6` calls.
    pub(crate) fn relu6(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Input)
    }

    /// `relu6_` (`hardtanh_`): the result overwrites the input. The backward pass needs the input, so it is copied before.
    pub(crate) fn relu6_in_place(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.overwritten(input, || Ok(self.output(&input.shape, input.dtype)?.in_order_of(input)))
    }

    /// `relu_`: the result overwrites the input, and is what the backward pass needs.
    pub(crate) fn relu_in_place(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.overwritten(input, || Ok(input.clone()))
    }

    /// A result in the memory of the input. `kept` is what the backward pass needs, if there is one.
    fn overwritten(&self, input: &Tensor, kept: impl FnOnce() -> Result<Tensor, Error>) -> Result<Tensor, Error> {
        if !self.needs_grad(&[input]) {
            return Ok(input.clone());
        }
        let saved = self.save(&kept()?)?;
        let output = input.detached();
        let [output] = self.record(&[input], [output], new_gradient(saved));
        Ok(output)
    }

    pub(crate) fn gelu(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Input)
    }

    pub(crate) fn silu(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Input)
    }

    pub(crate) fn tanh(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Output)
    }

    pub(crate) fn sigmoid(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Output)
    }

    /// The logarithms of a softmax over the last dimension.
    pub(crate) fn log_softmax(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Output)
    }

    /// A sum with a number: the gradient is passed on.
    pub(crate) fn add_number(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::Nothing)
    }

    /// A product with a number.
    pub(crate) fn multiply_by_number(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(input, Saves::NothingNew)
    }

    /// A power with a fixed exponent. Autocast runs it in `f32`. Its backward pass is `grad * (exponent * input ** (exponent - 1))`.
    pub(crate) fn power(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(&self.raised(input)?, Saves::InputWith(2))
    }

    /// `rsqrt`; its backward pass is `-0.5 * grad * result ** 3`.
    pub(crate) fn rsqrt(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.unary(&self.raised(input)?, Saves::OutputWith(2))
    }

    /// GELU with `tanh` as transformers writes it out (`NewGELUActivation`):
    /// `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`.
    pub(crate) fn gelu_written_out(&self, input: &Tensor) -> Result<Tensor, Error> {
        let half = self.multiply_by_number(input)?;
        let cube = self.power(input)?;
        let scaled = self.multiply_by_number(&cube)?;
        drop(cube);
        let sum = self.add(input, &scaled)?;
        drop(scaled);
        let argument = self.multiply_by_number(&sum)?;
        drop(sum);
        let tanh = self.tanh(&argument)?;
        drop(argument);
        let factor = self.add_number(&tanh)?;
        drop(tanh);
        self.multiply(&half, &factor)
    }

    /// The type of a result of two tensors.
    fn common_dtype(first: Dtype, second: Dtype) -> Dtype {
        let rank = |dtype| match dtype {
            Dtype::F64 => 3,
            Dtype::F32 => 2,
            Dtype::F16 | Dtype::Bf16 => 1,
            _ => 0,
        };
        if rank(second) > rank(first) { second } else { first }
    }

    fn result_of_two(&self, operation: &'static str, first: &Tensor, second: &Tensor) -> Result<Tensor, Error> {
        let shape = first.shape.broadcast(&second.shape).ok_or_else(|| {
            self.error(Kind::Pair { operation, first: first.shape.clone(), second: second.shape.clone() })
        })?;
        let output = self.output(&shape, Self::common_dtype(first.dtype, second.dtype))?;
        Ok(output.in_order_of(if first.shape == shape { first } else { second }))
    }

    pub(crate) fn add(&self, first: &Tensor, second: &Tensor) -> Result<Tensor, Error> {
        let output = self.result_of_two("a sum", first, second)?;
        let needs = [first, second].map(|input| input.edge.is_some());
        Ok(self.recorded(&[first, second], output, move |_, grads| passed_on(needs, grads)))
    }

    /// `first += second`.
    pub(crate) fn add_in_place(&self, first: &Tensor, second: &Tensor) -> Result<Tensor, Error> {
        if first.shape.broadcast(&second.shape).as_ref() != Some(&first.shape) {
            let (first, second) = (first.shape.clone(), second.shape.clone());
            return Err(self.error(Kind::Pair { operation: "a sum in place", first, second }));
        }
        let output = first.detached();
        let needs = [first, second].map(|input| input.edge.is_some());
        Ok(self.recorded(&[first, second], output, move |_, grads| passed_on(needs, grads)))
    }

    pub(crate) fn multiply(&self, first: &Tensor, second: &Tensor) -> Result<Tensor, Error> {
        let needs = self.needs_grad(&[first, second]);
        let save_for =
            |other: &Tensor, input: &Tensor| (needs && other.edge.is_some()).then(|| self.save(input)).transpose();
        // Each factor is the derivative of the other one.
        let (second_saved, first_saved) = (save_for(first, second)?, save_for(second, first)?);
        let output = self.result_of_two("a product", first, second)?;
        if !needs {
            return Ok(output);
        }
        let [output] = self.record(&[first, second], [output], move |eager, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None, None]) };
            let unpack = |saved: Option<Saved>| saved.map(|saved| saved.unpack(eager)).transpose();
            let saved = [unpack(second_saved)?, unpack(first_saved)?];
            let product = |factor: &Option<Tensor>| {
                let new = |_: &Tensor| Ok(eager.output(&grad.shape, grad.dtype)?.in_order_of(grad));
                factor.as_ref().map(new).transpose()
            };
            saved.iter().map(product).collect()
        });
        Ok(output)
    }

    /// Dropout keeps a mask of one byte for each element.
    pub(crate) fn dropout(&self, input: &Tensor, probability: f64) -> Result<Tensor, Error> {
        if probability == 0.0 || !self.training.get() {
            return Ok(input.clone());
        }
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        let mask = self.output(&input.shape, Dtype::Bool)?;
        if !self.needs_grad(&[input]) {
            return Ok(output);
        }
        let saved = self.save(&mask)?;
        drop(mask);
        let [output] = self.record(&[input], [output], new_gradient(saved));
        Ok(output)
    }

    /// `where(condition, input, number)` with a condition for the last two dimensions. It keeps the condition.
    pub(crate) fn select(&self, input: &Tensor) -> Result<Tensor, Error> {
        let sizes = input.shape.sizes();
        let condition = self.output(&Shape::from(sizes[sizes.len().saturating_sub(2)..].to_vec()), Dtype::Bool)?;
        let needs = self.needs_grad(&[input]);
        let saved = needs.then(|| self.save(&condition)).transpose()?;
        let output = self.output(&input.shape, input.dtype)?.in_order_of(input);
        let Some(saved) = saved else { return Ok(output) };
        let [output] = self.record(&[input], [output], new_gradient(saved));
        Ok(output)
    }

    /// Another type. The gradient is converted back.
    pub(crate) fn to(&self, input: &Tensor, dtype: Dtype) -> Result<Tensor, Error> {
        if input.dtype == dtype {
            return Ok(input.clone());
        }
        let output = self.output(&input.shape, dtype)?.in_order_of(input);
        let like = (input.shape.clone(), input.dtype, input.parameter);
        Ok(self.recorded(&[input], output, move |eager, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None]) };
            let (shape, dtype, parameter) = &like;
            let class = if parameter.is_some() { crate::Class::Gradients } else { crate::Class::Activations };
            Ok(vec![Some(eager.empty(shape, *dtype, class)?.in_order_of(grad))])
        }))
    }
}
