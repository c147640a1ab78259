//! Softmax and losses.

use crate::{
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::Error,
    shape::Shape,
};

impl Eager {
    /// Softmax over the last dimension. The backward pass multiplies the gradient with the result first.
    pub(crate) fn softmax(&self, input: &Tensor) -> Result<Tensor, Error> {
        let input = self.raised(input)?;
        let output = self.output(&input.shape, input.dtype)?;
        if !self.needs_grad(&[&input]) {
            return Ok(output);
        }
        let saved = self.save(&output)?;
        let [output] = self.record(&[&input], [output], move |eager, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None]) };
            let _result = saved.unpack(eager)?;
            let grad_input = eager.output(&grad.shape, grad.dtype)?;
            let _product = eager.output(&grad.shape, grad.dtype)?;
            Ok(vec![Some(grad_input)])
        });
        Ok(output)
    }

    /// Cross entropy of logits (…, classes) with one label for each row. It makes the logarithms of the probabilities and keeps
    /// them; the backward pass makes their gradient and then that of the logits.
    pub(crate) fn cross_entropy(&self, logits: &Tensor, labels: &Tensor) -> Result<Tensor, Error> {
        let logits = self.raised(logits)?;
        let rows = logits.shape.elements().map(|elements| elements.checked_div(logits.shape.last()).unwrap_or(0));
        if logits.shape.rank() < 2 || labels.shape.elements() != rows {
            let mut expected = labels.shape.sizes().to_vec();
            expected.push(logits.shape.last());
            return Err(self.mismatch(Shape::from(expected).to_string(), &logits));
        }
        let needs = self.needs_grad(&[&logits]);
        let log_probabilities = self.output(&logits.shape, logits.dtype)?;
        let mut saved = Vec::new();
        if needs {
            saved.push(self.save(&log_probabilities)?);
            saved.push(self.save(labels)?);
        }
        let loss = self.output(&Shape::default(), logits.dtype)?;
        let total_weight = self.output(&Shape::default(), logits.dtype)?;
        if !needs {
            return Ok(loss);
        }
        saved.push(self.save(&total_weight)?);
        drop((log_probabilities, total_weight));
        let (shape, dtype) = (logits.shape.clone(), logits.dtype);
        let [loss] = self.record(&[&logits], [loss], move |eager, grads| {
            if grads[0].is_none() {
                return Ok(vec![None]);
            }
            let _saved = saved.into_iter().map(|saved| saved.unpack(eager)).collect::<Result<Vec<_>, _>>()?;
            let _grad_of_logarithms = eager.output(&shape, dtype)?;
            Ok(vec![Some(eager.output(&shape, dtype)?)])
        });
        Ok(loss)
    }

    /// Labels moved by one position, as losses of language models do: a padded copy and a copy of a part of it.
    pub(crate) fn shifted_labels(&self, labels: &Tensor) -> Result<Tensor, Error> {
        let padded = self.output(&labels.shape.with_last(labels.shape.last() + 1), Dtype::I64)?;
        let shifted = self.output(&labels.shape, Dtype::I64)?;
        drop(padded);
        Ok(shifted)
    }
}
