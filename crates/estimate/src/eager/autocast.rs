//! Autocast: matrix products and convolutions run in a smaller type, and some operations in `f32`.

use crate::{Class, Dtype, Eager, Result, Tensor};

impl Eager {
    /// Calls `run` under autocast to this type, or without autocast.
    pub(crate) fn with_autocast<R>(&self, dtype: Option<Dtype>, run: impl FnOnce() -> R) -> R {
        let before = self.autocast.dtype.replace(dtype);
        let result = run();
        self.autocast.dtype.set(before);
        if before.is_none() {
            drop(self.autocast.copies.take());
        }
        result
    }

    pub(crate) fn autocast_dtype(&self) -> Option<Dtype> {
        self.autocast.dtype.get()
    }

    /// Converts an input of a matrix product or a convolution.
    pub(crate) fn lowered(&self, input: &Tensor) -> Result<Tensor> {
        let Some(dtype) = self.autocast.dtype.get() else { return Ok(input.clone()) };
        if input.dtype == dtype || !input.dtype.is_float() || input.dtype == Dtype::F64 {
            return Ok(input.clone());
        }
        // `f32` parameters that need a gradient are converted only once.
        let parameter = input.parameter.filter(|_| input.edge.is_some() && input.dtype == Dtype::F32);
        if let Some(copy) = parameter.and_then(|number| self.autocast.copies.borrow().get(&number).cloned()) {
            return Ok(copy);
        }
        let copy = match parameter {
            Some(_) => self.memory.with_class(Class::Cache, || self.to(input, dtype))?,
            None => self.to(input, dtype)?,
        };
        if let Some(number) = parameter {
            self.autocast.copies.borrow_mut().insert(number, copy.clone());
        }
        Ok(copy)
    }

    /// Converts an input of an operation that autocast runs in `f32`.
    pub(crate) fn raised(&self, input: &Tensor) -> Result<Tensor> {
        let is_small = matches!(input.dtype, Dtype::F16 | Dtype::Bf16);
        if self.autocast.dtype.get().is_some() && is_small { self.to(input, Dtype::F32) } else { Ok(input.clone()) }
    }
}
