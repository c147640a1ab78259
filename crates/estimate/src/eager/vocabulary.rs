//! The loss on a rank that has a part of the vocabulary: `_VocabParallelCrossEntropy` of Megatron-LM.

use super::{Eager, Tensor};
use crate::{dtype::Dtype, error::Error, shape::Shape};

impl Eager {
    /// Runs cross entropy of logits (…, part of the vocabulary). The softmax is computed in place in the `f32` logits,
    /// and also serves as the gradient.
    pub(crate) fn cross_entropy_of_part(&self, logits: &Tensor, labels: &Tensor) -> Result<Tensor, Error> {
        let rows = labels.shape.clone();
        if logits.shape.elements() != rows.elements().and_then(|rows| rows.checked_mul(logits.shape.last())) {
            let mut expected = rows.sizes().to_vec();
            expected.push(logits.shape.last());
            return Err(self.mismatch(Shape::from(expected).to_string(), logits));
        }
        let of_rows = |dtype| self.output(&rows, dtype);
        let softmax = self.with_grad(false, || self.to(logits, Dtype::F32))?.detached();
        let highest = of_rows(Dtype::F32)?;
        drop(of_rows(Dtype::I64)?);
        let mask = of_rows(Dtype::Bool)?;
        let targets = of_rows(Dtype::I64)?;
        let predicted = of_rows(Dtype::F32)?;
        let sums = of_rows(Dtype::F32)?;
        // The result is `torch.log(sum_exp_logits) - predicted_logits`.
        let logarithms = of_rows(Dtype::F32)?;
        let losses = of_rows(Dtype::F32)?;
        drop(logarithms);
        let saved = self.save_all(&[logits], [&softmax, &mask, &targets])?;
        drop((highest, mask, targets, predicted, sums, softmax));
        // The mean over all rows.
        let loss = self.output(&Shape::default(), Dtype::F32)?;
        drop(losses);
        // The softmax is the gradient.
        Ok(self.recorded(&[logits], loss, move |eager, _| Ok(vec![eager.unpack(saved)?.into_iter().next()])))
    }
}
