//! Softmax and losses.

use crate::{Class, Dtype, Eager, Result, Shape, Tensor, ensure};

impl Eager {
    /// Runs softmax over the last dimension, in `f32` under autocast. The backward pass first multiplies the gradient
    /// by the result.
    pub(crate) fn softmax(&self, input: &Tensor) -> Result<Tensor> {
        let input = self.raised(input)?;
        let output = self.output(&input.shape, input.dtype)?;
        let saved = self.save_all(&[&input], [&output])?;
        Ok(self.recorded(&[&input], output, move |eager, grad| {
            let _result = eager.unpack(saved)?;
            let grad_input = eager.output(&grad.shape, grad.dtype)?;
            let _product = eager.output(&grad.shape, grad.dtype)?;
            Ok(vec![Some(grad_input)])
        }))
    }

    /// Runs a softmax that returns zeros for rows in which everything is masked: the input is tested, and the result is
    /// selected from the first one.
    pub(crate) fn safe_softmax(&self, input: &Tensor) -> Result<Tensor> {
        let _first = self.with_grad(false, || self.softmax(input))?;
        let _is_masked = self.output(&input.shape, Dtype::Bool)?;
        self.softmax(input)
    }

    /// Runs cross entropy of logits (…, classes) with one label for each row: the logarithms of the probabilities in
    /// the type of the logits, and the mean of those at the labels, in `f32` under autocast.
    pub(crate) fn cross_entropy(&self, logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let rows = logits.shape.elements().map(|elements| elements.checked_div(logits.shape.last()).unwrap_or(0));
        let fits = logits.shape.rank() >= 2 && labels.shape.elements() == rows;
        let expected = || Shape::from([labels.shape.sizes(), &[logits.shape.last()]].concat());
        let others = "the model's `loss` can be `next_token`, `token` or `mean_squares`";
        let wrong =
            || format!("the loss expects an output of shape {} and gets {}; {others}", expected(), logits.shape);
        ensure(fits, || self.invalid(wrong()))?;
        // `nll_loss` keeps its input.
        let logarithms = self.log_softmax(logits)?;
        let input = self.raised(&logarithms)?;
        let mut saved = self.save_all(&[&input], [&input, labels])?;
        let loss = self.output(&Shape::default(), input.dtype)?;
        let total_weight = self.output(&Shape::default(), input.dtype)?;
        saved.extend(self.save_all(&[&input], [&total_weight])?);
        Ok(self.with_gradients(&[&input], loss, saved))
    }

    /// Runs `mse_loss` with a target of the same shape, in `f32` under autocast. Both are kept.
    pub(crate) fn mean_squares(&self, input: &Tensor) -> Result<Tensor> {
        let input = self.raised(input)?;
        let target = self.empty(&input.shape, input.dtype, Class::Inputs)?;
        let saved = self.save_all(&[&input], [&input, &target])?;
        let loss = self.output(&Shape::default(), input.dtype)?;
        // The squares are a tensor before the mean is computed.
        drop(self.output(&input.shape, input.dtype)?);
        Ok(self.with_gradients(&[&input], loss, saved))
    }

    /// Shifts labels by one position, as losses of language models do: a padded copy, and a copy of a part of it.
    pub(crate) fn shifted_labels(&self, labels: &Tensor) -> Result<Tensor> {
        let _padded = self.output(&labels.shape.with_last(labels.shape.last() + 1), Dtype::I64)?;
        self.output(&labels.shape, Dtype::I64)
    }
}
