//! Optimizers, as their libraries run them on a GPU.

use super::{
    Eager, Tensor,
    parameters::{Updated, trainable},
};
use crate::{Class, Dtype, Error, Optimizer, Result, Shape};

/// The tensors that an optimizer keeps from one update to the next.
#[derive(Debug, Default)]
pub(crate) struct OptimizerState {
    /// The tensors of the state, which the first update allocates.
    states: Vec<Tensor>,
    /// Copies of the parameters in `f32`, for those of a smaller type.
    masters: Vec<Option<Tensor>>,
    /// The gradients of these copies, until the next step starts.
    gradients: Vec<Tensor>,
}

impl OptimizerState {
    /// Returns the bytes that the optimizer keeps from one update to the next.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = |state: &Tensor| state.shape.elements().and_then(|elements| state.dtype.bytes(elements));
        self.states.iter().filter_map(bytes).sum()
    }
}

/// The number of elements that bitsandbytes quantizes together.
const BLOCK_8BIT: u64 = 256;
/// `min_8bit_size` of bitsandbytes.
const LEAST_8BIT: u64 = 4096;

impl Eager {
    /// Allocates `f32` copies of all parameters of a smaller type. The optimizer updates these instead:
    /// `Float16OptimizerWithFloat16Params` of Megatron-LM.
    pub(crate) fn make_masters(&self, state: &mut OptimizerState) -> Result<()> {
        for Updated { tensor, layers, .. } in trainable(&self.parameters.borrow()) {
            self.memory.move_to(layers);
            let master = if tensor.dtype == Dtype::F32 { None } else { Some(self.like(tensor, Dtype::F32)?) };
            state.masters.push(master);
        }
        self.memory.move_to(&[]);
        Ok(())
    }

    /// Runs `zero_grad(set_to_none=True)`.
    pub(crate) fn zero_grad(&self, state: &mut OptimizerState) {
        for parameter in &mut *self.parameters.borrow_mut() {
            parameter.grad = None;
            if let Some(shard) = &mut parameter.shard {
                shard.gradient = None;
            }
        }
        state.gradients.clear();
    }

    /// Runs `step()`. The first step allocates the state, parameter by parameter.
    pub(crate) fn update(&self, optimizer: Optimizer, state: &mut OptimizerState) -> Result<()> {
        if !state.masters.is_empty() {
            self.gradients_of_masters(state)?;
        }
        let all = self.parameters.borrow();
        let mut updated: Vec<_> = trainable(&all).filter(|updated| updated.has_gradient).collect();
        let sizes: Vec<_> = updated.iter().map(|updated| updated.tensor.shape.elements().unwrap_or(0)).collect();
        if let Some(of_this_rank) = self.partition(&sizes) {
            let mut of_this_rank = of_this_rank.into_iter();
            updated.retain(|_| of_this_rank.next() == Some(true));
        }
        let OptimizerState { states, masters, .. } = state;
        // If there are `f32` copies, the optimizer updates them.
        let tensors: Vec<&Tensor> = updated
            .iter()
            .map(|updated| masters.get(updated.position).and_then(Option::as_ref).unwrap_or(updated.tensor))
            .collect();
        if states.is_empty() {
            for (tensor, Updated { layers, .. }) in tensors.iter().zip(&updated) {
                self.memory.move_to(layers);
                self.make_state(optimizer, tensor, states)?;
            }
            self.memory.move_to(&[]);
        }
        match optimizer {
            Optimizer::Sgd | Optimizer::Momentum | Optimizer::Adam8bit => {}
            // `_multi_tensor_adam`: `_foreach_sqrt(exp_avg_sqs)` for all parameters at the same time.
            Optimizer::Adam => {
                // Only the memory is kept, because very many tensors would take a lot of space.
                let roots = tensors.iter().map(|tensor| Ok::<_, Error>(self.like(tensor, tensor.dtype)?.storage));
                drop(roots.collect::<Result<Vec<_>, _>>()?);
            }
            // `update_fn`: `exp_avg.clone().mul_(beta1).add(grad)`.
            Optimizer::Lion => {
                for tensor in tensors {
                    let _copy = self.like(tensor, tensor.dtype)?;
                    let _sum = self.like(tensor, tensor.dtype)?;
                }
            }
            Optimizer::Adafactor => self.adafactor(&tensors)?,
        }
        Ok(())
    }

