//! Linear layers, with adapters if a step has them.

use super::{Built, Linear, build::Building};
use crate::{
    dtype::Types,
    eager::{Adapted, Eager, ParameterId, Tensor},
    error::Error,
    settings::Quantized,
    shape::Shape,
};

impl Building<'_> {
    pub(super) fn linear(&mut self, linear: &Linear) -> Result<(Vec<ParameterId>, Adapted), Error> {
        let Linear { inputs, outputs, no_bias, tied_to } = linear;
        let adapted = self.eager.adapt(*inputs, *outputs, self.types.others, tied_to.is_some())?;
        let weight = match (tied_to, &adapted.in_4_bits) {
            (Some(path), _) => self.shared(path)?,
            (None, Some(weight)) => weight.packed,
            (None, None) => {
                let Types { weights, tables, others } = self.types;
                let is_head = weights != tables && Quantized::default().except.contains(&self.eager.memory.path());
                let stored = if is_head { tables } else { weights };
                self.eager.add_weight(&Shape::from([*outputs, *inputs]), stored, others)?
            }
        };
        if adapted.in_4_bits.is_none() {
            self.share(weight);
        }
        let mut parameters = vec![weight];
        if !no_bias {
            parameters.push(self.eager.add_parameter(&Shape::from([*outputs]), self.types.others, true)?);
        }
        Ok((parameters, adapted))
    }
}

impl Built {
    pub(super) fn linear(&self, linear: &Linear, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        let bias = (!linear.no_bias).then(|| eager.parameter(self.parameters[1]));
        let output = match &self.adapted.in_4_bits {
            Some(weight) => eager.linear_in_4_bits(input, weight, bias.as_ref())?,
            None => eager.linear(input, &eager.parameter(self.parameters[0]), bias.as_ref())?,
        };
        eager.adapted(&self.adapted, input, output)
    }
}
