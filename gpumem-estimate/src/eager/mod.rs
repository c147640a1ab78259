//! A model of PyTorch's eager mode: operations allocate what PyTorch's operations allocate, in the same order, keep for the backward
//! pass what PyTorch keeps, and free a tensor with its last reference. There are no values.

mod adapters;
mod autocast;
mod backward;
mod cache;
mod checkpoint;
mod context;
mod ops;
mod optimizer;
mod parameters;
mod sharding;
mod tensor;
mod vocabulary;
mod workspace;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

pub use self::optimizer::Optimizer;
pub(crate) use self::{
    adapters::Adapted,
    checkpoint::Saved,
    context::Context,
    ops::{AttentionArguments, ConvArguments, PoolArguments},
    optimizer::OptimizerState,
    parameters::ParameterId,
    sharding::ROOT,
    tensor::{Edge, Tensor},
    workspace::{Convolution, Libraries},
};
use gpumem_core::model::CallsiteId;

use self::{
    adapters::Adapters,
    autocast::Autocast,
    backward::{Grads, Tape},
    cache::Cache,
    checkpoint::Checkpointing,
    parameters::Parameters,
    sharding::Sharding,
    tensor::{channels_last_strides, contiguous_strides},
    workspace::Workspaces,
};
use crate::{
    class::Class,
    dtype::Dtype,
    error::{Error, Kind},
    layer::{Layer, Segments},
    memory::{Memory, Storage},
    shape::Shape,
};

/// What a shared tensor is for, with a number; its shape and type.
type SharedKey = (&'static str, u64, Shape, Dtype);

/// The output of a layer that has no layers inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerOutput {
    pub(crate) path: String,
    pub(crate) shape: Shape,
    pub(crate) dtype: Dtype,
    /// It has the memory of the input.
    pub(crate) is_in_place: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Eager {
    pub(crate) memory: Rc<Memory>,
    /// Operations record what the backward pass needs.
    grad_enabled: Cell<bool>,
    /// Dropout and batch norm are in training mode.
    pub(crate) training: Cell<bool>,
    /// The backward pass runs. It has a thread of its own, and so handles of its own of NVIDIA's libraries.
    in_backward: Cell<bool>,
    tape: Tape,
    parameters: Parameters,
    autocast: Autocast,
    checkpointing: Checkpointing,
    /// Which layers run again in the backward pass.
    segments: RefCell<Option<Rc<Segments>>>,
    cache: Cache,
    adapters: Adapters,
    sharding: Sharding,
    context: RefCell<Context>,
    /// The memory of what the node that runs has saved.
    unpacked: RefCell<Vec<Rc<Storage>>>,
    /// Tensors that the model makes once and all its layers read, such as the angles of positions.
    shared: RefCell<Vec<(SharedKey, Tensor)>>,
    /// The outputs of all layers; `None` if nobody asks.
    pub(crate) layer_outputs: RefCell<Option<Vec<LayerOutput>>>,
    workspaces: Workspaces,
}

impl Eager {
    pub(crate) fn new(memory: Rc<Memory>, libraries: Libraries) -> Self {
        Self {
            memory,
            grad_enabled: Cell::new(false),
            training: Cell::new(false),
            in_backward: Cell::new(false),
            tape: Tape::default(),
            parameters: Parameters::default(),
            autocast: Autocast::default(),
            checkpointing: Checkpointing::default(),
            segments: RefCell::default(),
            cache: Cache::default(),
            adapters: Adapters::default(),
            sharding: Sharding::default(),
            context: RefCell::default(),
            unpacked: RefCell::default(),
            shared: RefCell::default(),
            layer_outputs: RefCell::default(),
            workspaces: Workspaces::new(libraries),
        }
    }

    /// Runs with or without recording for the backward pass.
    pub(crate) fn with_grad<R>(&self, enabled: bool, run: impl FnOnce() -> R) -> R {
        let before = self.grad_enabled.replace(enabled);
        let result = run();
        self.grad_enabled.set(before);
        result
    }

    /// The layers that are open. The outermost scope is no layer.
    fn layers(&self) -> Rc<[CallsiteId]> {
        self.memory.layers()
    }

    /// A tensor that all layers with the same key share until the model has made its output.
    pub(crate) fn shared(&self, key: (&'static str, u64), shape: &Shape, dtype: Dtype) -> Result<Tensor, Error> {
        let key = (key.0, key.1, shape.clone(), dtype);
        if let Some((_, tensor)) = self.shared.borrow().iter().find(|(known, _)| *known == key) {
            return Ok(tensor.clone());
        }
        let tensor = self.output(shape, dtype)?;
        self.shared.borrow_mut().push((key, tensor.clone()));
        Ok(tensor)
    }

    /// The model has made its output. Blocks that run again keep what they read.
    pub(crate) fn free_shared(&self, runs_again: bool) {
        if !runs_again {
            let freed = std::mem::take(&mut *self.shared.borrow_mut());
            drop(freed);
        }
    }

    /// Sets which layers run again in the backward pass.
    pub(crate) fn set_segments(&self, segments: Segments) {
        self.segments.replace(Some(Rc::new(segments)));
    }

    /// Checkpointing makes groups of the outermost layers.
    pub(crate) fn groups_whole_model(&self) -> bool {
        self.segments.borrow().as_ref().is_some_and(|segments| segments.groups_at(""))
    }

    /// Which layers run again in the backward pass; `None` if none do.
    pub(crate) fn segments(&self) -> Option<Rc<Segments>> {
        self.segments.borrow().clone()
    }

    /// A layer has made its output.
    pub(crate) fn layer_done(&self, layer: &Layer, input: &Tensor, output: &Tensor) {
        if let Some(outputs) = &mut *self.layer_outputs.borrow_mut()
            && layer.is_single()
        {
            let is_in_place = Rc::ptr_eq(&input.storage, &output.storage);
            let (path, shape) = (self.memory.path(), output.shape.clone());
            outputs.push(LayerOutput { path, shape, dtype: output.dtype, is_in_place });
        }
    }

    pub(crate) fn error(&self, kind: Kind) -> Error {
        Error::in_layer(self.memory.path(), kind)
    }

    pub(crate) fn mismatch(&self, expected: impl Into<String>, found: &Tensor) -> Error {
        self.error(Kind::Mismatch { expected: expected.into(), found: found.shape.clone() })
    }

    /// A new tensor.
    pub(crate) fn empty(&self, shape: &Shape, dtype: Dtype, class: Class) -> Result<Tensor, Error> {
        let bytes = shape.elements().and_then(|elements| dtype.bytes(elements));
        let bytes = bytes.ok_or_else(|| self.error(Kind::TooLarge))?;
        let storage = Rc::new(self.memory.alloc(bytes, class)?);
        Ok(Tensor::new(storage, shape.clone(), dtype))
    }

    /// A new tensor for a result.
    pub(crate) fn output(&self, shape: &Shape, dtype: Dtype) -> Result<Tensor, Error> {
        self.empty(shape, dtype, Class::Activations)
    }

    /// The operation has to be recorded for the backward pass.
    pub(crate) fn needs_grad(&self, inputs: &[&Tensor]) -> bool {
        self.grad_enabled.get() && inputs.iter().any(|input| input.edge.is_some())
    }
}
