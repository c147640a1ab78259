//! Layers with parameters.

use std::rc::Rc;

use gpumem_core::model::CallsiteId;

use super::Layer;
use crate::eager::{Adapted, Eager, ParameterId, Tensor};

/// A layer with its parameters and the layers inside it.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) name: String,
    /// The name of the layer's scope. `None` if it has no scope.
    pub(super) scope: Option<CallsiteId>,
    pub(super) kind: Layer,
    pub(super) parameters: Vec<ParameterId>,
    /// The tensors that a linear layer has in addition to its weight, or instead of it.
    pub(super) adapted: Adapted,
    /// The group of a block whose parameters are gathered from several ranks.
    pub(super) group: Option<usize>,
    pub(super) children: Vec<Rc<Built>>,
    /// The layers on the shortcut of a residual layer, or the decoder of an encoder-decoder layer.
    pub(super) shortcut: Vec<Rc<Built>>,
}

impl Built {
    /// Returns whether the layer is a block or contains one.
    pub(crate) fn has_block(&self) -> bool {
        let inner = || self.children.iter().chain(&self.shortcut).any(|layer| layer.has_block());
        matches!(self.kind, Layer::Block { .. }) || inner()
    }

    /// Returns an inner layer, which `build` has made.
    pub(super) fn child(&self, name: &str) -> &Rc<Self> {
        let child = self.children.iter().find(|child| child.name == name);
        child.expect("`build` makes all inner layers that `forward` names")
    }

    /// Returns the parameter at this index, as the forward pass reads it.
    pub(super) fn parameter(&self, eager: &Eager, number: usize) -> Tensor {
        let id: ParameterId = self.parameters[number];
        eager.parameter(id)
    }
}
