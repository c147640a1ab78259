//! Parameters and outputs of layers, added up: `modelsize(model, input)` of the article that gpumem began with.

use std::rc::Rc;

use gpumem_core::model::Bytes;

use crate::{
    allocator::AllocatorKind,
    class::Class,
    dtype::{Dtype, Types},
    eager::{Eager, LayerOutput, Libraries},
    error::{Error, Kind},
    files::Tensors,
    layer::{build, run_all},
    memory::Memory,
    model::Model,
    shape::Shape,
    step::COMPUTE,
};

/// The size of a model and of what its layers make of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelSize {
    /// How many elements all parameters have. Tied weights count once.
    pub parameters: u64,
    /// Their bytes.
    pub parameter_bytes: Bytes,
    /// The layers that have no layers inside, in order.
    pub layers: Vec<LayerSize>,
    /// The outputs of all layers that do not overwrite their input.
    pub outputs: Bytes,
}

/// The size of the output of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerSize {
    /// Its path, such as `features.0`.
    pub path: String,
    /// The shape of its output.
    pub output: Shape,
    /// The bytes of its output; 0 if it overwrites its input.
    pub bytes: Bytes,
}

impl ModelSize {
    /// The outputs and their gradients: twice the outputs.
    pub fn with_backward(&self) -> Bytes {
        self.outputs + self.outputs
    }
}

impl Model {
    /// The parameters of the model, each with the path of its layer as its name: two parameters of one layer have the same name.
    /// Tied weights count once.
    ///
    /// ```
    /// use gpumem_estimate::{Dtype, models};
    ///
    /// let parameters = models::gpt2(16).parameters(Dtype::F32)?;
    /// assert_eq!(parameters.sum().elements, 124_439_808);
    /// assert_eq!(parameters.by_module(2)["transformer.wpe"].elements, 1024 * 768);
    /// # Ok::<(), gpumem_estimate::Error>(())
    /// ```
    pub fn parameters(&self, dtype: Dtype) -> Result<Tensors, Error> {
        let memory = Rc::new(Memory::new(AllocatorKind::Exact, u64::MAX));
        let eager = Eager::new(Rc::clone(&memory), Libraries::default());
        memory.open("model");
        build(&eager, &self.layers, Types::new(dtype, COMPUTE))?;
        Ok(Tensors::new(eager.list_parameters()))
    }

    /// Adds up parameters and outputs of layers for a batch. This is a sum; what is live at one time is in an
    /// [`Estimate`](crate::Estimate).
    pub fn size(&self, batch: u64, dtype: Dtype) -> Result<ModelSize, Error> {
        let memory = Rc::new(Memory::new(AllocatorKind::Exact, u64::MAX));
        let eager = Eager::new(Rc::clone(&memory), Libraries::default());
        eager.layer_outputs.replace(Some(Vec::new()));
        memory.open("model");
        let types = Types::new(dtype, COMPUTE);
        let layers = build(&eager, &self.layers, types)?;
        memory.close();
        let (parameters, parameter_bytes) = eager.count_parameters();
        memory.open("forward");
        let (shape, input_dtype) = self.input(batch);
        let input_dtype = if input_dtype.is_float() { types.others } else { input_dtype };
        let input = eager.empty(&shape, input_dtype, Class::Inputs)?;
        if let Some(target) = self.target(batch) {
            eager.set_target(Some(eager.empty(&target, Dtype::I64, Class::Inputs)?));
        }
        run_all(&layers, &eager, &input)?;
        let outputs = eager.layer_outputs.take().unwrap_or_default();
        let mut sum = 0_u64;
        let mut sizes = Vec::new();
        for LayerOutput { path, shape, dtype, is_in_place } in outputs {
            let elements = if is_in_place { Some(0) } else { shape.elements() };
            let bytes = elements.and_then(|elements| dtype.bytes(elements));
            let total = bytes.and_then(|bytes| sum.checked_add(bytes)).filter(|sum| *sum < 1 << 62);
            let (Some(bytes), Some(total)) = (bytes, total) else { return Err(Kind::TooLarge.into()) };
            sum = total;
            sizes.push(LayerSize { path, output: shape, bytes: Bytes::new(bytes) });
        }
        let (parameter_bytes, outputs) = (Bytes::new(parameter_bytes), Bytes::new(sum));
        Ok(ModelSize { parameters, parameter_bytes, layers: sizes, outputs })
    }
}
