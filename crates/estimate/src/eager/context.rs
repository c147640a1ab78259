//! The tensors that layers of an encoder and a decoder share in addition to those that they pass on.

use std::collections::HashMap;

use crate::{Eager, Result, Tensor};

/// The shared tensors. A checkpointed block keeps them as they were when the block first ran, as PyTorch keeps the
/// arguments of the block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Context {
    /// The tokens that the decoder reads.
    pub(crate) target: Option<Tensor>,
    /// The output of the encoder.
    pub(crate) encoded: Option<Tensor>,
    /// The biases of self-attention and of cross attention, which the first block computes and the others share.
    pub(crate) biases: [Option<Tensor>; 2],
    /// Tensors that layers leave for later ones, by name. Of several with one name, the last one is read first.
    slots: HashMap<String, Vec<Tensor>>,
}

impl Eager {
    pub(crate) fn context(&self) -> Context {
        self.context.borrow().clone()
    }

    pub(crate) fn set_context(&self, context: Context) -> Context {
        self.context.replace(context)
    }

    /// Sets the tokens that the decoder reads, until the model has run.
    pub(crate) fn set_target(&self, target: Option<Tensor>) {
        self.context.borrow_mut().target = target;
    }

    /// Leaves a tensor for later layers, in addition to others with the same name or instead of them.
    pub(crate) fn leave(&self, slot: &str, tensor: Tensor, replaces: bool) {
        let mut context = self.context.borrow_mut();
        let tensors = context.slots.entry(slot.to_owned()).or_default();
        if replaces {
            tensors.clear();
        }
        tensors.push(tensor);
    }

    /// Returns the last tensor that was left with this name. `encoder` is the output of an encoder.
    pub(crate) fn left(&self, slot: &str) -> Result<Tensor> {
        let context = self.context.borrow();
        let encoded = context.encoded.as_ref().filter(|_| slot == "encoder");
        let tensor = encoded.or_else(|| context.slots.get(slot)?.last()).cloned();
        tensor.ok_or_else(|| self.invalid(format!("no layer before it leaves `{slot}`")))
    }

    /// Drops all tensors that were left with this name.
    pub(crate) fn release(&self, slot: &str) {
        self.context.borrow_mut().slots.remove(slot);
    }

    /// Drops all tensors that were left, when the model has computed its output.
    pub(crate) fn free_left(&self) {
        self.context.borrow_mut().slots.clear();
    }
}
