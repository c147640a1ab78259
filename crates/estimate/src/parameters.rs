//! The parameters of a model, without running it.

use std::rc::Rc;

use crate::{
    AllocatorKind, Dtype, Eager, Model, Result, Step, StepMemory, Tensors, Types, layer::build, settings::COMPUTE,
};

impl Model {
    /// Returns the parameters of the model, each named by the path of its layer: two parameters of one layer have the
    /// same name. Tied weights are counted once.
    ///
    /// # Errors
    /// Returns an error if the sizes of a layer are not valid, or if the sum is too large to be counted.
    pub fn parameters(&self, dtype: Dtype) -> Result<Tensors> {
        let memory = Rc::new(StepMemory::new(AllocatorKind::Exact, u64::MAX, true));
        let eager = Eager::new(Rc::clone(&memory), Step::default(), false);
        memory.open("model");
        build(&eager, &self.layers, Types::new(dtype, COMPUTE))?;
        Ok(Tensors::new(eager.list_parameters()))
    }
}
