//! What the layers of an encoder and a decoder share, besides what they pass on.

use super::{Eager, Tensor};

/// A checkpointed block keeps what it was when the block ran first, as PyTorch keeps the arguments of the block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Context {
    /// The tokens that the decoder reads.
    pub(crate) target: Option<Tensor>,
    /// The output of the encoder.
    pub(crate) encoded: Option<Tensor>,
    /// The bias of self-attention, which the first block makes and the others share.
    pub(crate) bias: Option<Tensor>,
    /// The same for cross attention.
    pub(crate) cross_bias: Option<Tensor>,
}

impl Eager {
    pub(crate) fn context(&self) -> Context {
        self.context.borrow().clone()
    }

    pub(crate) fn set_context(&self, context: Context) -> Context {
        self.context.replace(context)
    }

    /// The tokens that a decoder reads, until the model is done.
    pub(crate) fn set_target(&self, target: Option<Tensor>) {
        self.context.borrow_mut().target = target;
    }
}
