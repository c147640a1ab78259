//! Optimizers, as `torch.optim` runs them on a GPU: with `foreach`, which handles all parameters at once.

use serde::{Deserialize, Serialize};

use super::{Eager, Tensor, keep_order};
use crate::{class::Class, error::Error};

/// Which optimizer makes the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Optimizer {
    /// SGD without momentum. It has no state.
    Sgd,
    /// SGD with momentum: a copy of the gradients.
    Momentum,
    /// Adam and `AdamW`: two tensors for each parameter, and a temporary one while it runs.
    Adam,
    /// Lion: one tensor for each parameter, and a temporary one for one parameter at a time.
    Lion,
}

impl Optimizer {
    /// How many tensors each parameter has as state.
    pub const fn states(self) -> usize {
        match self {
            Self::Sgd => 0,
            Self::Momentum | Self::Lion => 1,
            Self::Adam => 2,
        }
    }
}

impl Eager {
    /// `step()`. The state is made in the first step, parameter by parameter.
    pub(crate) fn update(&self, optimizer: Optimizer, states: &mut Vec<Tensor>) -> Result<(), Error> {
        let parameters = self.with_gradients();
        let like = |parameter: &Tensor, class| {
            Ok::<_, Error>(keep_order(self.empty(&parameter.shape, parameter.dtype, class)?, parameter))
        };
        if states.is_empty() {
            for (_, parameter) in &parameters {
                for _ in 0..optimizer.states() {
                    states.push(like(parameter, Class::Optimizer)?);
                }
            }
        }
        match optimizer {
            Optimizer::Sgd | Optimizer::Momentum => {}
            // `_foreach_sqrt(exp_avg_sqs)`: for all parameters at the same time.
            Optimizer::Adam => {
                let roots = parameters.iter().map(|(_, parameter)| like(parameter, Class::Optimizer));
                drop(roots.collect::<Result<Vec<_>, _>>()?);
            }
            Optimizer::Lion => {
                for (_, parameter) in &parameters {
                    drop(like(parameter, Class::Optimizer)?);
                }
            }
        }
        Ok(())
    }
}
