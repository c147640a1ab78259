//! Checkpointing: a block keeps only its input, and runs again in the backward pass when one of its saved tensors is needed
//! (`torch.utils.checkpoint` with `use_reentrant=False`).

use std::{cell::RefCell, rc::Rc};

use super::{BlockRun, RecomputedBlock, RunBlock};
use crate::{Eager, Kind, Result, Tensor};

/// A tensor that the forward pass saved for the backward pass.
pub(crate) enum Saved {
    Tensor(Tensor),
    /// A tensor of a block that runs again.
    Recomputed {
        block: Rc<RecomputedBlock>,
        number: usize,
    },
}

impl Saved {
    /// Returns the tensor. If it belongs to a checkpointed block that has not run again yet, the block runs.
    pub(crate) fn unpack(self, eager: &Eager) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => {
                // It lives until the results of the node have been checked, unless a checkpointed block saved it again.
                eager.unpacked.borrow_mut().push(Rc::clone(&tensor.storage));
                Ok(tensor)
            }
            Self::Recomputed { block, number } => {
                if block.state.borrow().again.is_empty() {
                    eager.run_again(&block)?;
                }
                let tensor = block.state.borrow_mut().again.get_mut(number).and_then(Option::take);
                tensor.ok_or_else(|| eager.invalid("a checkpointed block saved less when it ran again"))
            }
        }
    }
}

impl Eager {
    /// Keeps a tensor for the backward pass.
    pub(crate) fn save(&self, tensor: &Tensor) -> Result<Saved> {
        let mode = self.checkpointing.borrow().clone();
        match mode {
            None => Ok(Saved::Tensor(tensor.detached())),
            Some(BlockRun::First(block)) => {
                let mut state = block.state.borrow_mut();
                let number = state.saved;
                state.saved += 1;
                drop(state);
                Ok(Saved::Recomputed { block, number })
            }
            Some(BlockRun::Again(block)) => {
                let mut state = block.state.borrow_mut();
                state.again.push(Some(tensor.detached()));
                // The rest of the block is no longer needed.
                if state.again.len() == state.saved {
                    Err(Kind::RecomputedAll.into())
                } else {
                    Ok(Saved::Tensor(tensor.clone()))
                }
            }
        }
    }

    /// Keeps tensors for the backward pass of an operation with these inputs, if there will be one.
    pub(crate) fn save_all<'a>(
        &self,
        inputs: &[&Tensor],
        tensors: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<Vec<Saved>> {
        if self.needs_grad(inputs) {
            tensors.into_iter().map(|tensor| self.save(tensor)).collect()
        } else {
            Ok(Vec::new())
        }
    }

    /// Keeps the factors of a product, because each is the derivative with respect to the other.
    pub(crate) fn save_factors(&self, first: &Tensor, second: &Tensor) -> Result<Vec<Saved>> {
        let mut saved = self.save_all(&[first], [second])?;
        saved.extend(self.save_all(&[second], [first])?);
        Ok(saved)
    }

    /// Returns the tensors that were kept.
    pub(crate) fn unpack(&self, saved: Vec<Saved>) -> Result<Vec<Tensor>> {
        saved.into_iter().map(|saved| saved.unpack(self)).collect()
    }

    /// Runs a block of layers whose saved tensors are recomputed in the backward pass.
    pub(crate) fn checkpoint(
        &self,
        input: &Tensor,
        run: impl Fn(&Self, &Tensor) -> Result<Tensor> + 'static,
    ) -> Result<Tensor> {
        if !self.needs_grad(&[input]) && !self.grad_enabled.get() || self.checkpointing.borrow().is_some() {
            return run(self, input);
        }
        let run = Rc::new(run);
        let (again, kept) = (Rc::clone(&run), input.clone());
        let autocast = self.autocast_dtype();
        let slots = self.slots.borrow().clone();
        // The second run ends at its last saved tensor, so it has no output.
        let again: RunBlock = Box::new(move |eager| {
            let before = eager.slots.replace(slots.clone());
            let result = eager.with_autocast(autocast, || again(eager, &kept)).map(drop);
            eager.slots.replace(before);
            result
        });
        let block = Rc::new(RecomputedBlock { run: again, layers: self.memory.layers(), state: RefCell::default() });
        self.checkpointing.replace(Some(BlockRun::First(block)));
        let output = run(self, input);
        self.checkpointing.replace(None);
        output
    }

    fn run_again(&self, block: &Rc<RecomputedBlock>) -> Result<()> {
        let before = self.checkpointing.replace(Some(BlockRun::Again(Rc::clone(block))));
        let (layers, first) = (self.memory.layers(), self.tape.0.borrow().len());
        self.memory.move_to(&block.layers);
        let result = self.with_grad(true, || (block.run)(self));
        self.memory.move_to(&layers);
        self.forget_from(first);
        self.checkpointing.replace(before);
        result.or_else(|error| if *error.kind() == Kind::RecomputedAll { Ok(()) } else { Err(error) })
    }
}
