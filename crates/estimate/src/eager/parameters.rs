//! Parameters, their gradients, and buffers.

use std::rc::Rc;

use gpumem_core::model::CallsiteId;

use super::{Grads, Parameter, ParameterId};
use crate::{Bytes, Class, Dtype, Eager, Result, Shape, Tensor, TensorInfo};

/// What a tensor of a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A parameter, which is trained unless there are adapters.
    Parameter,
    /// A parameter that is never trained.
    Frozen,
    /// A parameter that is trained while those of the model are frozen.
    Adapter,
    /// Not a parameter, such as the running mean of a batch norm.
    Buffer,
}

/// A parameter as the optimizer sees it.
#[derive(Debug)]
pub(super) struct Updated<'a> {
    pub(super) number: usize,
    /// Its index among the parameters that can have a gradient.
    pub(super) position: usize,
    pub(super) tensor: &'a Tensor,
    pub(super) layers: &'a Rc<[CallsiteId]>,
    pub(super) has_gradient: bool,
}

impl Eager {
    /// Adds a tensor to the model, in the scope of its layer. If its stored type is not the type of computation, kernels read the
    /// stored type directly, without a copy in the other type.
    pub(crate) fn add_tensor(&self, role: Role, shape: &Shape, [stored, computed]: [Dtype; 2]) -> Result<ParameterId> {
        let is_whole = stored == computed && computed.is_float();
        let is_trainable = role == Role::Adapter || role == Role::Parameter && is_whole && self.step.adapters.is_none();
        let is_buffer = role == Role::Buffer;
        let number = self.parameters.borrow().len();
        let is_whole = is_buffer || stored != computed;
        let sharded = if is_whole { None } else { self.sharded(number, shape, stored)? };
        let (mut tensor, shard) = match sharded {
            Some((whole, shard)) => (whole, Some(shard)),
            None => (self.empty(shape, stored, Class::Weights)?, None),
        };
        if shard.is_none() {
            tensor.dtype = computed;
        }
        tensor.parameter = Some(number);
        let stored = (stored != computed).then_some(stored);
        let (grad, edge, packed_elements, layers) = (None, None, None, self.memory.layers());
        let parameter =
            Parameter { tensor, grad, edge, is_trainable, is_buffer, packed_elements, stored, shard, layers };
        self.parameters.borrow_mut().push(parameter);
        Ok(ParameterId(number))
    }

    /// Returns a parameter as an input for an operation.
    pub(crate) fn parameter(&self, id: ParameterId) -> Tensor {
        let parameter = &mut self.parameters.borrow_mut()[id.0];
        let mut tensor = parameter.tensor.clone();
        if parameter.is_trainable {
            tensor.edge = Some(*parameter.edge.get_or_insert_with(|| self.accumulation(id.0)));
        }
        tensor
    }

    /// Returns all parameters, without buffers, with the paths of their layers.
    pub(crate) fn list_parameters(&self) -> Vec<TensorInfo> {
        let all = self.parameters.borrow();
        let parameters = all.iter().filter(|parameter| !parameter.is_buffer);
        let described = parameters.map(|Parameter { tensor, layers, stored, .. }| {
            let dtype = stored.unwrap_or(tensor.dtype);
            let bytes = tensor.shape.elements().and_then(|elements| dtype.bytes(elements)).unwrap_or(0);
            let (name, shape) = (self.memory.path_of(layers), tensor.shape.clone());
            TensorInfo { name, dtype, shape, bytes: Bytes::new(bytes) }
        });
        described.collect()
    }

    /// Returns the number of elements and of bytes of all parameters, without buffers.
    pub(crate) fn count_parameters(&self) -> (u64, u64) {
        let all = self.parameters.borrow();
        let sizes = all.iter().filter(|parameter| !parameter.is_buffer).filter_map(|parameter| {
            let elements = parameter.tensor.shape.elements()?;
            let dtype = parameter.shard.as_ref().map_or(parameter.tensor.dtype, |shard| shard.tensor.dtype);
            let dtype = parameter.stored.unwrap_or(dtype);
            Some((parameter.packed_elements.unwrap_or(elements), dtype.bytes(elements)?))
        });
        // All of them were allocated, so the sums are below 2^62.
        sizes.fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
    }

    /// Starts a new backward graph.
    pub(crate) fn start_graph(&self) {
        for parameter in &mut *self.parameters.borrow_mut() {
            parameter.edge = None;
        }
        self.forget_from(0);
    }

    /// Accumulates a gradient. The first one becomes the gradient of the parameter, and later ones are added to it in
    /// place.
    pub(super) fn accumulate(&self, parameter: usize, mut grads: Grads) {
        let Some(mut grad) = grads.pop().flatten() else { return };
        grad.edge = None;
        self.parameters.borrow_mut()[parameter].grad.get_or_insert(grad);
    }
}

/// Returns the parameters that can have a gradient.
pub(super) fn trainable(all: &[Parameter]) -> impl Iterator<Item = Updated<'_>> {
    let trainable = all.iter().enumerate().filter(|(_, parameter)| parameter.is_trainable);
    trainable.enumerate().map(|(position, (number, parameter))| Updated {
        number,
        position,
        tensor: parameter.shard.as_ref().map_or(&parameter.tensor, |shard| &shard.tensor),
        layers: &parameter.layers,
        has_gradient: match &parameter.shard {
            Some(shard) => shard.gradient.is_some(),
            None => parameter.grad.is_some(),
        },
    })
}
