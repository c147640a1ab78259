//! Layers that are connected with distant layers.

use super::{Built, Layer, run_all};
use crate::{
    class::Class,
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Built {
    pub(super) fn connected(&self, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        match &self.kind {
            Layer::Positions { .. } => self.positions(eager, input),
            Layer::Leave { slot } => {
                eager.leave(slot, input.clone(), false);
                Ok(input.clone())
            }
            Layer::Provide { slot, sizes, integers, is_next, .. } => {
                let mut shape = vec![input.shape.sizes().first().copied().unwrap_or(1)];
                shape.extend(sizes);
                let numbers = if input.dtype.is_float() { input.dtype } else { Dtype::F32 };
                let dtype = if *integers { Dtype::I64 } else { numbers };
                let provided = eager.empty(&shape.into(), dtype, Class::Inputs)?;
                let output = run_all(&self.children, eager, &provided)?;
                if *is_next {
                    return Ok(output);
                }
                eager.leave(slot, output, true);
                Ok(input.clone())
            }
            Layer::Release { slot } => {
                eager.release(slot);
                Ok(input.clone())
            }
            Layer::Similarity { slot } => {
                let others = eager.unit_vectors(&eager.left(slot)?)?;
                let vectors = eager.unit_vectors(input)?;
                let products = eager.matmul(&vectors, &eager.transpose(&others, 0, 1))?;
                eager.multiply(&products, &self.parameter(eager, 0))
            }
            _ => Err(eager.error(Kind::Invalid("this layer is not connected with others".to_owned()))),
        }
    }

    fn positions(&self, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        let table = self.parameter(eager, 0);
        let tokens = if input.shape.rank() == 3 { input.shape[1] } else { 0 };
        if input.shape.last() != table.shape[1] || tokens == 0 || tokens > table.shape[0] {
            let (rows, size) = (table.shape[0], table.shape[1]);
            return Err(eager.mismatch(format!("(…, {rows} or less, {size})"), input));
        }
        let rows = eager.embedding(&eager.integers(&Shape::from([tokens]))?, &table)?;
        eager.add(input, &rows)
    }
}