    fn make_state(&self, optimizer: Optimizer, tensor: &Tensor, states: &mut Vec<Tensor>) -> Result<()> {
        let elements = tensor.shape.elements().unwrap_or(0);
        let whole = |dtype| (tensor.shape.clone(), dtype);
        let flat = |elements: u64| (Shape::from([elements]), Dtype::F32);
        let mut parts = Vec::new();
        match optimizer {
            Optimizer::Sgd => {}
            Optimizer::Momentum | Optimizer::Lion => parts.push(whole(tensor.dtype)),
            Optimizer::Adam => parts.extend([whole(tensor.dtype), whole(tensor.dtype)]),
            Optimizer::Adafactor => match factors(&tensor.shape) {
                Some(factors) => parts.extend(factors.map(|shape| (shape, tensor.dtype))),
                None => parts.push(whole(tensor.dtype)),
            },
            // `Optimizer2State.init_state`.
            Optimizer::Adam8bit if elements < LEAST_8BIT => parts.extend([whole(Dtype::F32), whole(Dtype::F32)]),
            Optimizer::Adam8bit => {
                if !states.iter().any(|state| state.dtype == Dtype::U8) {
                    // The values that the 256 bytes represent, with and without a sign. All parameters share them.
                    parts.extend([flat(256), flat(256)]);
                }
                let blocks = elements.div_ceil(BLOCK_8BIT);
                parts.extend([whole(Dtype::U8), whole(Dtype::U8), flat(blocks), flat(blocks)]);
            }
        }
        for (shape, dtype) in parts {
            states.push(self.empty(&shape, dtype, Class::Optimizer)?.in_order_of(tensor));
        }
        Ok(())
    }

    /// Runs `_single_tensor_adafactor`. Python variables keep their tensors until they are assigned again, even from
    /// one parameter to the next.
    fn adafactor(&self, tensors: &[&Tensor]) -> Result<()> {
        let (mut means, mut squared, mut update) = ([const { None }; 2], None, None);
        for tensor in tensors {
            let norm = || self.empty(&Shape::default(), tensor.dtype, Class::Optimizer);
            drop(norm()?);
            let estimate = if let Some(factors) = factors(&tensor.shape) {
                for (mean, shape) in means.iter_mut().zip(&factors) {
                    *mean = Some(self.empty(shape, tensor.dtype, Class::Optimizer)?);
                }
                let estimate = self.like(tensor, tensor.dtype)?;
                // The mean over all rows is a tensor.
                let mean = factors[0].with(factors[0].rank() - 2, 1);
                drop(self.empty(&mean, tensor.dtype, Class::Optimizer)?);
                estimate
            } else {
                squared = Some(self.like(tensor, tensor.dtype)?);
                self.like(tensor, tensor.dtype)?
            };
            update = Some(estimate);
            drop(norm()?);
        }
        drop((means, squared, update));
        Ok(())
    }

    /// Converts each gradient and then frees it, like Megatron-LM's `_copy_model_grads_to_main_grads`.
    fn gradients_of_masters(&self, state: &mut OptimizerState) -> Result<()> {
        let has_gradient: Vec<_> =
            trainable(&self.parameters.borrow()).map(|updated| (updated.number, updated.has_gradient)).collect();
        for ((number, has_gradient), master) in has_gradient.into_iter().zip(&state.masters) {
            if let Some(master) = master.as_ref().filter(|_| has_gradient) {
                state.gradients.push(self.empty(&master.shape, Dtype::F32, Class::Gradients)?);
                // The parameter still counts as having a gradient, because its `f32` copy has one.
                let empty = self.empty(&Shape::from([0]), Dtype::U8, Class::Gradients)?;
                self.parameters.borrow_mut()[number].grad = Some(empty);
            }
        }
        Ok(())
    }

    /// Allocates a tensor with the shape and memory order of another one.
    fn like(&self, tensor: &Tensor, dtype: Dtype) -> Result<Tensor> {
        Ok(self.empty(&tensor.shape, dtype, Class::Optimizer)?.in_order_of(tensor))
    }
}

/// Returns the shapes of Adafactor's `row_var` and `col_var`. `None` for vectors and numbers.
fn factors(shape: &Shape) -> Option<[Shape; 2]> {
    let before_last = shape.rank().checked_sub(2)?;
    Some([shape.with_last(1), shape.with(before_last, 1)])
}
