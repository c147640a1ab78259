//! Layers with parameters.

use std::rc::Rc;

use gpumem_core::model::CallsiteId;

use super::Layer;
use crate::eager::{Adapted, Eager, ParameterId, Tensor};

/// A layer with its parameters and the layers inside it.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) name: String,
    /// What the scope of the layer is called. `None`: it has no scope.
    pub(super) scope: Option<CallsiteId>,
    pub(super) kind: Layer,
    pub(super) parameters: Vec<ParameterId>,
    /// What a linear layer has besides or instead of its weight.
    pub(super) adapted: Adapted,
    /// The group of a block whose parameters are gathered from several ranks.
    pub(super) group: Option<usize>,
    pub(super) children: Vec<Rc<Built>>,
    /// What the input of a residual layer passes through, or the decoder of an encoder and a decoder.
    pub(super) shortcut: Vec<Rc<Built>>,
}

impl Built {
    /// An inner layer, which `build` has made.
    pub(super) fn child(&self, name: &str) -> &Rc<Self> {
        let child = self.children.iter().find(|child| child.name == name);
        child.expect("`build` makes all inner layers that `forward` names")
    }

    /// The parameter with this number, as the forward pass reads it.
    pub(super) fn parameter(&self, eager: &Eager, number: usize) -> Tensor {
        let id: ParameterId = self.parameters[number];
        eager.parameter(id)
    }
}
